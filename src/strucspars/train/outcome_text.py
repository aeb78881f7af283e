"""A finished run as text: what it came to, what the paper has for it, and where everything lies."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from strucspars.cost.layers import BeforeAfter
from strucspars.cost.text_table import Column, text_table
from strucspars.train.outcome import RunSummary, StageAccuracy
from strucspars.train.paper_rows import PAPER_ROWS, PAPER_TIMELINES, PaperRow
from strucspars.train.recipe import Recipe
from strucspars.train.recipe_identity import changes_from_recipe
from strucspars.train.run_folder import RunFolder

MOST_NAMES = 4
OPTIMISM = "The best epoch is chosen on the test images: an optimist's number."


def percent(fraction: float | None) -> str:
    """A fraction as people read it; nothing for None.

    >>> percent(0.97333)
    '97.33%'
    """
    return "" if fraction is None else f"{fraction:.2%}"


def duration(seconds: float) -> str:
    """A time in the units that matter.

    >>> duration(0.42), duration(75), duration(3 * 3600 + 120)
    ('0.4 s', '1 min 15 s', '3 h 2 min')
    """
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def outcome_text(summary: RunSummary, recipe: Recipe, folder: RunFolder) -> str:
    """All that a finished run came to, and the paper's numbers beside where it is a row of the paper.

    Args:
        summary: of the run.
        recipe: that it followed.
        folder: where it lies.
    """
    parts = [
        f"{summary.name}, seed {summary.seed}: {summary.model} on {summary.data}",
        _sizes(summary, PAPER_ROWS.get(summary.name)),
        f"{_accuracies(summary)}\n{OPTIMISM}",
        "\n".join(_facts(summary, recipe)),
        _places(summary, folder),
    ]
    return "\n\n".join(parts)


def follows_paper(recipe: Recipe) -> bool:
    """Whether a recipe is that of a row of the paper, seed, places and devices aside.

    >>> from strucspars.train.recipe_reading import read_recipe
    >>> follows_paper(read_recipe("cifar10-resnet20-40", ["seed=3", "data.root=there"]))
    True
    >>> follows_paper(read_recipe("cifar10-resnet20-40", ["stage1.epochs=1"]))
    False
    """
    return recipe.name in PAPER_ROWS and not changes_from_paper(recipe)


def changes_from_paper(recipe: Recipe | None) -> tuple[str, ...]:
    """Where a recipe differs from that of the paper's row of its name, seed, places and devices aside; else empty.

    >>> from strucspars.train.recipe_reading import read_recipe
    >>> changes_from_paper(read_recipe("cifar10-resnet20-40", ["seed=3", "stage2.epochs=40"]))
    ('stage2.epochs=40',)
    """
    if recipe is None or recipe.name not in PAPER_ROWS:
        return ()
    return changes_from_recipe(recipe)


def outcomes_text(summaries: Mapping[Path, RunSummary]) -> str:
    """Several finished runs of one recipe in a table, by folder; below them, their mean and deviation."""
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


def _sizes(summary: RunSummary, paper: PaperRow | None) -> str:
    counts: list[tuple[str, BeforeAfter, float | None]] = [
        ("params", summary.params, None if paper is None else paper.params),
        ("MACs", summary.macs, None),
    ]
    if paper is not None:
        counts.append(("paper FLOPs", summary.paper_flops, paper.flops))
    dense = summary.kind == "dense"
    return text_table(
        [
            Column("size", [title for title, _, _ in counts], is_text=True),
            Column("dense", [f"{count.before:,}" for _, count, _ in counts]),
            Column("compressed", ["" if dense else f"{count.after:,}" for _, count, _ in counts]),
            Column("removed", ["" if dense else percent(count.removed_fraction) for _, count, _ in counts]),
            Column("paper", ["" if number is None else f"{number:,.0f}" for _, _, number in counts]),
        ]
    )


def _accuracies(summary: RunSummary) -> str:
    rows = [*_accuracies_before(summary), *_accuracies_after(summary)]
    return text_table(
        [
            Column("accuracy", [title for title, _, _, _ in rows], is_text=True),
            Column("top-1", [percent(top1) for _, top1, _, _ in rows]),
            Column("top-5", [percent(top5) for _, _, top5, _ in rows]),
            Column("paper", [paper for _, _, _, paper in rows]),
        ]
    )


# A title, top-1, top-5, and the paper's top-1.
_Row = tuple[str, float | None, float | None, str]


def _accuracies_before(summary: RunSummary) -> list[_Row]:
    """Of the first stage and right after it; none for a dense network."""
    timeline = PAPER_TIMELINES.get(summary.name)
    rows: list[_Row] = []
    top5 = None
    if summary.sparsified is not None:
        top5 = summary.sparsified.last_top5
    if summary.before_compression_top1 is not None:
        before, after = (
            ("", "")
            if timeline is None
            else (
                f"{timeline.before_compression:.2f}%",
                f"{timeline.after_compression:.2f}%",
            )
        )
        rows.append(("before compression", summary.before_compression_top1, top5, before))
        rows.append(("after compression", summary.compressed_top1, summary.compressed_top5, after))
    if summary.sparsified is not None:
        rows.insert(0, _best("first stage", summary.sparsified))
    if summary.recalibrated_top1 is not None:
        rows.append(("the same, batch norm recalibrated", summary.recalibrated_top1, None, ""))
    return rows


def _accuracies_after(summary: RunSummary) -> list[_Row]:
    """Of the second stage, and of what was saved."""
    stage = "trained" if summary.kind == "dense" else "finetuned"
    finetuned = summary.finetuned
    return [
        (f"{stage}, last epoch", finetuned.last_top1, finetuned.last_top5, _paper_accuracy(summary.name)),
        _best(stage, finetuned),
        ("saved network", summary.converted_top1, summary.converted_top5, ""),
    ]


def _best(stage: str, accuracy: StageAccuracy) -> _Row:
    return (f"{stage}, best epoch ({accuracy.best_epoch})", accuracy.best_top1, accuracy.best_top5, "")


def _paper_accuracy(name: str) -> str:
    row = PAPER_ROWS.get(name)
    if row is None or row.accuracy is None:
        return ""
    return f"{row.accuracy:.2f}%" + ("" if row.accuracy_deviation is None else f" ± {row.accuracy_deviation:.2f}")


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
            f"            at the {recipe.sparsify.min_kept_norm:g} of the training, "
            f"{percent(summary.removed_before_search)} would be removed"
        )
    times = ", ".join(f"{stage} {duration(seconds)}" for stage, seconds in summary.seconds.items())
    facts.append(f"time        {times}")
    if changed := changes_from_paper(recipe):
        facts.append(f"paper       its numbers are of another protocol, here with {some_of(changed)}")
    return facts


def some_of(names: Sequence[str]) -> str:
    """A list that fits a line."""
    return ", ".join(names[:MOST_NAMES]) + (f" and {len(names) - MOST_NAMES} more" if names[MOST_NAMES:] else "")


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
