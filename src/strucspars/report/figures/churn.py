"""How the permutations settled: the share of channels that change their group from epoch to epoch."""

from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from strucspars.core.checks import FloatArray
from strucspars.report.drawing import BLUE, SEQUENTIAL, NamedFigure, house_style
from strucspars.report.figures.epoch_columns import epoch_columns
from strucspars.report.reading import RunData
from strucspars.train.outcome_text import percent


@dataclass(frozen=True, eq=False, kw_only=True)
class Churn:
    """What is plotted.

    Attributes:
        epochs: of the first stage, `(epochs,)`.
        mean: over the layers, `(epochs,)`.
        layer_epochs: those epochs whose layers were stored.
        by_layer: `(layers, len(layer_epochs))`; no layers where nothing was stored.
    """

    epochs: FloatArray
    mean: FloatArray
    layer_epochs: FloatArray
    by_layer: FloatArray


def churn_of(run: RunData) -> Churn:
    """Churn from the metrics, and of every layer where it was stored."""
    rows = [row for row in run.rows if row["stage"] == "sparsify" and "mean_churn" in row]
    layers = [layers.churn for layers in run.dynamics]
    return Churn(
        epochs=np.array([row["epoch"] for row in rows], dtype=np.float64),
        mean=np.array([row["mean_churn"] for row in rows], dtype=np.float64),
        layer_epochs=np.array([layers.epoch for layers in run.dynamics], dtype=np.float64),
        by_layer=np.stack(layers, axis=1) if layers else np.zeros((0, 0)),
    )


def churn_figure(data: Churn) -> NamedFigure:
    """Draw the mean over all layers, and below it every layer as a row of colours."""
    has_layers = data.by_layer.size > 0
    with house_style():
        figure = Figure(figsize=(7.2, 4.2 if has_layers else 2.0), layout="constrained")
        axes = figure.subplots(2 if has_layers else 1, 1, sharex=True, squeeze=False)[:, 0]
        axes[0].plot(data.epochs, data.mean, color=BLUE, marker="." if len(data.epochs) < 3 else "")
        axes[0].set_ylabel("mean churn")
        axes[0].yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.3g}%"))
        axes[0].set_ylim(bottom=0)
        if has_layers:
            _draw_layers(figure, axes[1], data)
        axes[-1].set_xlabel("epoch (sparsify)")
        axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
        axes[-1].set_xlim(0.5, float(data.epochs.max(initial=1.0)) + 0.5)
    return NamedFigure(
        name="churn",
        title="How the channel orders settled",
        caption=(
            "Churn: share of a layer's channels that an epoch's new orders move to another group of the next level. "
            "Above the mean over all layers, below every layer, the first at the top."
        ),
        alt=_alt(data),
        figure=figure,
    )


def _draw_layers(figure: Figure, axis: Axes, data: Churn) -> None:
    edges, by_layer = epoch_columns(data.layer_epochs, data.by_layer)
    rows = np.arange(len(data.by_layer) + 1) + 0.5
    brightest = max(float(np.nanquantile(data.by_layer, 0.99)), 0.01)
    # As one picture: a path for every cell would be megabytes of SVG.
    mesh = axis.pcolormesh(edges, rows, by_layer, cmap=SEQUENTIAL, vmin=0, vmax=brightest, rasterized=True)
    axis.invert_yaxis()
    axis.set_ylabel("layer, in\nnetwork order")
    axis.yaxis.set_major_locator(MaxNLocator(integer=True))
    axis.grid(visible=False)
    bar = figure.colorbar(mesh, ax=axis, pad=0.01, aspect=12, extend="max")
    bar.set_label("churn")
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.3g}%"))


def _alt(data: Churn) -> str:
    if not len(data.epochs):
        return "No epoch with a churn is finished yet."
    quarter = max(1, len(data.mean) // 4)
    sentences = [
        f"Mean churn of the layers over {len(data.epochs)} epochs: {percent(float(data.mean[:quarter].mean()))} in the "
        f"first quarter, {percent(float(data.mean[-quarter:].mean()))} in the last, "
        f"{percent(float(data.mean.max()))} at most."
    ]
    if data.by_layer.size:
        still = int((data.by_layer[:, -1] == 0).sum())
        sentences.append(f"In the last stored epoch {still} of {len(data.by_layer)} layers did not change at all.")
    return " ".join(sentences)
