"""The outcome of a run: sizes, accuracies of every stage, and seconds."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from strucspars.cost.counting import count_macs
from strucspars.cost.layers import BeforeAfter
from strucspars.io.records import as_record, check_header, convert
from strucspars.train.epochs import Accuracy
from strucspars.train.recipe import COMPRESS, FINETUNE, SLIM, SPARSIFY, TRAIN, Recipe, stage_epochs
from strucspars.train.run_folder import RunFolder

SUMMARY_VERSION = 1

# What every row of the metrics has, and what some have.
ROW_TYPES: Mapping[str, Any] = {"stage": str, "epoch": int, "test_top1": float, "test_top5": float, "seconds": float}
MORE_ROW_TYPES: Mapping[str, Any] = dict.fromkeys(
    ("removed_fraction", "min_kept_norm", "before_top1", "recalibrated_top1"), float | None
)


@dataclass(frozen=True, kw_only=True)
class StageAccuracy:
    """Accuracies of one stage's epochs on the test images.

    Attributes:
        last_top1, last_top5: after the last epoch; these count.
        best_top1, best_top5, best_epoch: of the epoch with the best top-1; chosen on the test images, so optimistic.
    """

    last_top1: float
    last_top5: float
    best_top1: float
    best_top5: float
    best_epoch: int


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """A finished run.

    Attributes:
        name, kind, seed, model, data: from the recipe.
        params, macs, paper_flops: of the dense network and of the small one.
        target: removed fraction that the recipe asks for; None for a dense run.
        removed_param_fraction, removed_mac_fraction: achieved.
        min_kept_norm: the searched threshold (Table 5); None where none was searched.
        removed_before_search: fraction that was removed at the threshold of the training, before the search.
        sparsified: first stage; None if there was none.
        before_compression_top1: right before compression.
        compressed_top1, compressed_top5: right after compression, before any finetuning.
        recalibrated_top1: the same with batch-norm statistics recomputed; None without.
        finetuned: second stage; for a dense network, its training.
        converted_top1, converted_top5: of the small network as it is saved; older summaries lack the latter.
        finetune_form: `masked` or `grouped`; None where nothing was compressed.
        seconds: of every stage.
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
    """The rows of the metrics, with the fields of `ROW_TYPES` checked."""
    rows = folder.metrics()
    for number, row in enumerate(rows, start=1):
        for key, hint in {**ROW_TYPES, **MORE_ROW_TYPES}.items():
            convert(hint, row.get(key), f"{folder.metrics_path}, line {number}", key)
    return rows


def stage_accuracy(rows: Sequence[Mapping[str, Any]], stage: str) -> StageAccuracy | None:
    """Last and best epoch of a stage, from the rows of the metrics; None if it has none."""
    epochs = [row for row in rows if row["stage"] == stage]
    if not epochs:
        return None
    best = max(epochs, key=lambda row: row["test_top1"])
    return StageAccuracy(
        last_top1=epochs[-1]["test_top1"],
        last_top5=epochs[-1]["test_top5"],
        best_top1=best["test_top1"],
        best_top5=best["test_top5"],
        best_epoch=best["epoch"],
    )


def stage_seconds(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds of every stage."""
    seconds: dict[str, float] = {}
    for row in rows:
        seconds[row["stage"]] = seconds.get(row["stage"], 0.0) + row["seconds"]
    return seconds


def progress_words(recipe: Recipe, rows: Sequence[Mapping[str, Any]]) -> str:
    """How far an unfinished run has come, from the rows of the metrics."""
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
    """The summary of a run from its metrics, its two networks, and the accuracy of the one that is saved."""
    compressed = next((row for row in rows if row["stage"] == COMPRESS), {})
    removed = [row.get("removed_fraction") for row in rows if row["stage"] == SPARSIFY]
    before, after = count_macs(dense, example), count_macs(small, example)
    params, macs = BeforeAfter(before.params, after.params), BeforeAfter(before.macs, after.macs)
    finetuned = stage_accuracy(rows, TRAIN if recipe.kind == "dense" else FINETUNE)
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
        target={"strucspars": recipe.sparsify.target, "slimming": recipe.slimming.target}.get(recipe.kind),
        removed_param_fraction=params.removed_fraction,
        removed_mac_fraction=macs.removed_fraction,
        min_kept_norm=compressed.get("min_kept_norm"),
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
