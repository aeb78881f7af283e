"""Training dynamics through all stages (Fig. 4), and how the channel orders settled."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from strucspars.core.checks import FloatArray
from strucspars.core.hierarchy import num_groups
from strucspars.cost.text_table import percent
from strucspars.report.drawing import BLUE, FAINT, GREEN, INK, PURPLE, SEQUENTIAL, VERMILLION, NamedFigure, house_style
from strucspars.report.reading import EpochLayers, RunData

CURVES = ("train_loss", "test_loss", "train_top1", "test_top1", "lambda", "removed_fraction")


@dataclass(frozen=True, kw_only=True)
class StageSpan:
    """A stage and its epochs on the common axis, first and last."""

    stage: str
    first: int
    last: int


@dataclass(frozen=True, eq=False, kw_only=True)
class Dynamics:
    """What is plotted. Epochs of all stages stand on one axis, from 1, in the order they ran.

    Attributes:
        stages: those with epochs.
        curves: by the names of the metrics, `(epochs,)`; NaN where an epoch has none.
        compressed_after: epochs before the compression; None if there was none yet.
        before_top1, after_top1: accuracy right before and right after compression.
        target: removed fraction that was asked for; None if none was.
        budget: what it counts: `params` or `MACs`.
        level_epochs: epochs whose levels were stored.
        level_shares: `(levels, len(level_epochs))`: share of the layers on every group level from 1.
    """

    stages: tuple[StageSpan, ...]
    curves: Mapping[str, FloatArray]
    compressed_after: int | None
    before_top1: float | None
    after_top1: float | None
    target: float | None
    budget: str
    level_epochs: FloatArray
    level_shares: FloatArray

    @property
    def epochs(self) -> int:
        """Epochs of all stages."""
        return len(self.curves["test_top1"])

    def has(self, curve: str) -> bool:
        """Whether some epoch has a value of the curve."""
        return bool(np.isfinite(self.curves[curve]).any())


def dynamics_of(run: RunData) -> Dynamics:
    """The curves of a run, as far as it has come."""
    epochs = [row for row in run.rows if row["stage"] != "compress"]
    places = [place for place, row in enumerate(run.rows) if row["stage"] == "compress"]
    compressed: Mapping[str, Any] = run.rows[places[0]] if places else {}
    first_stage = {row["epoch"]: place for place, row in enumerate(epochs, start=1) if row["stage"] == "sparsify"}
    stored = [layers for layers in run.dynamics if layers.epoch in first_stage]
    target, budget = _target(run)
    return Dynamics(
        stages=tuple(_stages(epochs)),
        curves={name: np.array([row.get(name, np.nan) for row in epochs], dtype=np.float64) for name in CURVES},
        compressed_after=places[0] if places else None,
        before_top1=compressed.get("before_top1"),
        after_top1=compressed.get("test_top1"),
        target=target,
        budget=budget,
        level_epochs=np.array([first_stage[layers.epoch] for layers in stored], dtype=np.float64),
        level_shares=_level_shares(stored),
    )


def _target(run: RunData) -> tuple[float | None, str]:
    if run.recipe.kind == "dense":
        return None, "params"
    if run.recipe.kind == "slimming":
        return run.recipe.slimming.target, "params"
    return run.recipe.sparsify.target, {"macs": "MACs"}.get(run.recipe.sparsify.budget, run.recipe.sparsify.budget)


def _stages(epochs: Sequence[Mapping[str, Any]]) -> Iterator[StageSpan]:
    for stage, rows in groupby(enumerate(epochs, start=1), key=lambda each: each[1]["stage"]):
        places = [place for place, _ in rows]
        yield StageSpan(stage=stage, first=places[0], last=places[-1])


def _level_shares(stored: Sequence[EpochLayers]) -> FloatArray:
    if not stored or not len(stored[0].group_level):
        return np.zeros((0, len(stored)))
    levels = np.stack([layers.group_level for layers in stored], axis=1)
    shares: FloatArray = np.stack([(levels == level).mean(axis=0) for level in range(1, int(levels.max()) + 1)])
    return shares


def dynamics_figure(data: Dynamics) -> NamedFigure:
    """Draw the curves below each other, with the compression marked in all of them."""
    known = {
        _draw_loss: data.has("train_loss") or data.has("test_loss"),
        _draw_accuracy: True,
        _draw_lambda: data.has("lambda"),
        _draw_removed: data.has("removed_fraction"),
        _draw_levels: data.level_shares.size > 0,
    }
    panels = [panel for panel, is_known in known.items() if is_known]
    with house_style():
        figure = Figure(figsize=(7.2, 0.6 + 1.55 * len(panels)), layout="constrained")
        axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
        for panel, axis in zip(panels, axes, strict=True):
            panel(axis, data)
            if data.compressed_after is not None:
                axis.axvline(data.compressed_after + 0.5, color=FAINT, linestyle="--", linewidth=1.2)
        if data.compressed_after is not None:
            place = data.compressed_after + 0.5, 1.0
            _write(axes[0], "compression", place, offset=(4, -9), where=("data", "axes fraction"))
        figure.align_ylabels(list(axes))
        axes[-1].set_xlabel(f"epoch ({', then '.join(span.stage for span in data.stages)})")
        # Without a first stage, the edge would cut the marks of the compression in two.
        margin = 0.03 * data.epochs if data.compressed_after == 0 else 0
        axes[-1].set_xlim(0.5 - margin, data.epochs + 0.5)
        axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    return NamedFigure(
        name="dynamics",
        title="Training dynamics",
        caption=_caption(data),
        alt=_alt(data),
        figure=figure,
    )


def _caption(data: Dynamics) -> str:
    sentences = ["Every epoch that has run."]
    if data.compressed_after is not None:
        sentences = [
            "Every epoch of all stages.",
            "The dashed line is the compression; the crosses are the accuracy right before and right after it.",
        ]
    if data.has("lambda"):
        sentences.append("lambda is the strength of the structured penalty.")
    if data.has("removed_fraction"):
        sentences.append("The removed fraction is what the group levels of that epoch would remove.")
    return " ".join(sentences)


def _plot(axis: Axes, data: Dynamics, curve: str, *, colour: str, label: str) -> None:
    """A line per stage: nothing is measured between two stages."""
    for place, span in enumerate(data.stages):
        epochs = np.arange(span.first, span.last + 1)
        values = data.curves[curve][span.first - 1 : span.last]
        marker = "." if len(epochs) == 1 else ""
        axis.plot(epochs, values, color=colour, label="" if place else label, marker=marker)


def _draw_loss(axis: Axes, data: Dynamics) -> None:
    _plot(axis, data, "train_loss", colour=BLUE, label="train")
    _plot(axis, data, "test_loss", colour=VERMILLION, label="test")
    axis.set_ylabel("loss")
    # Losses of the first steps may be huge and would flatten the rest.
    finite = np.concatenate([data.curves[name][np.isfinite(data.curves[name])] for name in ("train_loss", "test_loss")])
    axis.set_ylim(0, 1.1 * float(np.quantile(finite, 0.98)) or 1.0)
    axis.legend(loc="upper right", ncols=2)


def _draw_accuracy(axis: Axes, data: Dynamics) -> None:
    _plot(axis, data, "train_top1", colour=BLUE, label="train")
    _plot(axis, data, "test_top1", colour=VERMILLION, label="test")
    if data.compressed_after is not None:
        moments = [number for number in (data.before_top1, data.after_top1) if number is not None]
        places = [data.compressed_after + 0.5] * len(moments)
        axis.plot(places, moments, "x", color=INK, markersize=6, markeredgewidth=1.6)
        if data.after_top1 is not None:
            _write(axis, percent(data.after_top1), (places[-1], data.after_top1), offset=(7, -3))
    axis.set_ylabel("top-1 accuracy")
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
    axis.set_ylim(top=1.0)
    axis.legend(loc="lower right", ncols=2)


def _draw_lambda(axis: Axes, data: Dynamics) -> None:
    _plot(axis, data, "lambda", colour=GREEN, label="")
    axis.set_ylabel("lambda")
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_ylim(bottom=0)


def _draw_removed(axis: Axes, data: Dynamics) -> None:
    _plot(axis, data, "removed_fraction", colour=PURPLE, label="")
    if data.target is not None:
        axis.axhline(data.target, color=FAINT, linestyle=":")
        place, where = (1.0, data.target), ("axes fraction", "data")
        _write(axis, f"target {data.target:.0%}", place, offset=(-4, 3), where=where, side="right")
    axis.set_ylabel(f"removed fraction\nof {data.budget}")
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
    axis.set_ylim(0, 1.18 * max(float(np.nanmax(data.curves["removed_fraction"])), data.target or 0.0) or 1.0)


def _draw_levels(axis: Axes, data: Dynamics) -> None:
    count = len(data.level_shares)
    colours = matplotlib.colormaps[SEQUENTIAL](np.linspace(0.12, 1.0, max(count, 2)))[:count]
    edges, by_level = epoch_columns(data.level_epochs, data.level_shares)
    # Each from the bottom up, the highest first: stacked edge to edge, the background would show between them.
    for place in reversed(range(count)):
        shares = by_level[: place + 1].sum(axis=0)
        groups = num_groups(place + 1)
        label = f"{groups} group{'s' if groups > 1 else ''}"
        axis.stairs(shares, edges, fill=True, color=colours[place], label=label)
    axis.set_ylabel("layers by\nnumber of groups")
    axis.set_ylim(0, 1)
    axis.grid(visible=False)
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
    # Above the panel, which bars of a run in its first stage fill.
    axis.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=6, borderaxespad=0.2, handlelength=1.2, reverse=True)


def _write(
    axis: Axes,
    words: str,
    place: tuple[float, float],
    *,
    offset: tuple[int, int],
    where: Any = "data",
    side: str = "left",
) -> None:
    """A note beside a place; `where` and `side` as in matplotlib's `xycoords` and `ha`."""
    axis.annotate(words, place, xycoords=where, xytext=offset, textcoords="offset points", ha=side, fontsize="small")


def _alt(data: Dynamics) -> str:
    parts = [f"{span.stage}: epochs {span.first} to {span.last}" for span in data.stages]
    sentences = [f"Curves over {data.epochs} epochs ({', '.join(parts)})."]
    first, best, last = data.curves["test_top1"][0], data.curves["test_top1"].max(), data.curves["test_top1"][-1]
    sentences.append(
        f"Test top-1 starts at {percent(first)}, is {percent(best)} at best and {percent(last)} at the end."
    )
    if data.before_top1 is not None and data.after_top1 is not None:
        sentences.append(
            f"Compression after epoch {data.compressed_after} takes it from {percent(data.before_top1)} to "
            f"{percent(data.after_top1)}."
        )
    if data.has("lambda"):
        sentences.append(f"lambda rises to {np.nanmax(data.curves['lambda']):.3g}.")
    if data.has("removed_fraction"):
        removed = data.curves["removed_fraction"][np.isfinite(data.curves["removed_fraction"])][-1]
        target = "" if data.target is None else f", the target is {percent(data.target)}"
        sentences.append(f"The removed fraction of {data.budget} comes to {percent(removed)}{target}.")
    return " ".join(sentences)


def epoch_columns(epochs: FloatArray, values: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Edges and values of columns from the first to the last epoch; NaN where one in between is missing.

    Args:
        epochs: whole numbers, ascending, at least one.
        values: `(rows, len(epochs))`.
    """
    places = (epochs - epochs[0]).astype(np.int64)
    columns = np.full((len(values), int(places[-1]) + 1), np.nan)
    columns[:, places] = values
    return epochs[0] - 0.5 + np.arange(columns.shape[1] + 1), columns


def churn_figure(run: RunData) -> NamedFigure | None:
    """Draw the mean churn over all layers, and below it every stored layer as a row of colours; None if not known."""
    rows = [row for row in run.rows if row["stage"] == "sparsify" and "mean_churn" in row]
    if not rows:
        return None
    epochs = np.array([row["epoch"] for row in rows], dtype=np.float64)
    mean = np.array([row["mean_churn"] for row in rows], dtype=np.float64)
    quarter = max(1, len(mean) // 4)
    alt = (
        f"Mean churn of the layers over {len(epochs)} epochs: {percent(float(mean[:quarter].mean()))} in the "
        f"first quarter, {percent(float(mean[-quarter:].mean()))} in the last, {percent(float(mean.max()))} at most."
    )
    has_layers = bool(run.dynamics) and len(run.dynamics[-1].churn) > 0
    with house_style():
        figure = Figure(figsize=(7.2, 4.2 if has_layers else 2.0), layout="constrained")
        axes = figure.subplots(2 if has_layers else 1, 1, sharex=True, squeeze=False)[:, 0]
        axes[0].plot(epochs, mean, color=BLUE, marker="." if len(epochs) < 3 else "")
        axes[0].set_ylabel("mean churn")
        axes[0].yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.3g}%"))
        axes[0].set_ylim(bottom=0)
        if has_layers:
            _draw_layer_churn(figure, axes[1], run.dynamics)
            last = run.dynamics[-1].churn
            still = int((last == 0).sum())
            alt += f" In the last stored epoch {still} of {len(last)} layers did not change at all."
        axes[-1].set_xlabel("epoch (sparsify)")
        axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
        axes[-1].set_xlim(0.5, float(epochs.max()) + 0.5)
    return NamedFigure(
        name="churn",
        title="How the channel orders settled",
        caption=(
            "Churn: share of a layer's channels that an epoch's new orders move to another group of the next level. "
            "Above the mean over all layers, below every layer, the first at the top."
        ),
        alt=alt,
        figure=figure,
    )


def _draw_layer_churn(figure: Figure, axis: Axes, stored: Sequence[EpochLayers]) -> None:
    churn = np.stack([layers.churn for layers in stored], axis=1)
    edges, by_layer = epoch_columns(np.array([layers.epoch for layers in stored], dtype=np.float64), churn)
    brightest = max(float(np.nanquantile(churn, 0.99)), 0.01)
    # As an image: a path for every cell would be megabytes of SVG.
    mesh = axis.pcolormesh(
        edges, np.arange(len(churn) + 1) + 0.5, by_layer, cmap=SEQUENTIAL, vmin=0, vmax=brightest, rasterized=True
    )
    axis.invert_yaxis()
    axis.set_ylabel("layer, in\nnetwork order")
    axis.yaxis.set_major_locator(MaxNLocator(integer=True))
    axis.grid(visible=False)
    bar = figure.colorbar(mesh, ax=axis, pad=0.01, aspect=12, extend="max")
    bar.set_label("churn")
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.3g}%"))
