"""Accuracy and cost of experiments, and of what the paper has to compare them with, as points (Fig. 3)."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from strucspars.bench.results import BenchRow
from strucspars.core.checks import is_number
from strucspars.paper.baselines import PAPER_BASELINES
from strucspars.report.experiments import Experiment, paper_accuracy
from strucspars.report.reading import RunData
from strucspars.train.outcome import RunSummary
from strucspars.train.paper_rows import PAPER_ROWS
from strucspars.train.recipe import Kind


@dataclass(frozen=True, kw_only=True)
class Latency:
    """The fastest way to run a network, at the smallest batch and the fewest threads that were timed.

    Attributes:
        ms: milliseconds for the batch, median.
        speedup: over the same runtime's dense network; None for that itself, and where it was not timed.
        runtime: its name.
        batch, threads: of the timing.
        hardware: what it was timed on; times of different hardware do not compare.
    """

    ms: float
    speedup: float | None
    runtime: str
    batch: int
    threads: int
    hardware: Mapping[str, Any]


def latency_of(run: RunData) -> Latency | None:
    """How fast the run's network is; None if that was not measured."""
    if run.bench is None or run.recipe is None:
        return None
    form = "dense" if run.recipe.kind == "dense" else "compressed"
    rows = [row for row in run.bench.rows if row.form == form and _is_timed(row)]
    if not rows:
        return None
    easiest = min((row.batch, row.threads) for row in rows)
    fastest = min((row for row in rows if (row.batch, row.threads) == easiest), key=_ms)
    timing = fastest.timing
    assert timing is not None
    return Latency(
        ms=timing.ms,
        speedup=None if timing.speedup is None or form == "dense" else timing.speedup.median,
        runtime=fastest.runtime,
        batch=fastest.batch,
        threads=fastest.threads,
        hardware=run.bench.hardware,
    )


def _is_timed(row: BenchRow) -> bool:
    # Read from a file: its numbers may be anything.
    return row.timing is not None and is_number(row.timing.ms) and 0 < row.timing.ms < float("inf")


def _ms(row: BenchRow) -> float:
    assert row.timing is not None
    return row.timing.ms


Source = Literal["ours", "paper"]
Cost = Literal["params", "macs", "paper_flops", "latency_ms"]
ON_LINE = ("dense", "strucspars")
# Machine, batch and threads: times stand on one axis only if they were measured alike.
Conditions = tuple[Mapping[str, object], int, int]


@dataclass(frozen=True, kw_only=True)
class Point:
    """A network by accuracy and cost.

    Attributes:
        source: `ours` or `paper`.
        network: such as `cifar10-resnet20`, or the model's name with the data's.
        method: `dense`, `strucspars`, `slimming`, one of Table 3, or `other methods`.
        label: the removed fraction that was asked for, how a further network of that size was made, or the name of
            another method; empty where the method says all.
        is_on_line: whether the line from the dense network through its compressed forms goes through it.
        accuracy: top-1, as a fraction; the mean over `count` runs.
        deviation: over the runs; None where not known.
        count: number of runs.
        costs: by name, those that are known.
    """

    source: Source
    network: str
    method: str
    label: str
    is_on_line: bool
    accuracy: float
    deviation: float | None
    count: int
    costs: Mapping[Cost, float]


def points_of(experiments: Sequence[Experiment]) -> tuple[Point, ...]:
    """Our experiments, and the paper's points of the same networks."""
    conditions = _common_conditions(experiments)
    ours: list[Point] = []
    first_of_size: dict[tuple[str, str, float | None], Experiment] = {}
    for experiment in experiments:
        size = _network(experiment.first), _method(experiment), experiment.first.target
        ours.append(_own_point(experiment, first_of_size.setdefault(size, experiment), conditions))
    networks = dict.fromkeys(point.network for point in ours)
    papers = [point for network in networks for point in (*_paper_points(network), *_other_points(network))]
    return (*ours, *papers)


def latency_note(experiments: Sequence[Experiment]) -> str:
    """How the plotted latencies were measured; empty if none was."""
    measured = _latencies(experiments)
    if not measured:
        return ""
    first = measured[0]
    return f"Latency: fastest runtime, batch {first.batch}, {first.threads} thread{'s' if first.threads > 1 else ''}."


def _latencies(experiments: Sequence[Experiment]) -> list[Latency]:
    found = (latency_of(run) for experiment in experiments for run in experiment.runs)
    return [latency for latency in found if latency is not None]


def _conditions(latency: Latency) -> Conditions:
    return latency.hardware, latency.batch, latency.threads


def _common_conditions(experiments: Sequence[Experiment]) -> Conditions | None:
    """Those of the first timing."""
    measured = _latencies(experiments)
    return _conditions(measured[0]) if measured else None


def _own_point(experiment: Experiment, first_of_size: Experiment, conditions: Conditions | None) -> Point:
    first, accuracy = experiment.first, experiment.sample(lambda run: run.finetuned.last_top1)
    assert accuracy is not None
    costs: dict[Cost, float] = {
        "params": statistics.fmean(run.params.after for run in experiment.summaries),
        "macs": statistics.fmean(run.macs.after for run in experiment.summaries),
        "paper_flops": statistics.fmean(run.paper_flops.after for run in experiment.summaries),
    }
    times = [latency.ms for latency in _latencies([experiment]) if _conditions(latency) == conditions]
    if times:
        costs["latency_ms"] = statistics.fmean(times)
    method = _method(experiment)
    return Point(
        source="ours",
        network=_network(first),
        method=method,
        label=_label(experiment, first_of_size) if method in get_args(Kind) else "",
        is_on_line=method in ON_LINE and experiment is first_of_size,
        accuracy=accuracy.mean,
        deviation=accuracy.deviation,
        count=accuracy.count,
        costs=costs,
    )


def _method(experiment: Experiment) -> str:
    recipe = experiment.runs[0].recipe
    if recipe is not None and recipe.finetune.ablation != "finetune":
        return recipe.finetune.ablation
    return experiment.first.kind


def _label(experiment: Experiment, first_of_size: Experiment) -> str:
    if experiment is not first_of_size:
        return experiment.label.removeprefix(first_of_size.label).lstrip("- ") or experiment.label
    return "" if experiment.first.target is None else f"{experiment.first.target:.0%}"


def _network(run: RunSummary) -> str:
    """A network of the paper as recipes call it; others by model and data."""
    network = f"{run.data}-{run.model.removeprefix('preact-')}"
    return network if f"{network}-dense" in PAPER_ROWS else f"{run.model} on {run.data}"


def _paper_points(network: str) -> Iterator[Point]:
    for name, row in PAPER_ROWS.items():
        accuracy = paper_accuracy(row)
        if not name.startswith(f"{network}-") or row.table == 3 or accuracy is None:
            continue
        rate = name.removeprefix(f"{network}-")
        method = "dense" if rate == "dense" else "slimming" if rate.startswith("slimming") else "strucspars"
        yield Point(
            source="paper",
            network=network,
            method=method,
            label="" if rate == "dense" else f"{rate.removeprefix('slimming')}%",
            is_on_line=method in ON_LINE,
            accuracy=accuracy.mean,
            deviation=accuracy.deviation,
            count=accuracy.count,
            costs={"params": row.params, "paper_flops": row.flops},
        )


def _other_points(network: str) -> Iterator[Point]:
    for row in PAPER_BASELINES.get(network, ()):
        costs: dict[Cost, float] = {"paper_flops": row.flops}
        if row.params is not None:
            costs["params"] = row.params
        yield Point(
            source="paper",
            network=network,
            method="other methods",
            label=row.method,
            is_on_line=False,
            accuracy=row.accuracy / 100,
            deviation=None,
            count=1,
            costs=costs,
        )
