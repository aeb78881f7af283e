"""A run in a few numbers."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from strucspars.measure.layers import BeforeAfter
from strucspars.report.latency import latency_of
from strucspars.report.run_reading import RunData
from strucspars.training.outcome import RunSummary, stage_accuracy
from strucspars.training.outcome_text import duration, percent


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
