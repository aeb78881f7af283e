"""The tables of one run, and those of experiments beside the paper's numbers, for pages, terminals and files."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import replace
from typing import TYPE_CHECKING

from strucspars.core.hierarchy import num_groups
from strucspars.cost.counting import BeforeAfter
from strucspars.paper.experiments import (
    ACCURACY,
    BEST,
    FLOPS,
    MACS,
    MEASURES,
    Experiment,
    FinishedRun,
    Measure,
    base_experiment,
    changes_from_package,
    difference_to_dense,
    experiments_of,
    gain_over_base,
)
from strucspars.paper.noise import NOISE
from strucspars.paper.published import published_row
from strucspars.report.named_table import Cell, NamedTable, Unit
from strucspars.train.outcome import OPTIMISM, StageAccuracy, stage_accuracy

# Not imported when the command line only prints tables: the figures of the layers need matplotlib.
if TYPE_CHECKING:
    from strucspars.report.layers import Layer
    from strucspars.report.reading import RunData

# Wider than other tables: shortened names of experiments would be of no use.
TERMINAL_WIDTH = 150
# More names in a note are only counted.
MOST_NAMES = 4
TITLES = {
    "table1": ("accuracy", "Size and accuracy"),
    "table2": ("accuracy", "Size and accuracy"),
    "table3": ("ablation", "Variants against their base"),
    "table5": ("timeline", "Accuracy along the stages"),
}


def run_tables(run: RunData, layers: Sequence[Layer]) -> tuple[NamedTable, ...]:
    """All tables of a run that have rows, without empty columns."""
    tables = (size_table(run), stage_table(run), layer_table(run, layers))
    return tuple(table.without_empty_columns() for table in tables if table.rows)


def size_table(run: RunData) -> NamedTable:
    """Parameters, MACs and the paper's FLOPs, dense and compressed; without rows before the run is finished."""
    summary, paper, is_dense = run.summary, published_row(run.recipe.name), run.recipe.kind == "dense"
    counts: list[tuple[str, BeforeAfter, float | None]] = []
    if summary is not None:
        counts.append(("parameters", summary.params, None if paper is None else paper.params))
        counts.append(("MACs", summary.macs, None))
    if summary is not None and paper is not None:
        counts.append(("paper FLOPs (MACs + 4 per batch-norm element)", summary.paper_flops, paper.flops))
    rows = [
        (title, count.before, *((None, None) if is_dense else (count.after, count.removed_fraction)), published)
        for title, count, published in counts
    ]
    return NamedTable(
        name="sizes",
        title="Size",
        columns={"size": "text", "dense": "count", "compressed": "count", "removed": "percent", "paper": "count"},
        rows=tuple(rows),
        notes=_recipe_notes(run),
    )


def stage_table(run: RunData) -> NamedTable:
    """Accuracy at every stage that the run has come to, with the paper's (Table 5)."""
    return NamedTable(
        name="stages",
        title="Accuracy at every stage",
        columns={"moment": "text", "top-1": "percent", "top-5": "percent", "paper top-1": "percent"},
        rows=tuple(_stage_rows(run)),
        notes=(OPTIMISM, *_recipe_notes(run)),
    )


def _stage_rows(run: RunData) -> Iterator[tuple[Cell, ...]]:
    paper = published_row(run.recipe.name)
    first = stage_accuracy(run.rows, "sparsify") or stage_accuracy(run.rows, "slim")
    if first is not None:
        yield _best("first stage", first)
    for row in run.rows:
        if row["stage"] == "compress":
            before, after = (None, None) if paper is None else (paper.before_compression, paper.after_compression)
            yield "before compression", row.get("before_top1"), row.get("before_top5"), before
            yield "right after compression", row["test_top1"], row["test_top5"], after
            if "recalibrated_top1" in row:
                yield "the same, batch norm recalibrated", row["recalibrated_top1"], None, None
    for stage, words in (("finetune", "finetuned"), ("train", "trained")):
        second = stage_accuracy(run.rows, stage)
        if second is not None:
            moment = "last epoch" if run.is_finished else "last epoch so far"
            accuracy = None if paper is None else paper.top1.mean
            yield f"{words}, {moment}", second.last_top1, second.last_top5, accuracy
            yield _best(words, second)
    if run.summary is not None:
        yield "saved network", run.summary.converted_top1, run.summary.converted_top5, None


def _best(words: str, accuracy: StageAccuracy) -> tuple[Cell, ...]:
    return f"{words}, best epoch ({accuracy.best_epoch})", accuracy.best_top1, accuracy.best_top5, None


def _recipe_notes(run: RunData) -> tuple[str, ...]:
    """The differences from the paper's protocol, for tables with the paper's numbers."""
    changed = changes_from_package(run.recipe) if published_row(run.recipe.name) else ()
    return (f"Not quite the paper's protocol: {', '.join(changed)}.",) if changed else ()


def layer_table(run: RunData, layers: Sequence[Layer]) -> NamedTable:
    """Every layer that may be grouped: its weight, groups, parameters and kept norm."""
    rows: list[tuple[Cell, ...]] = []
    for layer in layers:
        shape, dense = "x".join(map(str, layer.weight_shape)), math.prod(layer.weight_shape)
        compressed = dense // layer.num_groups
        churn = float(run.dynamics[-1].churn[layer.place]) if run.dynamics else math.nan
        groups = layer.group_level, layer.num_groups, num_groups(layer.largest_level)
        sizes = dense, compressed, 1 - compressed / dense
        rows.append((layer.name, shape, *groups, *sizes, layer.kept_at_level, churn if math.isfinite(churn) else None))
    return NamedTable(
        name="layers",
        title="Layers",
        columns={
            **dict.fromkeys(("layer", "weight"), "text"),
            **dict.fromkeys(("group level", "groups", "largest", "params dense", "params compressed"), "count"),
            **dict.fromkeys(("removed", "kept norm", "churn, last epoch"), "percent"),
        },
        rows=tuple(rows),
        notes=(
            "Parameters of the weights. Largest: the number of groups that the widths allow. Kept norm: the share of "
            "the layer's norm inside its groups, before finetuning.",
        ),
    )


def comparison_tables(experiments: Sequence[Experiment]) -> tuple[NamedTable, ...]:
    """All tables that have rows for these experiments."""
    bases = {each.label: base_experiment(each, experiments) for each in experiments}
    based = {base.label for base in bases.values() if base is not None}
    rows = {
        "table1": list(experiments),
        "table5": [each for each in experiments if each.first.before_compression_top1 is not None],
        "table3": [each for each in experiments if bases[each.label] is not None or each.label in based],
    }
    return tuple(comparison_table(table, chosen, experiments) for table, chosen in rows.items() if chosen)


def beside_the_paper(runs: Iterable[FinishedRun]) -> list[str]:
    """Runs of the paper's recipes beside its numbers, as texts for a terminal; none for other recipes."""
    experiments = [each for each in experiments_of(runs) if each.paper is not None]
    return [table.text(TERMINAL_WIDTH) for table in comparison_tables(experiments)]


def comparison_table(
    table: str,
    experiments: Sequence[Experiment],
    others: Sequence[Experiment],
    *,
    measures: Sequence[Measure] | None = None,
) -> NamedTable:
    """Experiments in the columns of a table of the paper, beside its numbers, the dense network and their base."""
    measures = MEASURES[table] if measures is None else measures
    has_paper = any(each.paper for each in experiments)
    columns: dict[str, Unit] = {"experiment": "text", "runs": "count"}
    rows: list[list[Cell]] = [[each.label, len(each.runs)] for each in experiments]

    def add(title: str, unit: Unit, cells: Sequence[Cell]) -> None:
        columns[title] = unit
        for row, cell in zip(rows, cells, strict=True):
            row.append(cell)

    for measure in measures:
        if measure is (MACS if has_paper else FLOPS):
            continue  # operations as the paper counts them beside its numbers, else as usual
        add(measure.title, measure.unit, [each.sample(measure.ours) for each in experiments])
        if measure is not BEST:  # has the same number of the paper as the last epoch
            add(f"paper {measure.title}", measure.unit, [measure.paper(each) for each in experiments])
        if measure.is_judged:
            title = "to paper" if measure is ACCURACY else f"{measure.title} to paper"
            add(title, "points", [measure.difference(each) for each in experiments])
        if measure is ACCURACY and table in ("table1", "table2"):
            add("to dense", "points", [difference_to_dense(each, others) for each in experiments])
        if measure is ACCURACY and table == "table3":
            add("to base", "points", [gain_over_base(each, others) for each in experiments])
    name, title = TITLES[table]
    whole = NamedTable(name=name, title=title, columns=columns, rows=tuple(map(tuple, rows)))
    shown = whole.without_empty_columns()
    return replace(shown, notes=_notes(experiments, shown.columns.keys()))


def _notes(experiments: Sequence[Experiment], titles: Set[str]) -> tuple[str, ...]:
    """What a reader must know about the columns that are there."""
    known = {
        "best epoch": f"Mean ± deviation over the runs. top-1: of the last epoch. {OPTIMISM}",
        "paper top-1": "By the authors' code, the paper's accuracies are of the best epoch.",
        "paper FLOPs": "FLOPs: as the paper counts them, MACs and 4 for every element of a batch norm.",
        "paper min_kept_norm": "The paper's threshold is given as the kept share of the norm.",
        "before": "before, after: right before and right after compression.",
    }
    notes = [note for title, note in known.items() if title in titles]
    if titles & {"to paper", "to dense"}:
        notes.append(NOISE)
    if "to base" in titles:
        notes.append("to base: the mean over pairs of runs of the same seed, in percent points.")
    labels: dict[tuple[str, ...], list[str]] = {}
    for each in experiments:
        labels.setdefault(each.changes, []).append(each.label)
    if any(labels):
        changed = []
        for changes, names in labels.items():
            if changes:
                more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
                changed.append(f"{', '.join(changes)} in {', '.join(names[:MOST_NAMES])}{more}")
        differences = ", ".join(next(iter(labels))) if len(labels) == 1 else "; ".join(changed)
        notes.append(f"Not quite as in the recipes: {differences}.")
    return tuple(notes)
