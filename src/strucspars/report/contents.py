"""What stands in a report: figures, tables and pictures of one run, and of several beside each other."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from strucspars.cost.layers import BeforeAfter
from strucspars.report.comparison_tables import comparison_tables
from strucspars.report.drawing import NamedFigure
from strucspars.report.experiments import Experiment, experiments_of
from strucspars.report.figures.cardinality import cardinality_figure, cardinality_of
from strucspars.report.figures.churn import churn_figure, churn_of
from strucspars.report.figures.confusion import Confusion, chosen_confusions, confusion_figure, confusions_of
from strucspars.report.figures.dynamics import dynamics_figure, dynamics_of
from strucspars.report.figures.importance import (
    LayerPictures,
    LevelPictures,
    chosen_layers,
    importance_figure,
    layer_pictures,
    level_pictures,
)
from strucspars.report.figures.trade_off import trade_off_figure
from strucspars.report.named_table import NamedTable
from strucspars.report.reading import RunData
from strucspars.report.tables import confusion_table, run_tables
from strucspars.report.trade_off_points import latency_note, latency_of, points_of
from strucspars.train.outcome import RunSummary, stage_accuracy
from strucspars.train.outcome_text import duration, percent
from strucspars.train.recipe import SparsifyRecipe


@dataclass(frozen=True, kw_only=True)
class Headline:
    """One number that people ask for first.

    Attributes:
        label: what it is, such as `parameters`.
        value: as people read it, such as `130,394`.
        note: what to compare it with, such as `40.59% of 219,482 removed`; empty if nothing.
    """

    label: str
    value: str
    note: str = ""


def headlines(run: RunData) -> tuple[Headline, ...]:
    """Parameters, MACs, accuracies, target, speed and time, as far as they are known."""
    return (*_sizes(run), *_accuracies(run), *_one_shot(run), *_target(run), *_speed(run), *_time(run))


def _sizes(run: RunData) -> Iterator[Headline]:
    counted = run.summary or run.one_shot
    if counted is not None:
        yield _size("parameters", counted.params)
        yield _size("MACs", counted.macs)
    elif run.plan is not None:
        yield Headline(
            label="parameters", value=f"{percent(run.plan.removed_param_fraction)} removed", note="by the plan"
        )
        if run.plan.removed_mac_fraction is not None:
            yield Headline(label="MACs", value=f"{percent(run.plan.removed_mac_fraction)} removed", note="by the plan")


def _size(label: str, count: BeforeAfter) -> Headline:
    removed = f"{percent(count.removed_fraction)} of {count.before:,} removed"
    return Headline(label=label, value=f"{count.after:,}", note="" if count.before == count.after else removed)


def _accuracies(run: RunData) -> Iterator[Headline]:
    compressed = next((row for row in run.rows if row["stage"] == "compress"), {})
    if "before_top1" in compressed:
        yield Headline(label="top-1 before compression", value=percent(compressed["before_top1"]))
    if "test_top1" in compressed:
        yield Headline(label="top-1 right after compression", value=percent(compressed["test_top1"]))
    for stage, label in (("finetune", "top-1 finetuned"), ("train", "top-1 trained")):
        accuracy = stage_accuracy(run.rows, stage)
        if accuracy is not None:
            yield Headline(
                label=label if run.is_finished else f"{label} so far",
                value=percent(accuracy.last_top1),
                note=f"best epoch {percent(accuracy.best_top1)}, chosen on the test images",
            )
    if not compressed:
        sparsified = stage_accuracy(run.rows, "sparsify") or stage_accuracy(run.rows, "slim")
        if sparsified is not None:
            yield Headline(label="top-1 of the first stage so far", value=percent(sparsified.last_top1))


def _one_shot(run: RunData) -> Iterator[Headline]:
    """What stands where others have accuracies."""
    if run.one_shot is None:
        return
    yield Headline(label="accuracy", value="not measured", note="one-shot: never trained here")
    yield Headline(
        label="lost norm",
        value=percent(run.one_shot.lost_norm),
        note="of the layers that can be grouped; finetune before you judge the network",
    )
    plan, size = run.plan, run.one_shot
    if plan is not None and plan.target is not None:
        reached = size.macs if plan.budget == "macs" else size.params
        yield _reached(plan.target, reached.removed_fraction, on_macs=plan.budget == "macs")
    if plan is not None and plan.min_kept_norm is not None:
        yield Headline(label="min_kept_norm", value=f"{plan.min_kept_norm:.3f}", note="searched")


def _reached(target: float, reached: float, *, on_macs: bool) -> Headline:
    words = f"{percent(reached)} of the {'MACs' if on_macs else 'parameters'} reached"
    return Headline(label="target", value=percent(target), note=words)


def _target(run: RunData) -> Iterator[Headline]:
    summary = run.summary
    if summary is None or summary.target is None:
        return
    on_macs = summary.kind == "strucspars" and run.recipe is not None and run.recipe.sparsify.budget == "macs"
    reached = summary.removed_mac_fraction if on_macs else summary.removed_param_fraction
    yield _reached(summary.target, reached, on_macs=on_macs)
    if summary.min_kept_norm is not None:
        yield Headline(label="min_kept_norm", value=f"{summary.min_kept_norm:.3f}", note=_search(summary))


def _search(summary: RunSummary) -> str:
    before = percent(summary.removed_before_search)
    return f"searched; training alone would remove {before}" if before else "searched"


def _speed(run: RunData) -> Iterator[Headline]:
    latency = latency_of(run)
    if latency is None:
        return
    where = f"{latency.runtime}, batch {latency.batch}, {latency.threads} thread{'s' if latency.threads > 1 else ''}"
    faster = "" if latency.speedup is None else f"{latency.speedup:.2f} x as fast as dense; "
    yield Headline(label="latency", value=f"{latency.ms:.3g} ms", note=f"{faster}{where}")


def _time(run: RunData) -> Iterator[Headline]:
    by_stage = run.seconds if run.one_shot is None else {"one-shot": run.one_shot.seconds}
    if by_stage:
        several = (f"{stage} {duration(seconds)}" for stage, seconds in by_stage.items())
        stages = ", ".join(several if len(by_stage) > 1 else by_stage)
        devices = _devices(run.environment)
        where = f", on {' and '.join(devices)}" if devices else ""
        yield Headline(label="time", value=duration(sum(by_stage.values())), note=f"{stages}{where}")


def _devices(environment: Mapping[str, Any]) -> list[str]:
    """What a run was computed on: more than one device where it went on elsewhere."""
    earlier = environment.get("earlier")
    known = [each for each in earlier if isinstance(each, Mapping)] if isinstance(earlier, list) else []
    names = [each.get("device") or each.get("cpu") for each in (*known, environment)]
    return list(dict.fromkeys(name for name in names if isinstance(name, str)))


# Wider tables nobody reads; the figure shows them.
MOST_TABLE_GROUPS = 16


@dataclass(frozen=True, eq=False, kw_only=True)
class RunContents:
    """What there is to show of one run.

    Attributes:
        run: what was read; its `problems` name what is missing.
        headlines: come first.
        figures: in the order to show them.
        tables: likewise; the one named `layers` is worth sorting.
        layers: pictures of every layer's importance matrix, in network order; empty where none was stored.
        levels: pictures of R_g and U_g that all layers share.
    """

    run: RunData
    headlines: tuple[Headline, ...]
    figures: tuple[NamedFigure, ...]
    tables: tuple[NamedTable, ...]
    layers: tuple[LayerPictures, ...]
    levels: LevelPictures


@dataclass(frozen=True, eq=False, kw_only=True)
class ComparisonContents:
    """What there is to show of several runs beside each other; both are empty where no run is finished."""

    figures: tuple[NamedFigure, ...]
    tables: tuple[NamedTable, ...]


def run_contents(run: RunData) -> RunContents:
    """Everything to show of one run, as far as there is something; never fails on what a folder lacks."""
    confusions = () if run.plan is None else chosen_confusions(confusions_of(run.plan))
    decay = SparsifyRecipe().decay if run.recipe is None else run.recipe.sparsify.decay
    layers = layer_pictures(run)
    return RunContents(
        run=run,
        headlines=headlines(run),
        figures=tuple(_figures(run, confusions, decay)),
        tables=(*run_tables(run), *_confusion_tables(confusions)),
        layers=layers,
        levels=level_pictures(layers, decay=decay),
    )


def _figures(run: RunData, confusions: Sequence[Confusion], decay: float) -> Iterator[NamedFigure]:
    dynamics, cardinality, churn = dynamics_of(run), cardinality_of(run), churn_of(run)
    if dynamics.epochs:
        yield dynamics_figure(dynamics)
    if cardinality.names:
        yield cardinality_figure(cardinality)
    if confusions:
        yield confusion_figure(confusions)
    if len(churn.epochs):
        yield churn_figure(churn)
    for layer in chosen_layers(run):
        yield importance_figure(layer, decay=decay)


def _confusion_tables(confusions: Sequence[Confusion]) -> Iterator[NamedTable]:
    for number, confusion in enumerate(confusions, start=1):
        if max(confusion.learned.shape) <= MOST_TABLE_GROUPS:
            yield confusion_table(confusion, number)


def comparison_contents(runs: Sequence[RunData]) -> ComparisonContents:
    """Everything to show of several runs: accuracy against cost, and the paper's tables with our numbers."""
    experiments = experiments_of(runs)
    return ComparisonContents(figures=tuple(_trade_offs(experiments)), tables=comparison_tables(experiments))


def _trade_offs(experiments: Sequence[Experiment]) -> Iterator[NamedFigure]:
    """One for every data set: accuracies on different images do not stand on one axis."""
    for data in dict.fromkeys(experiment.first.data for experiment in experiments):
        alike = [experiment for experiment in experiments if experiment.first.data == data]
        yield trade_off_figure(points_of(alike), data=data, note=latency_note(alike))
