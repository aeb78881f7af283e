"""What a run came to: sizes, accuracies at every stage, and what it took."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from strucspars.measure.counting import count_macs
from strucspars.measure.layers import BeforeAfter
from strucspars.training.recipe import Recipe

SUMMARY_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class StageAccuracy:
    """Accuracies of one stage's epochs on the test images.

    Attributes:
        last_top1, last_top5: after the last epoch; these count.
        best_top1, best_epoch: the best epoch, chosen on the test images: an optimist's number.
    """

    last_top1: float
    last_top5: float
    best_top1: float
    best_epoch: int


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """A finished run.

    Attributes:
        name, kind, seed, model, data: from the recipe.
        params, macs, paper_flops: of the dense network and of the small one.
        target: removed fraction that was asked for; None for a dense run.
        removed_param_fraction, removed_mac_fraction: what was reached.
        min_kept_norm: the searched threshold (Table 5); None where none was searched.
        removed_before_search: fraction that was removed at the threshold of the training, before the search.
        sparsified: first stage; None if there was none.
        before_compression_top1: right before compression.
        compressed_top1, compressed_top5: right after compression, before any finetuning.
        recalibrated_top1: the same with batch-norm statistics recomputed; None if that was not asked for.
        finetuned: second stage; for a dense network, its training.
        converted_top1: of the small network as it is saved.
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
    finetune_form: str | None
    seconds: Mapping[str, float]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"version": SUMMARY_VERSION} | asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "RunSummary":
        """The summary that `to_json` has written.

        Raises:
            ValueError: it is not one.
        """
        if not isinstance(values, Mapping) or values.get("version") != SUMMARY_VERSION:
            raise ValueError(f"not a summary of version {SUMMARY_VERSION}; the run was made by another version")
        parts = dict(values)
        del parts["version"]
        try:
            for key in ("params", "macs", "paper_flops"):
                parts[key] = BeforeAfter(**parts[key])
            for key in ("sparsified", "finetuned"):
                parts[key] = None if parts[key] is None else StageAccuracy(**parts[key])
            return cls(**parts)
        except (KeyError, TypeError) as error:
            raise ValueError(f"a damaged summary: {error}") from error


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
        best_epoch=best["epoch"],
    )


def stage_seconds(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds of every stage."""
    seconds: dict[str, float] = {}
    for row in rows:
        seconds[row["stage"]] = seconds.get(row["stage"], 0.0) + row["seconds"]
    return seconds


def run_summary(
    recipe: Recipe,
    rows: Sequence[Mapping[str, Any]],
    *,
    dense: nn.Module,
    small: nn.Module,
    example: torch.Tensor,
    converted_top1: float,
    finetune_form: str | None,
) -> RunSummary:
    """Sum a finished run up from its metrics and its two networks."""
    finetuned = stage_accuracy(rows, "train" if recipe.kind == "dense" else "finetune")
    assert finetuned is not None
    compressed = next((row for row in rows if row["stage"] == "compress"), {})
    before, after = count_macs(dense, example), count_macs(small, example)
    params, macs = BeforeAfter(before.params, after.params), BeforeAfter(before.macs, after.macs)
    removed = [row["removed_fraction"] for row in rows if row["stage"] == "sparsify"]
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
        sparsified=stage_accuracy(rows, "sparsify") or stage_accuracy(rows, "slim"),
        before_compression_top1=compressed.get("before_top1"),
        compressed_top1=compressed.get("test_top1"),
        compressed_top5=compressed.get("test_top5"),
        recalibrated_top1=compressed.get("recalibrated_top1"),
        finetuned=finetuned,
        converted_top1=converted_top1,
        finetune_form=finetune_form,
        seconds=stage_seconds(rows),
    )
