"""The layers of a run: groups of all (Figs. 5, 6); importance and learned orders of each (Figs. 1, 2)."""

import base64
import io
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullLocator
from PIL import Image

from strucspars.core.checks import FloatArray, IntArray
from strucspars.core.hierarchy import connection_mask, group_penalty, max_group_level, num_groups
from strucspars.core.importance import kept_norm_by_level
from strucspars.cost.text_table import percent
from strucspars.report.drawing import FAINT, PALETTE, SEQUENTIAL, NamedFigure, drawable, house_style, shades, slug
from strucspars.report.reading import RunData

# The few largest entries of a layer would leave all others dark.
BRIGHT_QUANTILE = 0.995
# Lines closer than this would hide what they divide.
MOST_BOUNDARIES = 64
LARGEST_SIDE = 128
# More names would overlap on the axis of the cardinality; the layer table has them all.
MOST_NAMES = 60
# The longer side of a picture's frame.
FRAME_SIDE = 100.0
# A longer matrix is squeezed; else its short side would be a line.
LONGEST_RATIO = 3.0
# Layers that have a figure for print, and how the names of these figures begin.
PRINTED_LAYERS = 3
PRINTED = "importance-"
# Few enough shades to compress well, more than eyes tell apart.
SHADES = 32


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A matrix on the page, as a `data:` address; `blocks` is the SVG path of its diagonal blocks."""

    title: str
    alt: str
    address: str
    blocks: str = ""


@dataclass(frozen=True, eq=False, kw_only=True)
class Layer:
    """One layer at compression; of a run in its first stage, as of its last epoch.

    `kept_norm` is the share of the norm that the levels 1, 2, ... keep; `largest_level` is the one that it may reach.
    """

    place: int
    name: str
    weight_shape: tuple[int, ...]
    group_level: int
    largest_level: int
    out_perm: IntArray
    in_perm: IntArray
    kept_norm: tuple[float, ...] = ()
    pictures: tuple[Picture, ...] = ()

    @property
    def id(self) -> str:
        """The id of its element in the page; the name may hold any character."""
        return f"layer-{self.place + 1}"

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

    def permuted(self, importance: FloatArray) -> FloatArray:
        """S' = `S[out_perm][:, in_perm]`."""
        return importance[self.out_perm][:, self.in_perm]

    @property
    def frame(self) -> tuple[float, float]:
        """Width and height of its pictures, in the shape of the weight."""
        rows, columns = self.weight_shape[:2]
        ratio = min(max(columns / rows, 1 / LONGEST_RATIO), LONGEST_RATIO)
        return (FRAME_SIDE, round(FRAME_SIDE / ratio, 2)) if ratio >= 1 else (round(FRAME_SIDE * ratio, 2), FRAME_SIDE)

    @property
    def facts(self) -> str:
        """Widths, kernel and groups, in a line."""
        out_channels, in_channels, *kernel = self.weight_shape
        area = f", kernel {' x '.join(map(str, kernel))}" if kernel else ""
        return (
            f"{out_channels} output and {in_channels} input channels{area}. "
            f"group_level {self.group_level} of at most {self.largest_level}: num_groups {self.num_groups}."
        )

    @property
    def alt(self) -> str:
        """What its matrices show, in words."""
        outputs, inputs = self.weight_shape[:2]
        groups = f"{self.num_groups} group{'s' if self.num_groups > 1 else ''}"
        words = f"{drawable(self.name, 80)}: {outputs} x {inputs} channels, {groups} (group level {self.group_level})."
        kept = ", ".join(f"level {level} {percent(share)}" for level, share in enumerate(self.kept_norm, start=1))
        return f"{words} Kept norm: {kept}." if kept else words


def layers_of(run: RunData) -> tuple[Layer, ...]:
    """Every layer that may be grouped, in network order; none before the end of the first epoch."""
    if run.plan is not None:
        states = [(layer.group_level, layer.out_perm, layer.in_perm) for layer in run.plan.layers.values()]
    elif run.dynamics:
        last = run.dynamics[-1]
        states = list(zip(last.group_level.tolist(), last.out_perm, last.in_perm, strict=True))
    else:
        return ()
    least = run.recipe.sparsify.min_channels_per_group
    layers = []
    for place, ((name, shape), state) in enumerate(zip(run.weight_shapes.items(), states, strict=True)):
        group_level, out_perm, in_perm = state
        stored = run.learned_importance.get(name)
        importance = None if stored is None else stored.astype(np.float64)
        # Of the last epoch where the matrix was not stored.
        kept = run.dynamics[-1].kept_norm[place] if run.dynamics else np.zeros(0)
        if importance is not None:
            kept = kept_norm_by_level(importance[out_perm][:, in_perm])
        layer = Layer(
            place=place,
            name=name,
            weight_shape=shape,
            group_level=group_level,
            largest_level=max_group_level(*shape[:2], min_channels_per_group=least),
            out_perm=out_perm,
            in_perm=in_perm,
            kept_norm=tuple(kept[np.isfinite(kept)].tolist()),
        )
        layers.append(replace(layer, pictures=tuple(_pictures(layer, run, importance))))
    return tuple(layers)


def _pictures(layer: Layer, run: RunData, importance: FloatArray | None) -> Iterator[Picture]:
    def picture(title: str, alt: str, matrix: FloatArray, light: float = 1.0, blocks: str = "") -> Picture:
        return Picture(title=title, alt=f"{layer.name}. {alt}", address=matrix_address(matrix, light), blocks=blocks)

    start = run.importance.get("start", {}).get(layer.name)
    if start is not None:
        first, words = start.astype(np.float64), "Importance before training, in the network's order."
        yield picture("S before training", words, first, brightest(first))
    if importance is not None:
        permuted, moment = layer.permuted(importance), "so far" if run.plan is None else "at compression"
        light = brightest(permuted)
        yield picture(f"S {moment}", f"Importance {moment}, in the network's channel order.", importance, light)
        (width, height), places = layer.frame, boundaries(layer.num_groups)
        outlines = "".join(
            f"M{begin * width:.6g} {begin * height:.6g}H{end * width:.6g}V{end * height:.6g}H{begin * width:.6g}Z"
            for begin, end in (itertools.pairwise((0.0, *places, 1.0)) if places else ())
        )
        yield picture("S' in the learned orders", layer.alt, permuted, light, outlines)
    penalty = group_penalty(layer.halvings, decay=run.recipe.sparsify.decay)
    yield picture("R_g, the penalty", f"Penalty of group_level {layer.group_level}.", penalty)
    words = f"Connections that stay: {layer.num_groups} diagonal blocks."
    yield picture("U_g, what stays", words, np.eye(layer.num_groups))


def importance_figures(run: RunData, layers: Sequence[Layer]) -> Iterator[NamedFigure]:
    """Figures for print of a few grouped layers, spread over the network; the page shows every layer."""
    matrices = run.learned_importance
    grouped = [layer for layer in layers if layer.group_level > 1 and layer.name in matrices]
    middles = [(2 * part + 1) * len(grouped) // (2 * PRINTED_LAYERS) for part in range(PRINTED_LAYERS)]
    for place in dict.fromkeys(middles if grouped else []):
        layer = grouped[place]
        importance = matrices[layer.name].astype(np.float64)
        yield importance_figure(layer, importance, decay=run.recipe.sparsify.decay)


def importance_figure(layer: Layer, importance: FloatArray, *, decay: float) -> NamedFigure:
    """Draw S, S', what the groups keep of it, R_g and U_g side by side."""
    permuted, light = layer.permuted(importance), brightest(importance)
    rows, columns = importance.shape
    kept = permuted * connection_mask(rows, columns, layer.group_level)
    panels = {
        "S": (importance, light),
        "S' = S[out_perm][:, in_perm]": (permuted, light),
        "S' inside U_g": (kept, light),
        f"R_{layer.group_level}": (group_penalty(layer.halvings, decay=decay), 1.0),
        f"U_{layer.group_level}": (np.eye(layer.num_groups), 1.0),
    }
    with house_style():
        figure = Figure(figsize=(9.0, 2.1), layout="constrained")
        for axis, (title, (matrix, lightest)) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
            # A square for every layer, however wide: the blocks are what counts.
            axis.imshow(block_means(matrix), cmap=SEQUENTIAL, vmin=0, vmax=lightest, aspect="auto")
            axis.set(box_aspect=1, xticks=[], yticks=[])
            axis.set_title(title, fontsize="small")
            axis.grid(visible=False)
    return NamedFigure(
        name=f"{PRINTED}{layer.place:03d}-{slug(layer.name)}",
        title=f"Importance of {layer.name}",
        caption="The norm of every kernel in the network's order, in the learned orders, and what the groups keep.",
        alt=layer.alt,
        figure=figure,
    )


def matrix_address(matrix: FloatArray, light: float) -> str:
    """A small picture of a non-negative matrix, as a `data:` address, from 0 (dark) to `light`.

    A page scales it up with `image-rendering: pixelated`.
    """
    steps = np.clip(block_means(matrix) / (light or 1.0), 0.0, 1.0)
    image = Image.fromarray(np.minimum((steps * SHADES).astype(np.uint8), SHADES - 1))
    image.putpalette(shades(SHADES).tobytes())
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"


def brightest(matrix: FloatArray) -> float:
    """The importance that is drawn in the lightest colour."""
    means = block_means(matrix)
    return float(np.quantile(means, BRIGHT_QUANTILE)) or float(means.max())


def boundaries(groups: int) -> tuple[float, ...]:
    """The boundaries between equal groups, as fractions of the side; none where they are too many."""
    return tuple(place / groups for place in range(1, groups)) if groups <= MOST_BOUNDARIES else ()


def block_means(matrix: FloatArray, *, largest_side: int = LARGEST_SIDE) -> FloatArray:
    """Means over blocks of nearly equal size, so many that no side is longer than `largest_side`."""
    rows, columns = (_block_starts(length, largest_side) for length in matrix.shape)
    sums = np.add.reduceat(np.add.reduceat(matrix, rows, axis=0), columns, axis=1)
    sizes = np.outer(np.diff(rows, append=len(matrix)), np.diff(columns, append=matrix.shape[1]))
    means: FloatArray = sums / sizes
    return means


def _block_starts(length: int, largest_side: int) -> IntArray:
    """Where the blocks begin. Equal ones, if there are enough: then block and group boundaries mostly meet."""
    equal = max(blocks for blocks in range(1, min(length, largest_side) + 1) if length % blocks == 0)
    blocks = equal if 2 * equal >= min(length, largest_side) else largest_side
    return np.arange(blocks, dtype=np.int64) * length // blocks


def cardinality_figure(run: RunData, layers: Sequence[Layer]) -> NamedFigure:
    """Draw the number of groups of every layer on an axis of doublings, and a mark for what its widths allow."""
    count = len(layers)
    groups = np.array([layer.num_groups for layer in layers], dtype=np.int64)
    largest = [num_groups(layer.largest_level) for layer in layers]
    kernels = np.array(["x".join(map(str, layer.weight_shape[2:])) or "1x1" for layer in layers])
    places = np.arange(1, count + 1)
    handles = []
    with house_style():
        size = 7.2 if count <= MOST_NAMES / 2 else 9.0, 3.9 if count <= MOST_NAMES else 2.9
        figure = Figure(figsize=size, layout=ConstrainedLayoutEngine(h_pad=0.09))
        axis, mark_size, width = figure.subplots(), 4.0 if count <= MOST_NAMES else 2.5, max(1.0, min(4.0, 160 / count))
        for kind, colour in zip(sorted(set(kernels.tolist())), itertools.cycle(PALETTE), strict=False):
            chosen = kernels == kind
            axis.vlines(places[chosen], 0.7, groups[chosen], color=colour, linewidth=width)
            axis.plot(places[chosen], groups[chosen], "o", color=colour, markersize=mark_size)
            handles.append(Line2D([], [], color=colour, marker="o", markersize=4, label=f"compressed, {kind}"))
        axis.axhline(1, color=FAINT, linewidth=1.0)
        axis.plot(places, largest, "_", color=FAINT, markersize=5)
        handles.append(Line2D([], [], color=FAINT, linewidth=1.0, label="dense"))
        handles.append(Line2D([], [], color=FAINT, marker="_", linestyle="", label="largest"))
        axis.set_yscale("log", base=2)
        axis.set_ylim(0.7, 2.0 * max(largest))
        axis.yaxis.set_major_locator(LogLocator(base=2, numticks=16))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_locator(NullLocator())
        axis.set_ylabel("num_groups (cardinality)")
        axis.set_xlim(0.2, count + 0.8)
        axis.grid(visible=False, axis="x")
        if count <= MOST_NAMES:
            axis.set_xticks(places, [drawable(layer.name, 26) for layer in layers], rotation=90, fontsize=7.5)
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
