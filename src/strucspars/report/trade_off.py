"""Accuracy against cost: parameters, operations, and latency where it was measured (Fig. 3)."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from strucspars.cost.text_table import percent, short_count
from strucspars.paper.experiments import Experiment
from strucspars.paper.noise import Sample, sample_of
from strucspars.paper.published import PAPER_BASELINES, PAPER_ROWS
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
Cost = Literal["params", "macs", "paper_flops", "latency_ms"]
AXES: Mapping[Cost, str] = {
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


@dataclass(frozen=True, kw_only=True)
class Latency:
    """The fastest way to run a network, at the smallest batch and the fewest threads that were timed.

    Attributes:
        ms: milliseconds for the batch, median.
        speedup: over the same runtime's dense network; None for that itself, and where it was not timed.
        hardware: what it was timed on; times of different hardware do not compare.
    """

    ms: float
    speedup: float | None
    runtime: str
    batch: int
    threads: int
    hardware: Mapping[str, object]

    @property
    def conditions(self) -> str:
        """Batch and threads in words."""
        return f"batch {self.batch}, {self.threads} thread{'s' if self.threads > 1 else ''}"


def latency_of(run: RunData) -> Latency | None:
    """How fast the run's network is; None if that was not measured."""
    if run.bench is None:
        return None
    form = "dense" if run.recipe.kind == "dense" else "compressed"
    timed = [(row, row.timing) for row in run.bench.rows if row.form == form and row.timing is not None]
    if not timed:
        return None
    row, timing = min(timed, key=lambda each: (each[0].batch, each[0].threads, each[1].ms))
    return Latency(
        ms=timing.ms,
        speedup=None if timing.speedup is None or form == "dense" else timing.speedup.median,
        runtime=row.runtime,
        batch=row.batch,
        threads=row.threads,
        hardware=run.bench.hardware,
    )


def comparable_latencies(runs: Iterable[RunData]) -> dict[Path, Latency]:
    """The latencies by run folder that were measured as the first of them."""
    found = {run.path: latency for run in runs if (latency := latency_of(run)) is not None}
    wheres = {path: (latency.hardware, latency.batch, latency.threads) for path, latency in found.items()}
    first = next(iter(wheres.values()), None)
    return {path: latency for path, latency in found.items() if wheres[path] == first}


@dataclass(frozen=True, kw_only=True)
class Point:
    """A network by accuracy and cost.

    Attributes:
        is_ours: else it is the paper's.
        network: such as `cifar10-resnet20`, or the model's name with the data's.
        method: `dense`, `strucspars`, `slimming`, one of Table 3, or `other methods`.
        label: the removed fraction that was asked for, what differs from the first network of that size, or the name
            of another method; empty where the method says all.
        is_on_line: whether the line of its network goes through it.
        accuracy: top-1, as a fraction.
        costs: those that are known.
    """

    is_ours: bool
    network: str
    method: str
    label: str
    is_on_line: bool
    accuracy: Sample
    costs: Mapping[Cost, float]


def points_of(experiments: Sequence[Experiment], latencies: Mapping[Path, Latency] | None = None) -> tuple[Point, ...]:
    """Our experiments of one data set, and the paper's points of their networks; latencies are by run folder."""
    ours: list[Point] = []
    first_of_size: dict[tuple[str, str, float | None], Experiment] = {}
    for experiment in experiments:
        size = _network(experiment.first), _method(experiment), experiment.first.target
        ours.append(_own_point(experiment, first_of_size.setdefault(size, experiment), latencies or {}))
    networks = dict.fromkeys(point.network for point in ours)
    return (*ours, *(point for network in networks for point in _paper_points(network)))


def _own_point(experiment: Experiment, first_of_size: Experiment, latencies: Mapping[Path, Latency]) -> Point:
    accuracy = experiment.sample(lambda run: run.finetuned.last_top1)
    assert accuracy is not None, "an experiment has runs"
    costs: dict[Cost, Sample | None] = {
        "params": experiment.sample(lambda run: run.params.after),
        "macs": experiment.sample(lambda run: run.macs.after),
        "paper_flops": experiment.sample(lambda run: run.paper_flops.after),
        "latency_ms": sample_of([latencies[run.path].ms for run in experiment.runs if run.path in latencies]),
    }
    method, label = _method(experiment), ""
    if experiment is not first_of_size:
        label = experiment.label.removeprefix(first_of_size.label).lstrip("- ") or experiment.label
    elif experiment.first.target is not None and method in get_args(Kind):
        label = f"{experiment.first.target:.0%}"
    return Point(
        is_ours=True,
        network=_network(experiment.first),
        method=method,
        label=label,
        is_on_line=method in ON_LINE and experiment is first_of_size,
        accuracy=accuracy,
        costs={cost: sample.mean for cost, sample in costs.items() if sample is not None},
    )


def _method(experiment: Experiment) -> str:
    ablation = experiment.recipe.finetune.ablation
    return experiment.first.kind if ablation == "finetune" else ablation


def _network(run: RunSummary) -> str:
    """A network of the paper by the name that recipes have for it; others by model and data."""
    network = f"{run.data}-{run.model.removeprefix('preact-')}"
    return network if f"{network}-dense" in PAPER_ROWS else f"{run.model} on {run.data}"


def _paper_points(network: str) -> Iterator[Point]:
    for name, row in PAPER_ROWS.items():
        if not name.startswith(f"{network}-") or row.table == 3:
            continue
        rate = name.removeprefix(f"{network}-")
        method = "dense" if rate == "dense" else "slimming" if rate.startswith("slimming") else "strucspars"
        yield Point(
            is_ours=False,
            network=network,
            method=method,
            label="" if rate == "dense" else f"{rate.removeprefix('slimming')}%",
            is_on_line=method in ON_LINE,
            accuracy=row.top1,
            costs={"params": row.params, "paper_flops": row.flops},
        )
    for other in PAPER_BASELINES.get(network, ()):
        params: dict[Cost, float] = {} if other.params_e6 is None else {"params": other.params_e6 * 1e6}
        yield Point(
            is_ours=False,
            network=network,
            method="other methods",
            label=other.method,
            is_on_line=False,
            accuracy=Sample(mean=other.accuracy / 100, deviation=None, count=1),
            costs={**params, "paper_flops": other.flops_e9 * 1e9},
        )


def plotted_costs(points: Sequence[Point]) -> tuple[Cost, ...]:
    """The axes: parameters, the paper's FLOPs where its points are shown, else MACs; latency if measured."""
    operations: Cost = "macs" if all(point.is_ours for point in points) else "paper_flops"
    has_latency = any("latency_ms" in point.costs for point in points)
    return ("params", operations, "latency_ms") if has_latency else ("params", operations)


def trade_off_figure(points: Sequence[Point], *, data: str, note: str = "") -> NamedFigure:
    """Draw a panel for every cost; the note is a sentence for the caption, on how latencies were measured."""
    costs = plotted_costs(points)
    # Ordered by size: by name, ResNet-110 would come before ResNet-20.
    largest: dict[str, float] = {}
    for point in points:
        largest[point.network] = max(largest.get(point.network, 0.0), point.costs.get("params", 0.0))
    networks = sorted(largest, key=largest.__getitem__)
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


def _draw(axis: Axes, points: Sequence[Point], cost: Cost, colours: Mapping[str, str]) -> None:
    are_few = sum(bool(point.label) for point in points if not point.is_ours) <= MOST_LABELS
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
            alpha=1.0 if point.is_ours else 0.9,
            zorder=3 if point.is_ours else 2,
        )
        if point.label and (point.is_ours or (are_few and point.method != "other methods")):
            _write_label(axis, point, place, colour)
    _connect(axis, points, cost, colours)
    axis.set_xlabel(AXES[cost])
    axis.set_ylabel("top-1 accuracy, %")
    _scale(axis, [point.costs[cost] for point in points])
    axis.margins(x=0.07, y=0.14)
    # One accuracy alone gets a wide margin, and none is above 100 %.
    axis.set_ylim(top=min(axis.get_ylim()[1], HIGHEST_TOP))


def _write_label(axis: Axes, point: Point, place: tuple[float, float], colour: str) -> None:
    """Ours to the right, on the line below it; the paper's above to the left: they often lie on the same spot."""
    if point.is_ours:
        offset, side, height = ((6, -5), "left", "top") if point.is_on_line else ((7, 0), "left", "center")
    else:
        offset, side, height = (-6, 5), "right", "bottom"
    axis.annotate(
        drawable(point.label, 20),
        place,
        xytext=offset,
        textcoords="offset points",
        ha=side,
        va=height,
        fontsize=7.5,
        color=colour,
    )


def _connect(axis: Axes, points: Sequence[Point], cost: Cost, colours: Mapping[str, str]) -> None:
    """A line for each network, through our points and through the paper's."""
    for is_ours, style in ((True, "-"), (False, ":")):
        for network, colour in colours.items():
            path = sorted(
                (point.costs[cost], 100 * point.accuracy.mean)
                for point in points
                if (point.is_ours, point.network) == (is_ours, network) and point.is_on_line
            )
            costs, accuracies = [place for place, _ in path], [height for _, height in path]
            axis.plot(costs, accuracies, style, color=colour, linewidth=0.9, alpha=0.6)


def _scale(axis: Axes, costs: Sequence[float]) -> None:
    """Linear, or logarithmic where the costs are far apart."""
    if costs and max(costs) > LARGEST_LINEAR_SPAN * min(costs) > 0:
        axis.set_xscale("log")
        axis.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 3.0, 5.0)))
        axis.xaxis.set_minor_formatter(NullFormatter())
    else:
        axis.xaxis.set_major_locator(MaxNLocator(7))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_count(value)))


def _handles(points: Sequence[Point], colours: Mapping[str, str]) -> list[Line2D]:
    methods = dict.fromkeys(point.method for point in points)
    handles = [
        Line2D([], [], color=colour, linewidth=4, label=drawable(network, 30)) for network, colour in colours.items()
    ]
    handles += [
        Line2D([], [], color=INK, linestyle="", marker=MARKERS[method], label=drawable(method, 20))
        for method in methods
    ]
    if not all(point.is_ours for point in points):
        hollow = Line2D(
            [], [], color=FAINT, linestyle="", marker="s", markerfacecolor="none", label="hollow: the paper"
        )
        handles.append(hollow)
    return handles


def _alt(points: Sequence[Point]) -> str:
    sentences = []
    for point in points:
        if point.is_ours:
            ours = point.accuracy
            deviation = "" if ours.deviation is None else f" ± {100 * ours.deviation:.2f}"
            runs = f"{ours.count} run{'s' if ours.count > 1 else ''}"
            sentences.append(
                f"{point.network} {point.method} {point.label}".rstrip()
                + f": {percent(ours.mean)}{deviation} ({runs}) with {point.costs['params']:,.0f} parameters"
            )
    papers = [point.accuracy.mean for point in points if not point.is_ours]
    if papers:
        span = f"{percent(float(np.min(papers)))} to {percent(float(np.max(papers)))}"
        sentences.append(f"{len(papers)} points of the paper from {span}")
    return "; ".join(sentences) + "."
