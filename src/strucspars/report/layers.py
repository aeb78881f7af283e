"""The layers of a run: groups (Figs. 5 and 6), importance and learned orders; one layer in a figure (Figs. 1, 2)."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from strucspars.core.checks import FloatArray, IntArray
from strucspars.core.hierarchy import connection_mask, group_penalty, max_group_level, num_groups
from strucspars.core.importance import kept_norm_by_level
from strucspars.core.permutation import inverse
from strucspars.cost.text_table import percent
from strucspars.report.drawing import (
    BLUE,
    FAINT,
    PALETTE,
    SEQUENTIAL,
    VERMILLION,
    NamedFigure,
    drawable,
    house_style,
    slug,
)
from strucspars.report.reading import RunData, StoredMatrix

# The few largest entries of a layer would leave all others dark.
BRIGHT_QUANTILE = 0.995
# Lines closer than this would hide what they divide.
MOST_BOUNDARIES = 64
LARGEST_SIDE = 128
CHOSEN_LAYERS = 3
# More names would overlap on the axis of the cardinality; the layer table has them all.
MOST_NAMES = 60


@dataclass(frozen=True, eq=False, kw_only=True)
class LayerImportance:
    """One layer at compression; of a run in its first stage, as of its last checkpoint.

    Attributes:
        place: in network order, from 0.
        weight_shape: of the dense weight, `(C_out, C_in, *kernel)`.
        group_level: of the plan, or of the last epoch.
        largest_level: that the layer may reach.
        kept_norm: share of the norm that the levels 1, 2, ... keep; empty where not known.
        out_perm, in_perm: the learned orders, `perm[new] = old`.
        start: S before training; None if it was not stored.
        before: S in the network's channel order; None likewise.
        permuted: S' = `S[out_perm][:, in_perm]`; None likewise.
    """

    place: int
    name: str
    weight_shape: tuple[int, ...]
    group_level: int
    largest_level: int
    kept_norm: tuple[float, ...]
    out_perm: IntArray
    in_perm: IntArray
    start: FloatArray | None
    before: FloatArray | None
    permuted: FloatArray | None

    @property
    def num_groups(self) -> int:
        """Number of groups of the level."""
        return num_groups(self.group_level)

    @property
    def halvings(self) -> int:
        """How many halvings R_g penalises: those of the level, and one more while there is one (Sec. 3.3)."""
        return min(self.group_level, self.largest_level - 1)

    @property
    def kept_at_level(self) -> float | None:
        """Share of the norm that the layer's own groups keep; None where not known."""
        return self.kept_norm[self.group_level - 1] if self.group_level <= len(self.kept_norm) else None

    @property
    def alt(self) -> str:
        """What is to be seen of the layer, in words and numbers."""
        outputs, inputs = self.weight_shape[:2]
        groups = f"{self.num_groups} group{'s' if self.num_groups > 1 else ''} (group level {self.group_level})"
        words = f"{drawable(self.name, 80)}: {outputs} x {inputs} channels, {groups}."
        if not self.kept_norm:
            return words
        kept = ", ".join(f"level {level} {percent(share)}" for level, share in enumerate(self.kept_norm, start=1))
        return f"{words} Kept norm: {kept}."


def largest_level(run: RunData, weight_shape: tuple[int, ...]) -> int:
    """Largest group level that a layer of the run may reach."""
    return max_group_level(*weight_shape[:2], min_channels_per_group=run.recipe.sparsify.min_channels_per_group)


def layer_importances(run: RunData) -> Iterator[LayerImportance]:
    """Every layer that may be grouped, in network order; none before the end of the first epoch.

    One at a time: all matrices of a large network in double precision are gigabytes.
    """
    matrices = run.importance.get("end") or run.importance.get("now") or {}
    starts = run.importance.get("start") or {}
    for place, (name, (group_level, out_perm, in_perm)) in enumerate(_groupings(run).items()):
        shape = run.weight_shapes[name]
        before = _doubled(matrices.get(name))
        permuted = None if before is None else before[out_perm][:, in_perm]
        yield LayerImportance(
            place=place,
            name=name,
            weight_shape=shape,
            group_level=group_level,
            largest_level=largest_level(run, shape),
            kept_norm=_kept_norm(run, place, permuted),
            out_perm=out_perm,
            in_perm=in_perm,
            start=_doubled(starts.get(name)),
            before=before,
            permuted=permuted,
        )


def _groupings(run: RunData) -> dict[str, tuple[int, IntArray, IntArray]]:
    """Level and orders of every layer, of the plan or of the last stored epoch."""
    if run.plan is not None:
        return {name: (layer.group_level, layer.out_perm, layer.in_perm) for name, layer in run.plan.layers.items()}
    if not run.dynamics:
        return {}
    last = run.dynamics[-1]
    levels = last.group_level.tolist()
    return dict(zip(run.weight_shapes, zip(levels, last.out_perm, last.in_perm, strict=True), strict=True))


def cardinality_figure(run: RunData) -> NamedFigure | None:
    """Draw the number of groups of every layer on an axis of doublings, and a mark for what its widths allow.

    None before the end of the first epoch.
    """
    groupings = _groupings(run)
    if not groupings:
        return None
    count = len(groupings)
    groups = np.array([num_groups(level) for level, _, _ in groupings.values()], dtype=np.int64)
    largest = [num_groups(largest_level(run, shape)) for shape in run.weight_shapes.values()]
    kernels = np.array(["x".join(map(str, shape[2:])) or "1x1" for shape in run.weight_shapes.values()])
    places = np.arange(1, count + 1)
    handles = []
    with house_style():
        size = 7.2 if count <= MOST_NAMES / 2 else 9.0, 3.9 if count <= MOST_NAMES else 2.9
        figure = Figure(figsize=size, layout=ConstrainedLayoutEngine(h_pad=0.09))
        axis = figure.subplots()
        for kind, colour in zip(sorted(set(kernels.tolist())), itertools.cycle(PALETTE), strict=False):
            chosen = kernels == kind
            axis.vlines(places[chosen], 0.7, groups[chosen], color=colour, linewidth=max(1.0, min(4.0, 160 / count)))
            mark_size = 4.0 if count <= MOST_NAMES else 2.5
            axis.plot(places[chosen], groups[chosen], "o", color=colour, markersize=mark_size)
            handles.append(Line2D([], [], color=colour, marker="o", markersize=4, label=f"compressed, {kind}"))
        axis.axhline(1, color=FAINT, linewidth=1.0)
        axis.plot(places, largest, "_", color=FAINT, markersize=5)
        handles.append(Line2D([], [], color=FAINT, linewidth=1.0, label="dense"))
        handles.append(Line2D([], [], color=FAINT, marker="_", linestyle="", label="largest"))
        axis.set_yscale("log", base=2)
        axis.set_ylim(0.7, 2.0 * max(largest))
        axis.yaxis.set_major_locator(LogLocator(base=2, numticks=16))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.yaxis.set_minor_locator(NullLocator())
        axis.set_ylabel("num_groups (cardinality)")
        axis.set_xlim(0.2, count + 0.8)
        axis.grid(visible=False, axis="x")
        if count <= MOST_NAMES:
            axis.set_xticks(places, [drawable(name, 26) for name in groupings], rotation=90, fontsize=7.5)
        axis.set_xlabel("layer, in network order")
        axis.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1), ncols=5, borderaxespad=0.2)
    when = "after the last epoch" if run.plan is None else "after compression"
    counts = ", ".join(f"{(groups == each).sum()} with {each}" for each in sorted(set(groups.tolist())) if each > 1)
    return NamedFigure(
        name="cardinality",
        title="Cardinality of every layer",
        caption=(
            f"Number of groups of every layer {when}; before, every layer is dense, with one group (the lower line). "
            "The grey mark is the largest number of groups that the layer's widths allow."
        ),
        alt=(
            f"{(groups > 1).sum()} of {count} layers have more than one group {when}{f': {counts}' if counts else ''}. "
            "Dense, all have one."
        ),
        figure=figure,
    )


def _doubled(matrix: StoredMatrix | None) -> FloatArray | None:
    return None if matrix is None else matrix.astype(np.float64)


def _kept_norm(run: RunData, place: int, permuted: FloatArray | None) -> tuple[float, ...]:
    """From the matrix itself; where that was not stored, from the last epoch."""
    if permuted is not None:
        return tuple(kept_norm_by_level(permuted).tolist())
    if not run.dynamics:
        return ()
    kept = run.dynamics[-1].kept_norm[place]
    return tuple(kept[np.isfinite(kept)].tolist())


def brightest(matrix: FloatArray) -> float:
    """The importance that is drawn in the lightest colour."""
    means = block_means(matrix)
    return float(np.quantile(means, BRIGHT_QUANTILE)) or float(means.max())


def boundaries(groups: int) -> tuple[float, ...]:
    """Where one of equal groups ends and the next begins, as fractions of the side; none where they are too many."""
    return tuple(place / groups for place in range(1, groups)) if groups <= MOST_BOUNDARIES else ()


def block_means(matrix: FloatArray, *, largest_side: int = LARGEST_SIDE) -> FloatArray:
    """Means over blocks of nearly equal size, so many that no side is longer than `largest_side`."""
    row_starts, column_starts = (_block_starts(length, largest_side) for length in matrix.shape)
    sums = np.add.reduceat(np.add.reduceat(matrix, row_starts, axis=0), column_starts, axis=1)
    heights, widths = (
        np.diff(starts, append=length) for starts, length in zip((row_starts, column_starts), matrix.shape, strict=True)
    )
    means: FloatArray = sums / np.outer(heights, widths)
    return means


def _block_starts(length: int, largest_side: int) -> IntArray:
    """Where the blocks begin. Equal ones, if there are enough: then block and group boundaries mostly meet."""
    equal = max(blocks for blocks in range(1, min(length, largest_side) + 1) if length % blocks == 0)
    blocks = equal if 2 * equal >= min(length, largest_side) else largest_side
    return np.arange(blocks, dtype=np.int64) * length // blocks


def chosen_layers(run: RunData, count: int = CHOSEN_LAYERS) -> tuple[LayerImportance, ...]:
    """A few grouped layers with stored matrices, spread evenly over the network."""
    names = [layer.name for layer in layer_importances(run) if layer.group_level > 1 and layer.permuted is not None]
    count = min(count, len(names))
    chosen = {names[(2 * place + 1) * len(names) // (2 * count)] for place in range(count)}
    return tuple(layer for layer in layer_importances(run) if layer.name in chosen)


def importance_figure(layer: LayerImportance, *, decay: float) -> NamedFigure:
    """Draw one layer as the paper's Figs. 1 and 2 do: above its matrices, below R_g, U_g and the kept norms.

    Raises:
        ValueError: the layer's matrices were not stored.
    """
    if layer.before is None or layer.permuted is None:
        raise ValueError(f"layer {layer.name!r}: its importance matrix was not stored; choose another one")
    outputs, inputs = layer.permuted.shape
    mask = connection_mask(outputs, inputs, layer.group_level)
    kept = layer.permuted * mask
    with house_style():
        figure = Figure(figsize=(8.0, 4.7), layout=ConstrainedLayoutEngine(h_pad=0.09))
        axes = figure.subplot_mosaic([["S", "permuted", "kept", "original"], ["R", "U", "norms", "norms"]])
        light = brightest(layer.permuted)
        original = kept[inverse(layer.out_perm)][:, inverse(layer.in_perm)]
        _draw(axes["S"], layer.before, light, title="S", names=("input channel", "output channel"))
        _draw(axes["permuted"], layer.permuted, light, title="S' = S[out_perm][:, in_perm]", groups=layer.num_groups)
        _draw(axes["kept"], kept, light, title="S' inside U_g", groups=layer.num_groups)
        _draw(axes["original"], original, light, title="the same, order of S")
        _draw(axes["R"], group_penalty(layer.halvings, decay=decay), 1.0, title=f"R_{layer.group_level}")
        _draw(axes["U"], np.eye(layer.num_groups), 1.0, title=f"U_{layer.group_level}")
        _draw_kept_norm(axes["norms"], layer)
    return NamedFigure(
        name=f"importance-{layer.place:03d}-{slug(layer.name)}",
        title=f"Importance of {layer.name}",
        caption=(
            "S holds the norm of every kernel, dark for none. Above, from left: as the network has its channels; in "
            "the learned orders; what the groups keep; and that in the network's order again. Below: the penalty R_g, "
            "the connections U_g that the groups keep, and the share of the norm that every group level would keep."
        ),
        alt=layer.alt,
        figure=figure,
    )


def _draw(
    axis: Axes,
    matrix: FloatArray,
    brightest: float,
    *,
    title: str,
    groups: int = 1,
    names: tuple[str, str] = ("", ""),
) -> None:
    # A square for every layer, however wide: the blocks are what counts.
    axis.imshow(block_means(matrix), cmap=SEQUENTIAL, vmin=0, vmax=brightest or 1.0, aspect="auto", extent=(0, 1, 1, 0))
    for place in boundaries(groups):
        axis.axhline(place, color="#ffffff", linewidth=0.7)
        axis.axvline(place, color="#ffffff", linewidth=0.7)
    axis.set_box_aspect(1)
    axis.set_title(title, fontsize="small")
    axis.set_xlabel(names[0], fontsize="small")
    axis.set_ylabel(names[1], fontsize="small")
    axis.set_xticks([])
    axis.set_yticks([])
    axis.grid(visible=False)


def _draw_kept_norm(axis: Axes, layer: LayerImportance) -> None:
    levels = np.arange(1, len(layer.kept_norm) + 1)
    colours = [VERMILLION if level == layer.group_level else BLUE for level in levels]
    bars = axis.bar(levels, layer.kept_norm, color=colours, width=0.7)
    axis.bar_label(bars, [f"{kept:.2f}" for kept in layer.kept_norm], fontsize=7.5, padding=1)
    axis.set_xticks(levels)
    axis.set_xlabel("group level (orange: chosen)")
    axis.set_ylabel("kept norm")
    axis.set_ylim(0, 1.15)
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.axhline(1, color=FAINT, linewidth=0.6)
