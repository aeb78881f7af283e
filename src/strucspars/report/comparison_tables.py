"""Tables of experiments beside the paper's numbers, for pages, terminals and files."""

from collections.abc import Iterable, Sequence, Set
from dataclasses import replace

from strucspars.paper.comparison import ACCURACY, BEST, FLOPS, MACS, MEASURES, Measure
from strucspars.paper.experiments import (
    Experiment,
    FinishedRun,
    base_experiment,
    difference_to_dense,
    experiments_of,
    gain_over_base,
)
from strucspars.paper.noise import NOISE
from strucspars.report.named_table import Cell, NamedTable, Unit
from strucspars.train.outcome import OPTIMISM

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
    """Experiments in the columns of a table of the paper, with the paper's numbers and the differences from them.

    Args:
        table: such as `table1`.
        experiments: its rows.
        others: experiments that may be the dense network or the base of a row.
        measures: its columns; None for those of the table.
    """
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
        changed = [f"{', '.join(changes)} in {_some(names)}" for changes, names in labels.items() if changes]
        said = ", ".join(next(iter(labels))) if len(labels) == 1 else "; ".join(changed)
        notes.append(f"Not quite as in the recipes: {said}.")
    return tuple(notes)


def _some(names: Sequence[str]) -> str:
    more = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
