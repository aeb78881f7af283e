"""Accuracy against cost: parameters, operations, and latency where it was measured (Fig. 3)."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from strucspars.bench.results import BenchRow, RowTiming
from strucspars.bench.runtimes import known_runtime
from strucspars.cost.text_table import percent, short_count
from strucspars.paper.experiments import Experiment
from strucspars.paper.noise import Sample, sample_of
from strucspars.paper.published import OTHER_METHODS, PAPER_ROWS
from strucspars.report.drawing import FAINT, INK, PALETTE, NamedFigure, drawable, house_style, slug
from strucspars.report.reading import RunData
from strucspars.train.outcome import RunSummary
from strucspars.train.recipe import Kind

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
AXES = {
    "params": "parameters",
    "macs": "MACs",
    "paper_flops": "paper FLOPs (MACs + 4 per batch-norm element)",
    "latency_ms": "latency_ms",
}
# Methods whose points are joined, from the dense network through its compressed forms.
ON_LINE = ("dense", "strucspars")
# The paper's points are labelled only where they are few.
MOST_LABELS = 14
# Beyond this ratio of the largest cost to the smallest, small networks would crowd at the edge of a linear axis.
LARGEST_LINEAR_SPAN = 6.0
# In percent; above 100, so that the edge cuts no mark.
HIGHEST_TOP = 100.5


def fastest(run: RunData, *, int8: bool = False) -> tuple[BenchRow, RowTiming] | None:
    """The run's own network in its fastest runtime, at the smallest batch and the fewest threads that were timed.

    In float32, whose accuracy the run has measured, or in int8.
    """
    form = "dense" if run.recipe.kind == "dense" else "compressed"
    rows = [] if run.bench is None else list(run.bench.rows)
    rows = [row for row in rows if row.form == form and known_runtime(row.runtime).is_int8 == int8]
    timed = [(row, row.timing) for row in rows if row.timing is not None]
    return min(timed, key=lambda each: (each[0].batch, each[0].threads, each[1].ms), default=None)


def timing_conditions(row: BenchRow) -> str:
    """Batch and threads in words."""
    return f"batch {row.batch}, {row.threads} thread{'s' if row.threads > 1 else ''}"


def comparable_latencies(runs: Iterable[RunData]) -> tuple[dict[Path, float], str]:
    """Milliseconds by run folder, of runs measured like the first one, and a sentence on the conditions."""
    latencies: dict[Path, float] = {}
    how, note = None, ""
    for run in runs:
        measured = fastest(run)
        if measured is None or run.bench is None:
            continue
        row, timing = measured
        # Times of different hardware do not compare.
        conditions = run.bench.hardware, row.batch, row.threads
        if how is None:
            how, note = conditions, f"Latency: fastest runtime, {timing_conditions(row)}."
        if conditions == how:
            latencies[run.path] = timing.ms
    return latencies, note


@dataclass(frozen=True, kw_only=True)
class Point:
    """A network by accuracy and cost; `method` is `dense`, a kind of run, one of Table 3, or `other methods`.

    The label is the removed fraction that was asked for, what differs from the first network of that size, or the name
    of another method.
    """

    network: str
    method: str
    accuracy: Sample
    costs: Mapping[str, float]
    label: str = ""
    is_ours: bool = False
    is_on_line: bool = False


def points_of(experiments: Sequence[Experiment], latencies: Mapping[Path, float] | None = None) -> tuple[Point, ...]:
    """Our experiments of one data set, and the paper's points of their networks; milliseconds are by run folder."""
    ours: list[Point] = []
    first_of_size: dict[tuple[str, str, float | None], Experiment] = {}
    for experiment in experiments:
        ablation = experiment.recipe.finetune.ablation
        method = experiment.first.kind if ablation == "finetune" else ablation
        size = _network(experiment.first), method, experiment.first.target
        ours.append(_own_point(experiment, method, first_of_size.setdefault(size, experiment), latencies or {}))
    networks = dict.fromkeys(point.network for point in ours)
    return (*ours, *(point for network in networks for point in _paper_points(network)))


def _own_point(
    experiment: Experiment, method: str, first_of_size: Experiment, latencies: Mapping[Path, float]
) -> Point:
    accuracy = experiment.sample(lambda run: run.finetuned.last_top1)
    assert accuracy is not None, "an experiment has runs"
    costs = {
        "params": experiment.sample(lambda run: run.params.after),
        "macs": experiment.sample(lambda run: run.macs.after),
        "paper_flops": experiment.sample(lambda run: run.paper_flops.after),
        "latency_ms": sample_of([latencies[run.path] for run in experiment.runs if run.path in latencies]),
    }
    label = ""
    if experiment is not first_of_size:
        label = experiment.label.removeprefix(first_of_size.label).lstrip("- ") or experiment.label
    elif experiment.first.target is not None and method in get_args(Kind):
        label = f"{experiment.first.target:.0%}"
    return Point(
        network=_network(experiment.first),
        method=method,
        accuracy=accuracy,
        costs={cost: sample.mean for cost, sample in costs.items() if sample is not None},
        label=label,
        is_ours=True,
        is_on_line=method in ON_LINE and experiment is first_of_size,
    )


def _network(run: RunSummary) -> str:
    """A network of the paper by the name that recipes have for it; others by model and data."""
    network = f"{run.data}-{run.model.removeprefix('preact-')}"
    return network if f"{network}-dense" in PAPER_ROWS else f"{run.model} on {run.data}"


def _paper_points(network: str) -> Iterator[Point]:
    for name, row in PAPER_ROWS.items():
        rate = name.removeprefix(f"{network}-")
        if rate == name or row.table == 3:
            continue
        method = "dense" if rate == "dense" else "slimming" if rate.startswith("slimming") else "strucspars"
        yield Point(
            network=network,
            method=method,
            accuracy=row.top1,
            costs={"params": row.params, "paper_flops": row.flops},
            label="" if rate == "dense" else f"{rate.removeprefix('slimming')}%",
            is_on_line=method in ON_LINE,
        )
    for other in (each for each in OTHER_METHODS if each.network == network):
        yield Point(
            network=network,
            method="other methods",
            accuracy=Sample(mean=other.top1, deviation=None, count=1),
            costs={"paper_flops": other.flops} | ({} if other.params is None else {"params": other.params}),
            label=other.method,
        )


def plotted_costs(points: Sequence[Point]) -> list[str]:
    """The axes: parameters, the paper's FLOPs where its points are shown, else MACs; latency if measured."""
    operations = "macs" if all(point.is_ours for point in points) else "paper_flops"
    has_latency = any("latency_ms" in point.costs for point in points)
    return ["params", operations, *(["latency_ms"] if has_latency else [])]


def trade_off_figure(points: Sequence[Point], *, data: str, note: str = "") -> NamedFigure:
    """Draw a panel for every cost; the note is a sentence for the caption, on how latencies were measured."""
    costs = plotted_costs(points)
    by_size = sorted(points, key=lambda point: point.costs.get("params", 0.0), reverse=True)
    # By name, ResNet-110 would come before ResNet-20.
    networks = list(dict.fromkeys(point.network for point in by_size))[::-1]
    colours = {network: PALETTE[place % len(PALETTE)] for place, network in enumerate(networks)}
    with house_style():
        figure = Figure(figsize=(8.0, 3.1 * len(costs) + 0.7), layout="constrained")
        axes = figure.subplots(len(costs), 1, squeeze=False)[:, 0]
        for cost, axis in zip(costs, axes, strict=True):
            _draw(axis, [point for point in points if cost in point.costs], cost, colours)
        figure.legend(handles=_handles(points, colours), loc="outside upper left", ncols=4)
    papers = [point for point in points if not point.is_ours]
    hollow = "Hollow: the paper's numbers. " if papers else ""
    if any(point.method == "slimming" for point in papers):
        hollow += "The percentages of slimming are of channels, all others of parameters. "
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


def _draw(axis: Axes, points: Sequence[Point], cost: str, colours: Mapping[str, str]) -> None:
    are_few = sum(bool(point.label) for point in points if not point.is_ours) <= MOST_LABELS
    lines: dict[tuple[bool, str], list[tuple[float, float]]] = {}
    for point in points:
        place, colour = (point.costs[cost], 100 * point.accuracy.mean), colours[point.network]
        deviation = point.accuracy.deviation
        axis.errorbar(
            *place,
            yerr=None if deviation is None else 100 * deviation,
            color=colour,
            marker=MARKERS[point.method],
            markersize=7 if point.is_ours else 6,
            markerfacecolor=colour if point.is_ours else "none",
            elinewidth=1.0,
            capsize=2.5,
            zorder=3 if point.is_ours else 2,
        )
        if point.label and (point.is_ours or (are_few and point.method != "other methods")):
            _write_label(axis, point, place, colour)
        if point.is_on_line:
            lines.setdefault((point.is_ours, point.network), []).append(place)
    for (is_ours, network), places in lines.items():
        style = "-" if is_ours else ":"
        axis.plot(*zip(*sorted(places), strict=True), style, color=colours[network], linewidth=0.9, alpha=0.6)
    axis.set_xlabel(AXES[cost])
    axis.set_ylabel("top-1 accuracy, %")
    _scale(axis, [point.costs[cost] for point in points])
    axis.margins(x=0.07, y=0.14)
    # One accuracy alone gets a wide margin, and none is above 100 %.
    axis.set_ylim(top=min(axis.get_ylim()[1], HIGHEST_TOP))


def _write_label(axis: Axes, point: Point, place: tuple[float, float], colour: str) -> None:
    """Ours below the line or to the right; the paper's above to the left: both are often at the same place."""
    offset, side, height = (-6, 5), "right", "bottom"
    if point.is_ours:
        offset, side, height = ((0, -7), "center", "top") if point.is_on_line else ((7, 0), "left", "center")
    style: dict[str, Any] = {"ha": side, "va": height, "fontsize": 7.5, "color": colour}
    axis.annotate(drawable(point.label, 20), place, xytext=offset, textcoords="offset points", **style)


def _scale(axis: Axes, costs: Sequence[float]) -> None:
    """Linear, or logarithmic where the costs are far apart."""
    if costs and max(costs) > LARGEST_LINEAR_SPAN * min(costs) > 0:
        axis.set_xscale("log")
        axis.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 3.0, 5.0)))
        axis.xaxis.set_minor_formatter(NullFormatter())
    else:
        axis.xaxis.set_major_locator(MaxNLocator(7))
    axis.xaxis.set_major_formatter(lambda value, _: short_count(value))


def _handles(points: Sequence[Point], colours: Mapping[str, str]) -> list[Line2D]:
    """The handles of the legend: a colour for every network, a marker for every method."""
    methods = dict.fromkeys(point.method for point in points)
    handles = [
        *(Line2D([], [], color=colour, linewidth=4, label=drawable(name, 30)) for name, colour in colours.items()),
        *(Line2D([], [], color=INK, linestyle="", marker=MARKERS[each], label=each) for each in methods),
    ]
    if any(not point.is_ours for point in points):
        paper = Line2D([], [], color=FAINT, linestyle="", marker="s", markerfacecolor="none", label="hollow: the paper")
        handles.append(paper)
    return handles


def _alt(points: Sequence[Point]) -> str:
    sentences = []
    for point in points:
        if point.is_ours:
            ours = point.accuracy
            deviation = "" if ours.deviation is None else f" ± {100 * ours.deviation:.2f}"
            runs = f"{ours.count} run{'s' if ours.count > 1 else ''}"
            name = " ".join(filter(None, (point.network, point.method, point.label)))
            params = f"{point.costs['params']:,.0f} parameters"
            sentences.append(f"{name}: {percent(ours.mean)}{deviation} ({runs}) with {params}")
    papers = [point.accuracy.mean for point in points if not point.is_ours]
    if papers:
        sentences.append(f"{len(papers)} points of the paper from {percent(min(papers))} to {percent(max(papers))}")
    return "; ".join(sentences) + "."
