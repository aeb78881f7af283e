"""Cardinality: the number of groups of every layer, dense and compressed, in network order (Figs. 5 and 6)."""

from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from strucspars.core.checks import IntArray
from strucspars.core.hierarchy import num_groups
from strucspars.report.drawing import FAINT, PALETTE, NamedFigure, drawable, house_style
from strucspars.report.layers import largest_level
from strucspars.report.reading import RunData

# More names would overlap on the axis; the layer table has them all.
MOST_NAMES = 60


@dataclass(frozen=True, eq=False, kw_only=True)
class Cardinality:
    """What is plotted, layer by layer in network order.

    Attributes:
        names: of the layers.
        kernels: such as `3x3`; `1x1` also for linear layers.
        groups: number of groups after compression, `(layers,)`; of a run in its first stage, as of its last epoch.
        largest: number of groups that the layer could have, `(layers,)`. Dense, all have one.
        is_planned: whether the groups are those of the plan.
    """

    names: tuple[str, ...]
    kernels: tuple[str, ...]
    groups: IntArray
    largest: IntArray
    is_planned: bool


def cardinality_of(run: RunData) -> Cardinality:
    """Groups of the plan, or of the last stored epoch; without layers where there is neither."""
    shapes = run.weight_shapes
    if run.plan is not None:
        groups = [layer.num_groups for layer in run.plan.layers.values()]
    elif run.dynamics:
        groups = [num_groups(int(level)) for level in run.dynamics[-1].group_level]
    else:
        shapes, groups = {}, []
    return Cardinality(
        names=tuple(shapes),
        kernels=tuple("x".join(map(str, shape[2:])) or "1x1" for shape in shapes.values()),
        groups=np.array(groups, dtype=np.int64),
        largest=np.array([num_groups(largest_level(run, shape)) for shape in shapes.values()], dtype=np.int64),
        is_planned=run.plan is not None,
    )


def cardinality_figure(data: Cardinality) -> NamedFigure:
    """Draw a bar for every layer on an axis of doublings, and above it a mark for what the layer could have."""
    count = len(data.names)
    with_names = count <= MOST_NAMES
    with house_style():
        figure = Figure(
            figsize=(7.2 if count <= MOST_NAMES / 2 else 9.0, 3.9 if with_names else 2.9),
            layout=ConstrainedLayoutEngine(h_pad=0.09),
        )
        axis = figure.subplots()
        handles = _bars(axis, data)
        axis.set_yscale("log", base=2)
        axis.set_ylim(0.7, 2.0 * float(data.largest.max(initial=1)))
        axis.yaxis.set_major_locator(LogLocator(base=2, numticks=16))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.yaxis.set_minor_locator(NullLocator())
        axis.set_ylabel("num_groups (cardinality)")
        axis.set_xlim(0.2, count + 0.8)
        axis.grid(visible=False, axis="x")
        if with_names:
            axis.set_xticks(range(1, count + 1), [drawable(name, 26) for name in data.names], rotation=90, fontsize=7.5)
        axis.set_xlabel("layer, in network order")
        axis.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1), ncols=5, borderaxespad=0.2)
    when = "after compression" if data.is_planned else "after the last epoch"
    return NamedFigure(
        name="cardinality",
        title="Cardinality of every layer",
        caption=(
            f"Number of groups of every layer {when}; before, every layer is dense, with one group (the lower line). "
            "The grey mark is the largest number of groups that the layer's widths allow."
        ),
        alt=_alt(data, when),
        figure=figure,
    )


def _bars(axis: Axes, data: Cardinality) -> list[Line2D]:
    kinds = list(dict.fromkeys(sorted(data.kernels)))
    places = np.arange(1, len(data.names) + 1)
    handles = []
    for place, kind in enumerate(kinds):
        chosen = np.array([kernel == kind for kernel in data.kernels], dtype=np.bool_)
        colour = PALETTE[place % len(PALETTE)]
        axis.vlines(places[chosen], 0.7, data.groups[chosen], color=colour, linewidth=_line_width(len(places)))
        axis.plot(places[chosen], data.groups[chosen], "o", color=colour, markersize=_mark_size(len(places)))
        handles.append(Line2D([], [], color=colour, marker="o", markersize=4, label=f"compressed, {kind}"))
    axis.axhline(1, color=FAINT, linewidth=1.0)
    axis.plot(places, data.largest, "_", color=FAINT, markersize=5)
    handles.append(Line2D([], [], color=FAINT, linewidth=1.0, label="dense"))
    handles.append(Line2D([], [], color=FAINT, marker="_", linestyle="", label="largest"))
    return handles


def _mark_size(layers: int) -> float:
    return 4.0 if layers <= MOST_NAMES else 2.5


def _line_width(layers: int) -> float:
    return max(1.0, min(4.0, 160 / max(layers, 1)))


def _alt(data: Cardinality, when: str) -> str:
    grouped = int((data.groups > 1).sum())
    counts = ", ".join(
        f"{(data.groups == groups).sum()} with {groups}" for groups in sorted(set(data.groups.tolist())) if groups > 1
    )
    words = f": {counts}" if counts else ""
    return f"{grouped} of {len(data.names)} layers have more than one group {when}{words}. Dense, all have one."
