"""Training dynamics through all stages (Fig. 4), and how the channel orders settled."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from strucspars.core.checks import FloatArray
from strucspars.core.hierarchy import num_groups
from strucspars.cost.text_table import percent
from strucspars.report.drawing import BLUE, FAINT, GREEN, INK, PURPLE, SEQUENTIAL, VERMILLION, NamedFigure, house_style
from strucspars.report.reading import EpochLayers, RunData
from strucspars.train.recipe import learning_stage


@dataclass(frozen=True, eq=False)
class Epochs:
    """The epochs of all stages on one axis, from 1, in the order they ran."""

    run: RunData

    @property
    def rows(self) -> list[Mapping[str, Any]]:
        """The metrics of every epoch."""
        return [row for row in self.run.rows if row["stage"] != "compress"]

    @property
    def stages(self) -> list[tuple[str, int, int]]:
        """Name, first and last epoch of every stage."""
        runs = [(stage, len(list(rows))) for stage, rows in groupby(self.rows, key=lambda row: row["stage"])]
        ends = np.cumsum([count for _, count in runs]).tolist()
        return [(stage, end - count + 1, end) for (stage, count), end in zip(runs, ends, strict=True)]

    @property
    def compression(self) -> tuple[int, Mapping[str, Any]] | None:
        """How many epochs ran before the compression, and its metrics; None if there was none yet."""
        return next(((place, row) for place, row in enumerate(self.run.rows) if row["stage"] == "compress"), None)

    def curve(self, metric: str) -> FloatArray:
        """`(epochs,)`; NaN where an epoch lacks the metric."""
        return np.array([row.get(metric, np.nan) for row in self.rows], dtype=np.float64)

    def has(self, metric: str) -> bool:
        """Whether some epoch has the metric."""
        return bool(np.isfinite(self.curve(metric)).any())

    @property
    def target(self) -> float | None:
        """The removed fraction that the recipe asks for."""
        recipe = self.run.recipe
        return {"slimming": recipe.slimming.target, "strucspars": recipe.sparsify.known_target}.get(recipe.kind)

    @property
    def budget(self) -> str:
        """What the removed fraction counts."""
        budget = self.run.recipe.sparsify.budget if self.run.recipe.kind == "strucspars" else "params"
        return "MACs" if budget == "macs" else budget


def dynamics_figure(run: RunData) -> NamedFigure | None:
    """Draw the curves below each other, with the compression marked in all of them; None before the first epoch."""
    epochs = Epochs(run)
    if not epochs.rows:
        return None
    panels: dict[Callable[[Axes, Epochs], None], bool] = {
        _draw_loss: epochs.has("train_loss") or epochs.has("test_loss"),
        _draw_accuracy: True,
        partial(_draw_one, metric="lambda", colour=GREEN, form="{x:g}"): epochs.has("lambda"),
        _draw_removed: epochs.has("removed_fraction"),
        partial(_draw_one, metric="annealed", colour=INK, form="{x:.0%}", top=1.05): epochs.has("annealed"),
        _draw_levels: bool(run.dynamics),
    }
    drawn = [panel for panel, is_known in panels.items() if is_known]
    with house_style():
        figure = Figure(figsize=(7.2, 0.6 + 1.55 * len(drawn)), layout="constrained")
        axes = list(figure.subplots(len(drawn), 1, sharex=True, squeeze=False)[:, 0])
        for panel, axis in zip(drawn, axes, strict=True):
            panel(axis, epochs)
        axes[-1].set_xlim(0.5, len(epochs.rows) + 0.5)
        if epochs.compression is not None:
            after = epochs.compression[0] + 0.5
            for axis in axes:
                axis.axvline(after, color=FAINT, linestyle="--", linewidth=1.2)
            _write(axes[0], "compression", (after, 1.0), offset=(4, -9), xycoords=("data", "axes fraction"))
            if after < 1:
                # Without a first stage, the edge would cut the marks in two.
                axes[-1].set_xlim(left=0.5 - 0.03 * len(epochs.rows))
        figure.align_ylabels(axes)
        axes[-1].set_xlabel(f"epoch ({', then '.join(stage for stage, *_ in epochs.stages)})")
        axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    return NamedFigure(
        name="dynamics", title="Training dynamics", caption=_caption(epochs), alt=_alt(epochs), figure=figure
    )


def _caption(epochs: Epochs) -> str:
    sentences = ["Every epoch that has run."]
    if epochs.compression is not None:
        crosses = "the crosses are the accuracy right before and right after it"
        sentences.append(f"The dashed line is the compression; {crosses}.")
    if epochs.has("lambda"):
        sentences.append("lambda is the strength of the structured penalty.")
    if epochs.has("removed_fraction"):
        sentences.append("The removed fraction is what the group levels of that epoch would remove.")
    if epochs.has("annealed"):
        sentences.append(
            "Test loss and accuracy are those of the network without what the plan removes, as it would be deployed; "
            "the grey line is the accuracy with it. Annealed: the share of their size that these connections have lost."
        )
    return " ".join(sentences)


def _plot(axis: Axes, epochs: Epochs, metric: str, *, colour: str, label: str = "") -> None:
    """A line per stage: nothing is measured between two stages."""
    values = epochs.curve(metric)
    for place, (_, first, last) in enumerate(epochs.stages):
        marker = "." if first == last else ""
        shown = "" if place else label
        axis.plot(range(first, last + 1), values[first - 1 : last], color=colour, label=shown, marker=marker)


def _draw_loss(axis: Axes, epochs: Epochs) -> None:
    _plot(axis, epochs, "train_loss", colour=BLUE, label="train")
    _plot(axis, epochs, "test_loss", colour=VERMILLION, label="test")
    axis.set_ylabel("loss")
    # Losses of the first steps may be huge and would flatten the rest.
    losses = np.concatenate([epochs.curve("train_loss"), epochs.curve("test_loss")])
    axis.set_ylim(0, 1.1 * float(np.nanquantile(losses, 0.98)) or 1.0)
    axis.legend(loc="upper right", ncols=2)


def _draw_accuracy(axis: Axes, epochs: Epochs) -> None:
    _plot(axis, epochs, "train_top1", colour=BLUE, label="train")
    if epochs.has("uncut_top1"):
        _plot(axis, epochs, "uncut_top1", colour=FAINT, label="test, not cut")
    _plot(axis, epochs, "test_top1", colour=VERMILLION, label="test")
    if epochs.compression is not None:
        after, row = epochs.compression
        accuracies = [row[key] for key in ("before_top1", "test_top1") if key in row]
        axis.plot([after + 0.5] * len(accuracies), accuracies, "x", color=INK, markersize=6, markeredgewidth=1.6)
        if "test_top1" in row:
            _write(axis, percent(row["test_top1"]), (after + 0.5, row["test_top1"]), offset=(7, -3))
    axis.set_ylabel("top-1 accuracy")
    axis.yaxis.set_major_formatter("{x:.0%}")
    axis.set_ylim(top=1.0)
    axis.legend(loc="lower right", ncols=3)


def _draw_one(axis: Axes, epochs: Epochs, *, metric: str, colour: str, form: str, top: float | None = None) -> None:
    _plot(axis, epochs, metric, colour=colour)
    axis.set_ylabel(metric)
    axis.yaxis.set_major_formatter(form)
    axis.set_ylim(0, top)


def _draw_removed(axis: Axes, epochs: Epochs) -> None:
    _plot(axis, epochs, "removed_fraction", colour=PURPLE)
    target = epochs.target
    if target is not None:
        axis.axhline(target, color=FAINT, linestyle=":")
        _write(
            axis, f"target {target:.0%}", (1.0, target), offset=(-4, 3), xycoords=("axes fraction", "data"), ha="right"
        )
    axis.set_ylabel(f"removed fraction\nof {epochs.budget}")
    axis.yaxis.set_major_formatter("{x:.0%}")
    axis.set_ylim(0, 1.18 * max(float(np.nanmax(epochs.curve("removed_fraction"))), target or 0.0) or 1.0)


def _draw_levels(axis: Axes, epochs: Epochs) -> None:
    levels = np.stack([layers.group_level for layers in epochs.run.dynamics], axis=1)
    highest = int(levels.max())
    colours = matplotlib.colormaps[SEQUENTIAL](np.linspace(0.12, 1.0, max(highest, 2)))
    # Each from the bottom up, the highest first: stacked edge to edge, the background would show between them.
    for level in range(highest, 0, -1):
        groups = num_groups(level)
        label = f"{groups} group{'s' if groups > 1 else ''}"
        shares = (levels <= level).mean(axis=0)
        axis.stairs(shares, np.arange(len(shares) + 1) + 0.5, fill=True, color=colours[level - 1], label=label)
    axis.set_ylabel("layers by\nnumber of groups")
    axis.set_ylim(0, 1)
    axis.grid(visible=False)
    axis.yaxis.set_major_formatter("{x:.0%}")
    # Above the panel, which bars of a run in its first stage fill.
    axis.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=6, borderaxespad=0.2, handlelength=1.2, reverse=True)


def _write(axis: Axes, words: str, place: tuple[float, float], *, offset: tuple[int, int], **style: Any) -> None:
    """A note beside a place, with other options of matplotlib's `annotate`."""
    axis.annotate(words, place, xytext=offset, textcoords="offset points", fontsize="small", **style)


def _alt(epochs: Epochs) -> str:
    stages = ", ".join(f"{stage}: epochs {first} to {last}" for stage, first, last in epochs.stages)
    top1 = epochs.curve("test_top1")
    first, best, last = percent(top1[0]), percent(top1.max()), percent(top1[-1])
    sentences = [
        f"Curves over {len(top1)} epochs ({stages}).",
        f"Test top-1 starts at {first}, is {best} at best and {last} at the end.",
    ]
    after, row = epochs.compression or (0, {})
    if "before_top1" in row and "test_top1" in row:
        change = f"from {percent(row['before_top1'])} to {percent(row['test_top1'])}"
        sentences.append(f"Compression after epoch {after} takes it {change}.")
    if epochs.has("lambda"):
        sentences.append(f"lambda rises to {np.nanmax(epochs.curve('lambda')):.3g}.")
    if epochs.has("removed_fraction"):
        curve = epochs.curve("removed_fraction")
        target = "" if epochs.target is None else f", the target is {percent(epochs.target)}"
        reached = percent(curve[np.isfinite(curve)][-1])
        sentences.append(f"The removed fraction of {epochs.budget} comes to {reached}{target}.")
    annealed = epochs.curve("annealed")
    if (annealed == 1).any():
        sentences.append(f"What the plan removes is zero from epoch {int((annealed == 1).argmax()) + 1} on.")
    return " ".join(sentences)


def churn_figure(run: RunData) -> NamedFigure | None:
    """Draw the mean churn over all layers, and below it every stored layer as a row of colours; None if not known."""
    stage = learning_stage(run.recipe)
    rows = [row for row in run.rows if row["stage"] == stage and "mean_churn" in row]
    if not rows:
        return None
    epochs, mean = (np.array([row[key] for row in rows], dtype=np.float64) for key in ("epoch", "mean_churn"))
    quarter = max(1, len(mean) // 4)
    alt = (
        f"Mean churn of the layers over {len(epochs)} epochs: {percent(float(mean[:quarter].mean()))} in the "
        f"first quarter, {percent(float(mean[-quarter:].mean()))} in the last, {percent(float(mean.max()))} at most."
    )
    with house_style():
        figure = Figure(figsize=(7.2, 4.2 if run.dynamics else 2.0), layout="constrained")
        axes = figure.subplots(2 if run.dynamics else 1, 1, sharex=True, squeeze=False)[:, 0]
        axes[0].plot(epochs, mean, color=BLUE, marker="." if len(epochs) < 3 else "")
        axes[0].set_ylabel("mean churn")
        axes[0].yaxis.set_major_formatter(_percents)
        axes[0].set_ylim(bottom=0)
        if run.dynamics:
            _draw_layer_churn(figure, axes[1], run.dynamics)
            last = run.dynamics[-1].churn
            alt += f" In the last stored epoch {(last == 0).sum()} of {len(last)} layers did not change at all."
        axes[-1].set_xlabel(f"epoch ({stage})")
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


def _percents(value: float, _: object) -> str:
    return f"{100 * value:.3g}%"


def _draw_layer_churn(figure: Figure, axis: Axes, stored: Sequence[EpochLayers]) -> None:
    churn = np.stack([layers.churn for layers in stored], axis=1)
    layer_edges, epoch_edges = (np.arange(length + 1) + 0.5 for length in churn.shape)
    brightest = max(float(np.nanquantile(churn, 0.99)), 0.01)
    # As an image: a path for every cell would be megabytes of SVG.
    mesh = axis.pcolormesh(epoch_edges, layer_edges, churn, cmap=SEQUENTIAL, vmin=0, vmax=brightest, rasterized=True)
    axis.invert_yaxis()
    axis.set_ylabel("layer, in\nnetwork order")
    axis.yaxis.set_major_locator(MaxNLocator(integer=True))
    axis.grid(visible=False)
    bar = figure.colorbar(mesh, ax=axis, pad=0.01, aspect=12, extend="max", format=_percents)
    bar.set_label("churn")
