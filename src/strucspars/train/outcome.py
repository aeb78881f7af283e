"""What a run came to: sizes, accuracies at every stage, and what it took."""

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import torch
from torch import nn

from strucspars.core.checks import is_number
from strucspars.cost.counting import count_macs
from strucspars.cost.layers import BeforeAfter
from strucspars.train.evaluation import Accuracy
from strucspars.train.recipe import Recipe
from strucspars.train.run_folder import RunFolder

SUMMARY_VERSION = 1
# Nothing that a run measures is larger, and arithmetic with larger numbers may overflow.
LARGEST = 2.0**63

# What every row of the metrics has, and what some have.
ROW_TYPES: Mapping[str, Any] = {"stage": str, "epoch": int, "test_top1": float, "test_top5": float, "seconds": float}
MORE_ROW_TYPES: Mapping[str, Any] = dict.fromkeys(
    ("removed_fraction", "min_kept_norm", "before_top1", "recalibrated_top1"), float | None
)

Part = TypeVar("Part")


@dataclass(frozen=True, kw_only=True)
class StageAccuracy:
    """Accuracies of one stage's epochs on the test images.

    Attributes:
        last_top1, last_top5: after the last epoch; these count.
        best_top1, best_top5, best_epoch: the epoch of the best top-1, chosen on the test images: an optimist's number.
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
        target: removed fraction that was asked for; None for a dense run.
        removed_param_fraction, removed_mac_fraction: what was reached.
        min_kept_norm: the searched threshold (Table 5); None where none was searched.
        removed_before_search: fraction that was removed at the threshold of the training, before the search.
        sparsified: first stage; None if there was none.
        before_compression_top1: right before compression.
        compressed_top1, compressed_top5: right after compression, before any finetuning.
        recalibrated_top1: the same with batch-norm statistics recomputed; None if that was not asked for.
        finetuned: second stage; for a dense network, its training.
        converted_top1, converted_top5: of the small network as it is saved; the first runs did not record the latter.
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
    def from_json(cls, values: Mapping[str, Any]) -> "RunSummary":
        """The summary that `to_json` has written.

        Raises:
            ValueError: it is not one.
        """
        if not isinstance(values, Mapping) or values.get("version") != SUMMARY_VERSION:
            raise ValueError(f"not a summary of version {SUMMARY_VERSION}; the run was made by another version")
        try:
            return _typed_part(cls, {key: value for key, value in values.items() if key != "version"}, "")
        except ValueError as error:
            raise ValueError(f"a damaged summary: {error}") from error


def read_summary(folder: RunFolder) -> RunSummary | None:
    """The summary of the run in a folder; None if it is not finished.

    Raises:
        ValueError: the file is damaged; names it.
    """
    values = folder.read_json(folder.summary_json_path)
    if values is None and not folder.summary_json_path.exists():
        return None
    try:
        return RunSummary.from_json(values)
    except ValueError as error:
        raise ValueError(f"{folder.summary_json_path}: {error}") from error


def read_metrics(folder: RunFolder) -> list[dict[str, Any]]:
    """The rows of the metrics, if they have what this module reads from them.

    Raises:
        ValueError: a row is damaged; names the file and the line.
    """
    rows = folder.metrics()
    for number, row in enumerate(rows, start=1):
        try:
            for key, hint in ROW_TYPES.items():
                _typed(hint, row.get(key), key)
            for key, hint in MORE_ROW_TYPES.items():
                _typed(hint, row.get(key), key)
        except ValueError as error:
            raise ValueError(f"{folder.metrics_path}, line {number}, is damaged: {error}") from error
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
    """Sum a finished run up from its metrics, its two networks, and the accuracy of the one that is saved."""
    compressed = next((row for row in rows if row["stage"] == "compress"), {})
    params, macs, paper_flops = _sizes(dense, small, example)
    return RunSummary(
        name=recipe.name,
        kind=recipe.kind,
        seed=recipe.seed,
        model=recipe.model.name,
        data=recipe.data.name,
        params=params,
        macs=macs,
        paper_flops=paper_flops,
        target={"strucspars": recipe.sparsify.target, "slimming": recipe.slimming.target}.get(recipe.kind),
        removed_param_fraction=params.removed_fraction,
        removed_mac_fraction=macs.removed_fraction,
        min_kept_norm=compressed.get("min_kept_norm"),
        removed_before_search=_removed_by_training(rows),
        sparsified=stage_accuracy(rows, "sparsify") or stage_accuracy(rows, "slim"),
        before_compression_top1=compressed.get("before_top1"),
        compressed_top1=compressed.get("test_top1"),
        compressed_top5=compressed.get("test_top5"),
        recalibrated_top1=compressed.get("recalibrated_top1"),
        finetuned=_second_stage(recipe, rows),
        converted_top1=converted.top1,
        converted_top5=converted.top5,
        finetune_form=finetune_form,
        seconds=stage_seconds(rows),
    )


def _sizes(dense: nn.Module, small: nn.Module, example: torch.Tensor) -> tuple[BeforeAfter, BeforeAfter, BeforeAfter]:
    """Parameters, MACs and the paper's FLOPs."""
    before, after = count_macs(dense, example), count_macs(small, example)
    return (
        BeforeAfter(before.params, after.params),
        BeforeAfter(before.macs, after.macs),
        BeforeAfter(before.paper_flops, after.paper_flops),
    )


def _removed_by_training(rows: Sequence[Mapping[str, Any]]) -> float | None:
    removed: list[float | None] = [row.get("removed_fraction") for row in rows if row["stage"] == "sparsify"]
    return removed[-1] if removed else None


def _second_stage(recipe: Recipe, rows: Sequence[Mapping[str, Any]]) -> StageAccuracy:
    accuracy = stage_accuracy(rows, "train" if recipe.kind == "dense" else "finetune")
    assert accuracy is not None
    return accuracy


def _typed_part(kind: type[Part], value: object, key: str) -> Part:
    """The dataclass that a JSON object stands for."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{key} must be an object, got {reprlib.repr(value)}")
    hints = get_type_hints(kind)
    # Dataclasses all; the checker cannot say so of a type.
    options = {field.name: field.default for field in fields(kind) if field.default is not MISSING}  # type: ignore[arg-type]
    prefix = f"{key}." if key else ""
    for name, entry in value.items():
        if name not in hints:
            raise ValueError(f"there is no {prefix}{name}")
        options[name] = _typed(hints[name], entry, f"{prefix}{name}")
    for name in hints:
        if name not in options:
            raise ValueError(f"{prefix}{name} is missing")
    return kind(**options)


def _typed(hint: Any, value: Any, key: str) -> Any:
    """The value, if it is of the type."""
    kind, arguments = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        (wanted,) = (argument for argument in arguments if argument is not NoneType)
        return None if value is None else _typed(wanted, value, key)
    if is_dataclass(hint):
        return _typed_part(hint, value, key)  # type: ignore[arg-type]  # a type, not an instance
    if kind is not None:
        if isinstance(value, Mapping):
            return {name: _typed(arguments[1], entry, f"{key}.{name}") for name, entry in value.items()}
        raise ValueError(f"{key} must be an object, got {reprlib.repr(value)}")
    fits = is_number(value) if hint is float else type(value) is hint
    # Not a number is not smaller than anything.
    if not fits or (hint is not str and not abs(value) < LARGEST):
        words = {str: "a text", int: "a whole number", float: "a number"}
        raise ValueError(f"{key} must be {words[hint]}, got {reprlib.repr(value)}")
    return value
