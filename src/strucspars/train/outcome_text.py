"""A finished run as text: sizes, accuracies at every stage, and where its files are."""

import statistics
from collections.abc import Mapping
from pathlib import Path

from strucspars.cost.layers import BeforeAfter
from strucspars.cost.text_table import Column, duration, percent, text_table
from strucspars.train.outcome import RunSummary, StageAccuracy
from strucspars.train.recipe import Recipe
from strucspars.train.run_folder import RunFolder

OPTIMISM = "The best epoch is chosen on the test images, so it is optimistic."


def outcome_text(summary: RunSummary, recipe: Recipe, folder: RunFolder) -> str:
    """What a finished run came to."""
    parts = [
        f"{summary.name}, seed {summary.seed}: {summary.model} on {summary.data}",
        _sizes(summary),
        f"{_accuracies(summary)}\n{OPTIMISM}",
        "\n".join(_facts(summary, recipe)),
        _places(summary, folder),
    ]
    return "\n\n".join(parts)


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
    counts: dict[str, BeforeAfter] = {"params": summary.params, "MACs": summary.macs}
    is_dense = summary.kind == "dense"
    return text_table(
        [
            Column("size", list(counts), is_text=True),
            Column("dense", [f"{count.before:,}" for count in counts.values()]),
            Column("compressed", ["" if is_dense else f"{count.after:,}" for count in counts.values()]),
            Column("removed", ["" if is_dense else percent(count.removed_fraction) for count in counts.values()]),
        ]
    )


# A title, top-1 and top-5.
_Row = tuple[str, float | None, float | None]


def _accuracies(summary: RunSummary) -> str:
    rows: list[_Row] = []
    sparsified, finetuned = summary.sparsified, summary.finetuned
    if sparsified is not None:
        rows.append(_best("first stage", sparsified))
    if summary.before_compression_top1 is not None:
        top5 = None if sparsified is None else sparsified.last_top5
        rows.append(("before compression", summary.before_compression_top1, top5))
        rows.append(("after compression", summary.compressed_top1, summary.compressed_top5))
    if summary.recalibrated_top1 is not None:
        rows.append(("the same, batch norm recalibrated", summary.recalibrated_top1, None))
    stage = "trained" if summary.kind == "dense" else "finetuned"
    rows.append((f"{stage}, last epoch", finetuned.last_top1, finetuned.last_top5))
    rows.append(_best(stage, finetuned))
    rows.append(("saved network", summary.converted_top1, summary.converted_top5))
    return text_table(
        [
            Column("accuracy", [title for title, _, _ in rows], is_text=True),
            Column("top-1", [percent(top1) for _, top1, _ in rows]),
            Column("top-5", [percent(top5) for _, _, top5 in rows]),
        ]
    )


def _best(stage: str, accuracy: StageAccuracy) -> _Row:
    return f"{stage}, best epoch ({accuracy.best_epoch})", accuracy.best_top1, accuracy.best_top5


def _facts(summary: RunSummary, recipe: Recipe) -> list[str]:
    facts = []
    if summary.target is not None:
        macs = summary.kind == "strucspars" and recipe.sparsify.budget == "macs"
        reached = summary.removed_mac_fraction if macs else summary.removed_param_fraction
        facts.append(
            f"target      remove {percent(summary.target)} of all {'MACs' if macs else 'parameters'}: "
            f"{percent(reached)} reached"
        )
    if summary.min_kept_norm is not None:
        facts.append(
            f"threshold   every grouped layer keeps at least {summary.min_kept_norm:.3f} of its norm (searched)"
        )
    if summary.removed_before_search is not None:
        facts.append(
            f"            with the {recipe.sparsify.min_kept_norm:g} of training, "
            f"{percent(summary.removed_before_search)} would be removed"
        )
    times = ", ".join(f"{stage} {duration(seconds)}" for stage, seconds in summary.seconds.items())
    facts.append(f"time        {times}")
    return facts


def _places(summary: RunSummary, folder: RunFolder) -> str:
    network = "the network" if summary.kind == "dense" else "the compressed network"
    places = [
        (folder.model_path, network),
        (folder.summary_text_path, "this text; summary.json for programs"),
        (folder.metrics_path, "every epoch"),
        (folder.tensorboard, "the same for TensorBoard"),
    ]
    if summary.kind == "strucspars":
        places.insert(1, (folder.plan_path, "groups and channel orders of every layer"))
    width = max(len(str(path)) for path, _ in places)
    return "\n".join(f"{path!s:<{width}}  {meaning}" for path, meaning in places)
