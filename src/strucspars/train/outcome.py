"""The outcome of a run: sizes, accuracies of every stage, and seconds; as a record and as text."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from strucspars.cost.counting import BeforeAfter, count_macs
from strucspars.cost.text_table import Column, duration, percent, text_table
from strucspars.io.records import as_record, check_header, convert
from strucspars.train.epochs import Accuracy
from strucspars.train.recipe import COMPRESS, FINETUNE, SLIM, SPARSIFY, Recipe, last_stage, learning_stage, stage_epochs
from strucspars.train.run_folder import RunFolder

SUMMARY_VERSION = 1
OPTIMISM = "The best epoch is chosen on the test images, so it is optimistic."

# Fields of a row of the metrics, not all of which every row has.
_ROW_TYPES: Mapping[str, Any] = {
    **{"stage": str, "epoch": int, "test_top1": float, "test_top5": float, "seconds": float},
    **dict.fromkeys(("removed_fraction", "min_kept_norm", "before_top1", "recalibrated_top1"), float | None),
}


@dataclass(frozen=True, kw_only=True)
class StageAccuracy:
    """Accuracies of one stage's epochs on the test images; the last ones count, the best epoch is chosen on them."""

    last_top1: float
    last_top5: float
    best_top1: float
    best_top5: float
    best_epoch: int


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """A finished run.

    Attributes:
        min_kept_norm: the searched threshold (Table 5); None where none was searched.
        removed_before_search: fraction that was removed at the threshold of the training, before the search.
        compressed_top1, compressed_top5: right after compression, before any finetuning.
        recalibrated_top1: the same with batch-norm statistics recomputed; None without.
        converted_top1, converted_top5: of the saved small network; None where top-5 was not recorded.
    """

    name: str
    kind: str
    seed: int
    model: str
    data: str
    params: BeforeAfter
    macs: BeforeAfter
    paper_flops: BeforeAfter
    target: float | None
    removed_param_fraction: float
    removed_mac_fraction: float
    min_kept_norm: float | None
    removed_before_search: float | None
    sparsified: StageAccuracy | None
    before_compression_top1: float | None
    compressed_top1: float | None
    compressed_top5: float | None
    recalibrated_top1: float | None
    finetuned: StageAccuracy
    converted_top1: float
    converted_top5: float | None = None
    finetune_form: str | None
    seconds: Mapping[str, float]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"version": SUMMARY_VERSION} | asdict(self)

    @classmethod
    def from_json(cls, values: object, where: str = "the summary") -> "RunSummary":
        """The summary that `to_json` has written; a `RecordError` if it is damaged."""
        return as_record(cls, check_header(values, where, version=SUMMARY_VERSION), where)


def read_summary(folder: RunFolder) -> RunSummary | None:
    """The summary of the run in a folder; None if it is not finished."""
    if not folder.summary_json_path.exists():
        return None
    return RunSummary.from_json(folder.read_json(folder.summary_json_path), str(folder.summary_json_path))


def read_metrics(folder: RunFolder) -> list[dict[str, Any]]:
    """The rows of the metrics, with the fields checked that summaries and reports read."""
    rows = folder.metrics()
    for number, row in enumerate(rows, start=1):
        for key, hint in _ROW_TYPES.items():
            convert(hint, row.get(key), f"{folder.metrics_path}, line {number}", key)
    return rows


def stage_accuracy(rows: Sequence[Mapping[str, Any]], stage: str) -> StageAccuracy | None:
    """Last and best epoch of a stage; None if no epoch of it is done."""
    epochs = [(row["test_top1"], row["test_top5"], row["epoch"]) for row in rows if row["stage"] == stage]
    if not epochs:
        return None
    last_top1, last_top5, _ = epochs[-1]
    best_top1, best_top5, best_epoch = max(epochs, key=lambda epoch: epoch[0])
    return StageAccuracy(
        last_top1=last_top1, last_top5=last_top5, best_top1=best_top1, best_top5=best_top5, best_epoch=best_epoch
    )


def stage_seconds(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds of every stage."""
    seconds: dict[str, float] = {}
    for row in rows:
        seconds[row["stage"]] = seconds.get(row["stage"], 0.0) + row["seconds"]
    return seconds


def progress_words(recipe: Recipe, rows: Sequence[Mapping[str, Any]]) -> str:
    """How far an unfinished run is, in words."""
    stage, epoch = rows[-1]["stage"], rows[-1]["epoch"]
    if stage == COMPRESS:
        return "compressed, not finetuned yet"
    return f"{stage}, epoch {epoch} of {stage_epochs(recipe, stage)} done"


def run_summary(
    recipe: Recipe,
    rows: Sequence[Mapping[str, Any]],
    *,
    dense: nn.Module,
    small: nn.Module,
    example: torch.Tensor,
    converted: Accuracy,
    finetune_form: str | None,
) -> RunSummary:
    """The summary of a run from its metrics, its two networks and the accuracy of the saved one."""
    compressed = next((row for row in rows if row["stage"] == COMPRESS), {})
    learning = [row for row in rows if row["stage"] == learning_stage(recipe)]
    # A progressive run knows its threshold from the epoch after its decision on.
    removed = [row.get("removed_fraction") for row in learning if row.get("min_kept_norm") is None]
    before, after = count_macs(dense, example), count_macs(small, example)
    params, macs = BeforeAfter(before.params, after.params), BeforeAfter(before.macs, after.macs)
    finetuned = stage_accuracy(rows, last_stage(recipe))
    assert finetuned is not None, "a finished run has trained its last stage"
    return RunSummary(
        name=recipe.name,
        kind=recipe.kind,
        seed=recipe.seed,
        model=recipe.model.name,
        data=recipe.data.name,
        params=params,
        macs=macs,
        paper_flops=BeforeAfter(before.paper_flops, after.paper_flops),
        target={"strucspars": recipe.sparsify.known_target, "slimming": recipe.slimming.target}.get(recipe.kind),
        removed_param_fraction=params.removed_fraction,
        removed_mac_fraction=macs.removed_fraction,
        min_kept_norm=compressed.get("min_kept_norm", rows[-1].get("min_kept_norm")),
        removed_before_search=removed[-1] if removed else None,
        sparsified=stage_accuracy(rows, SPARSIFY) or stage_accuracy(rows, SLIM),
        before_compression_top1=compressed.get("before_top1"),
        compressed_top1=compressed.get("test_top1"),
        compressed_top5=compressed.get("test_top5"),
        recalibrated_top1=compressed.get("recalibrated_top1"),
        finetuned=finetuned,
        converted_top1=converted.top1,
        converted_top5=converted.top5,
        finetune_form=finetune_form,
        seconds=stage_seconds(rows),
    )


def outcome_text(summary: RunSummary, recipe: Recipe, folder: RunFolder) -> str:
    """A finished run: sizes, accuracies at every stage, and where its files are."""
    heading = f"{summary.name}, seed {summary.seed}: {summary.model} on {summary.data}"
    accuracies, facts = f"{_accuracies(summary, recipe)}\n{OPTIMISM}", _facts(summary, recipe, folder)
    return "\n\n".join((heading, _sizes(summary), accuracies, facts, _places(summary, folder)))


def outcomes_text(summaries: Mapping[Path, RunSummary]) -> str:
    """Finished runs of one recipe in a table, by folder; below them, their mean and deviation."""
    runs = list(summaries.values())
    numbers: dict[str, list[float | None]] = {
        "removed": [run.removed_param_fraction for run in runs],
        "before": [run.before_compression_top1 for run in runs],
        "after": [run.compressed_top1 for run in runs],
        "last epoch": [run.finetuned.last_top1 for run in runs],
        "best epoch": [run.finetuned.best_top1 for run in runs],
        "saved": [run.converted_top1 for run in runs],
    }
    below = ["mean", "deviation"] if len(runs) > 1 else []
    columns = [
        Column("run", [*map(str, summaries), *below], is_text=True),
        Column("params", [*(f"{run.params.after:,}" for run in runs), *("" for _ in below)]),
    ]
    for title, values in numbers.items():
        known = [value for value in values if value is not None]
        spread = [statistics.mean(known), statistics.stdev(known)] if len(known) > 1 else [None for _ in below]
        columns.append(Column(title, [percent(value) for value in (*values, *spread)]))
    return text_table(columns)


def _sizes(summary: RunSummary) -> str:
    counts = summary.params, summary.macs
    columns = [
        Column("size", ["params", "MACs"], is_text=True),
        Column("dense", [f"{count.before:,}" for count in counts]),
        Column("compressed", [f"{count.after:,}" for count in counts]),
        Column("removed", [percent(count.removed_fraction) for count in counts]),
    ]
    return text_table(columns[:2] if summary.kind == "dense" else columns)


def _accuracies(summary: RunSummary, recipe: Recipe) -> str:
    rows: list[tuple[str, float | None, float | None]] = []
    sparsified, finetuned = summary.sparsified, summary.finetuned

    def add_best(stage: str, accuracy: StageAccuracy) -> None:
        rows.append((f"{stage}, best epoch ({accuracy.best_epoch})", accuracy.best_top1, accuracy.best_top5))

    if sparsified is not None:
        add_best("first stage", sparsified)
    if summary.before_compression_top1 is not None:
        top5 = None if sparsified is None else sparsified.last_top5
        rows.append(("before compression", summary.before_compression_top1, top5))
        rows.append(("after compression", summary.compressed_top1, summary.compressed_top5))
    if summary.recalibrated_top1 is not None:
        rows.append(("the same, batch norm recalibrated", summary.recalibrated_top1, None))
    stage = "finetuned" if last_stage(recipe) == FINETUNE else "trained"
    rows.append((f"{stage}, last epoch", finetuned.last_top1, finetuned.last_top5))
    add_best(stage, finetuned)
    rows.append(("saved network", summary.converted_top1, summary.converted_top5))
    titles, *accuracies = zip(*rows, strict=True)
    columns = [Column(f"top-{count}", list(map(percent, each))) for count, each in zip((1, 5), accuracies, strict=True)]
    return text_table([Column("accuracy", titles, is_text=True), *columns])


def _facts(summary: RunSummary, recipe: Recipe, folder: RunFolder) -> str:
    plan = folder.load_plan() if summary.kind == "strucspars" and recipe.sparsify.counts_latency else None
    latency = None if plan is None else plan.latency
    facts, threshold, before = [], summary.min_kept_norm, summary.removed_before_search
    if latency is not None:
        facts.append(f"target      the plan {latency}")
    elif summary.target is not None:
        macs = summary.kind == "strucspars" and recipe.sparsify.budget == "macs"
        counted = "MACs" if macs else "parameters"
        reached = percent(summary.removed_mac_fraction if macs else summary.removed_param_fraction)
        facts.append(f"target      remove {percent(summary.target)} of all {counted}: {reached} reached")
    if threshold is not None:
        facts.append(f"threshold   every grouped layer keeps at least {threshold:.3f} of its norm (searched)")
    if before is not None:
        usual = recipe.sparsify.min_kept_norm
        facts.append(f"            with the {usual:g} of training, {percent(before)} would be removed")
    times = ", ".join(f"{stage} {duration(seconds)}" for stage, seconds in summary.seconds.items())
    return "\n".join([*facts, f"time        {times}"])


def _places(summary: RunSummary, folder: RunFolder) -> str:
    places = {folder.model_path: "the network" if summary.kind == "dense" else "the compressed network"}
    if summary.kind == "strucspars":
        places[folder.plan_path] = "groups and channel orders of every layer"
    places[folder.summary_text_path] = "this text; summary.json for programs"
    places |= {folder.metrics_path: "every epoch", folder.tensorboard: "the same for TensorBoard"}
    width = max(len(str(path)) for path in places)
    return "\n".join(f"{path!s:<{width}}  {meaning}" for path, meaning in places.items())
