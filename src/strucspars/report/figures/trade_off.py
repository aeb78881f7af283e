"""Accuracy against cost: parameters, operations, and latency where it was measured (Fig. 3)."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from strucspars.cost.text_table import short_count
from strucspars.report.drawing import FAINT, INK, PALETTE, NamedFigure, drawable, house_style, slug
from strucspars.report.figures.label_places import Mark, write_labels
from strucspars.report.trade_off_points import Cost, Point
from strucspars.train.outcome_text import percent

MARKERS = {
    "dense": "o",
    "strucspars": "s",
    "slimming": "^",
    "other methods": "x",
    "from-scratch": "D",
    "shufflenet": "v",
    "random": "P",
    "no-shuffle": "X",
}
AXES: dict[Cost, str] = {
    "params": "parameters",
    "macs": "MACs",
    "paper_flops": "paper FLOPs (MACs + 4 per batch-norm element)",
    "latency_ms": "latency_ms",
}
MOST_LABELS = 14
# Of costs, largest over smallest: beyond it, small networks would be crowded together at the edge.
LARGEST_LINEAR_SPAN = 6.0


def plotted_costs(points: Sequence[Point]) -> tuple[Cost, ...]:
    """What the axes are: parameters, the paper's FLOPs where its points are there, else MACs; latency if measured.

    >>> plotted_costs([])
    ('params', 'macs')
    """
    operations: Cost = "paper_flops" if any(point.source == "paper" for point in points) else "macs"
    has_latency = any("latency_ms" in point.costs for point in points)
    return ("params", operations, "latency_ms") if has_latency else ("params", operations)


def trade_off_figure(points: Sequence[Point], *, data: str, note: str = "") -> NamedFigure:
    """Draw a panel for every cost; upper left is better.

    Args:
        points: ours and the paper's.
        data: name of the data set.
        note: a sentence for the caption, on how latencies were measured.
    """
    costs = plotted_costs(points)
    networks = _by_size(points)
    with house_style():
        figure = Figure(figsize=(8.0, 3.1 * len(costs) + 0.7), layout="constrained")
        axes = figure.subplots(len(costs), 1, squeeze=False)[:, 0]
        drawn = {cost: [point for point in points if cost in point.costs] for cost in costs}
        for cost, axis in zip(costs, axes, strict=True):
            _draw(axis, drawn[cost], cost, networks)
        figure.legend(handles=_handles(points, networks), loc="outside upper left", ncols=4)
        figure.draw_without_rendering()
        for cost, axis in zip(costs, axes, strict=True):
            write_labels(axis, _marks(drawn[cost], cost, networks))
    papers = [point for point in points if point.source == "paper"]
    hollow = "Hollow: the paper's numbers. " if papers else ""
    if any(point.method == "slimming" for point in papers):
        hollow += "Percentages are of parameters, those of the paper's slimming of channels. "
    return NamedFigure(
        name=f"trade-off-{slug(data)}",
        title=f"Accuracy against cost on {data}",
        caption=(
            "Top-1 accuracy of the last epoch; the upper left is better. Filled: our runs, mean over seeds, bars of "
            f"one deviation. {hollow}{note}"
        ).strip(),
        alt=_alt(points),
        figure=figure,
    )


def _by_size(points: Sequence[Point]) -> list[str]:
    """The networks, small ones first: by name ResNet-110 would come before ResNet-20."""
    largest: dict[str, float] = {}
    for point in points:
        # The paper does not tell the parameters of some methods.
        largest[point.network] = max(largest.get(point.network, 0.0), point.costs.get("params", 0.0))
    return sorted(largest, key=largest.__getitem__)


def _colour(network: str, networks: Sequence[str]) -> str:
    return PALETTE[networks.index(network) % len(PALETTE)]


def _draw(axis: Axes, points: Sequence[Point], cost: Cost, networks: Sequence[str]) -> None:
    for point in points:
        colour = _colour(point.network, networks)
        is_ours = point.source == "ours"
        deviation = None if point.deviation is None else 100 * point.deviation
        axis.errorbar(
            point.costs[cost],
            100 * point.accuracy,
            yerr=deviation,
            color=colour,
            marker=MARKERS[point.method],
            markersize=7 if is_ours else 6,
            markerfacecolor=colour if is_ours else "none",
            elinewidth=1.0,
            capsize=2.5,
            alpha=1.0 if is_ours else 0.9,
            zorder=3 if is_ours else 2,
        )
    _connect(axis, points, cost, networks)
    axis.set_xlabel(AXES[cost])
    axis.set_ylabel("top-1 accuracy, %")
    _scale(axis, [point.costs[cost] for point in points])
    axis.margins(x=0.07, y=0.14)


def _scale(axis: Axes, costs: Sequence[float]) -> None:
    """Linear, or logarithmic where the costs are far apart."""
    if costs and max(costs) > LARGEST_LINEAR_SPAN * min(costs) > 0:
        axis.set_xscale("log")
        axis.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 3.0, 5.0)))
        axis.xaxis.set_minor_formatter(NullFormatter())
    else:
        axis.xaxis.set_major_locator(MaxNLocator(7))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_count(value)))


def _connect(axis: Axes, points: Sequence[Point], cost: Cost, networks: Sequence[str]) -> None:
    """A line through the points that lie on one, for each network and source."""
    for source, style in (("ours", "-"), ("paper", ":")):
        for network in networks:
            path = sorted(
                (point.costs[cost], 100 * point.accuracy)
                for point in points
                if (point.source, point.network) == (source, network) and point.is_on_line
            )
            costs, accuracies = [place for place, _ in path], [height for _, height in path]
            axis.plot(costs, accuracies, style, color=_colour(network, networks), linewidth=0.9, alpha=0.6)


def _marks(points: Sequence[Point], cost: Cost, networks: Sequence[str]) -> list[Mark]:
    """Ours labelled below, the paper's above: they often lie on the same spot. Labels have their network's colour."""
    papers = [point for point in points if point.source == "paper" and point.label and point.method != "other methods"]
    has_papers = len(papers) <= MOST_LABELS
    return [
        Mark(
            place=(point.costs[cost], 100 * point.accuracy),
            deviation=100 * (point.deviation or 0.0),
            label=drawable(point.label, 20) if point.source == "ours" or (has_papers and point in papers) else "",
            is_labelled_above=point.source == "paper",
            colour=_colour(point.network, networks),
        )
        for point in points
    ]


def _handles(points: Sequence[Point], networks: Sequence[str]) -> list[Line2D]:
    methods = dict.fromkeys(point.method for point in points)
    handles = [
        Line2D([], [], color=_colour(network, networks), linewidth=4, label=drawable(network, 30))
        for network in networks
    ]
    handles += [
        Line2D([], [], color=INK, linestyle="", marker=MARKERS[method], label=drawable(method, 20))
        for method in methods
    ]
    if any(point.source == "paper" for point in points):
        hollow = Line2D(
            [], [], color=FAINT, linestyle="", marker="s", markerfacecolor="none", label="hollow: the paper"
        )
        handles.append(hollow)
    return handles


def _alt(points: Sequence[Point]) -> str:
    sentences = []
    for point in points:
        if point.source == "ours":
            deviation = "" if point.deviation is None else f" ± {100 * point.deviation:.2f}"
            runs = f"{point.count} run{'s' if point.count > 1 else ''}"
            sentences.append(
                f"{point.network} {point.method} {point.label}".rstrip()
                + f": {percent(point.accuracy)}{deviation} ({runs}) with {point.costs['params']:,.0f} parameters"
            )
    papers = [point.accuracy for point in points if point.source == "paper"]
    if papers:
        span = f"{percent(float(np.min(papers)))} to {percent(float(np.max(papers)))}"
        sentences.append(f"{len(papers)} points of the paper from {span}")
    return "; ".join(sentences) + "." if sentences else "No run is finished yet."
