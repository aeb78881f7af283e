"""Our runs of a table beside the paper's numbers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from strucspars.cli.reproduction import PlannedRow, base_row
from strucspars.cli.row_measures import (
    ACCURACY,
    AFTER,
    BEFORE,
    BEST,
    FLOPS,
    MACS,
    PARAMS,
    THRESHOLD,
    TOP5,
    Measure,
    Spread,
    pooled_deviation,
    spread,
    verdict,
)
from strucspars.cli.run_state import run_state
from strucspars.cli.running import Outcomes, failed_runs, finished_runs
from strucspars.measure.text_table import Column, markdown_table, text_table
from strucspars.training.outcome import RunSummary
from strucspars.training.outcome_text import follows_paper
from strucspars.training.paper_rows import PAPER_ROWS

MEASURES: Mapping[str, tuple[Measure, ...]] = {
    "table1": (PARAMS, MACS, FLOPS, ACCURACY, BEST),
    "table2": (PARAMS, MACS, FLOPS, ACCURACY, BEST),
    "table3": (PARAMS, ACCURACY, TOP5),
    "table5": (BEFORE, AFTER, ACCURACY, THRESHOLD),
    "variants": (PARAMS, ACCURACY, BEST),
}

# Names of rows are worth more than a narrow table.
TERMINAL_WIDTH = 130

Runs = Mapping[str, Sequence[RunSummary]]


def compared(
    table: str, planned: Sequence[PlannedRow], outcomes: Outcomes, *, as_markdown: bool = False
) -> tuple[str, dict[str, Any]]:
    """The finished runs of a table beside the paper's numbers, as a text and as a document.

    Args:
        table: such as `table1`.
        planned: its rows.
        outcomes: of their runs.
        as_markdown: the text for a page instead of a terminal.
    """
    finished = finished_runs(outcomes)
    rows = {row.name: [finished[path] for path in row.recipes if path in finished] for row in planned}
    present = {name: runs for name, runs in rows.items() if runs}
    columns = comparison_columns(table, present)
    lay_out = markdown_table if as_markdown else _terminal_table
    parts = [lay_out(columns)] if present else []
    parts += _notes(table, planned, finished, failed_runs(outcomes))
    return "\n\n".join(parts), {
        "table": table,
        "rows": [_row_document(name, runs, MEASURES[table]) for name, runs in present.items()],
        "failed": [{"folder": str(path), "error": reason} for path, reason in failed_runs(outcomes).items()],
    }


def comparison_columns(table: str, rows: Runs, *, deviation: float | None = None) -> list[Column]:
    """Of a table: row, number of runs, and for every measure ours and the paper's.

    Args:
        table: such as `table1`.
        rows: by name, their finished runs.
        deviation: of the accuracy of single runs, to tell noise by; None: that of these rows.
    """
    deviation = row_deviation(rows) if deviation is None else deviation
    columns = [Column("row", list(rows), is_text=True), Column("n", [str(len(runs)) for runs in rows.values()])]
    for measure in MEASURES[table]:
        ours = [_of_runs(measure, runs) for runs in rows.values()]
        papers = [measure.paper(name) for name in rows]
        columns.append(Column(measure.title, [measure.text(number) for number in ours]))
        columns.append(Column("paper", [measure.text(number) for number in papers]))
        if measure in (ACCURACY, BEST):
            # The authors' code reports the best epoch.
            columns.append(_difference_column(ours, [ACCURACY.paper(name) for name in rows], deviation))
        if measure is ACCURACY:
            columns.append(Column("over its base", [_gain_text(_gain(name, rows)) for name in rows]))
    return columns


def _terminal_table(columns: Sequence[Column]) -> str:
    """Without MACs, which say the same as FLOPs, so that names have their place."""
    return text_table([column for column in columns if column.title != MACS.title], max_width=TERMINAL_WIDTH)


def row_deviation(rows: Runs) -> float | None:
    """How far the accuracies of single runs scatter, in points; None if no row has several runs."""
    accuracies = [_of_runs(ACCURACY, runs) for runs in rows.values()]
    return pooled_deviation([number for number in accuracies if number is not None])


def _difference_column(
    ours: Sequence[Spread | None], papers: Sequence[Spread | None], deviation: float | None
) -> Column:
    """How far we are from the paper, and whether that is more than chance."""
    cells = []
    for mine, paper in zip(ours, papers, strict=True):
        if mine is None or paper is None:
            cells.append("")
            continue
        word = "" if deviation is None else f" {verdict(mine, paper, deviation)}"
        cells.append(f"{mine.mean - paper.mean:+.2f}{word}")
    return Column("differ", cells)


def _gain(name: str, rows: Runs) -> Spread | None:
    """How much better a row is than the one it varies, seed by seed."""
    base = {run.seed: run for run in rows.get(base_row(name) or "", ())}
    pairs = [(ACCURACY.ours(run), ACCURACY.ours(base[run.seed])) for run in rows[name] if run.seed in base]
    return spread([mine - its for mine, its in pairs if mine is not None and its is not None])


def _gain_text(gain: Spread | None) -> str:
    if gain is None:
        return ""
    return f"{gain.mean:+.2f}" if gain.deviation is None else f"{gain.mean:+.2f} ± {gain.deviation:.2f}"


def _of_runs(measure: Measure, runs: Sequence[RunSummary]) -> Spread | None:
    return spread([number for number in map(measure.ours, runs) if number is not None])


def _notes(
    table: str, planned: Sequence[PlannedRow], finished: Mapping[Path, RunSummary], failed: Mapping[Path, str]
) -> list[str]:
    notes = [f"not finished: {path} ({run_state(path).words})" for path in failed]
    recipes = [recipe for row in planned for path, recipe in row.recipes.items() if path in finished]
    if recipes and MEASURES[table][-1] is BEST:
        notes.append("top-1 is of the last epoch, in percent, over n runs; the paper's is of the best epoch, over ten.")
        notes.append("noise: no more than twice the error of the difference.")
    if any(recipe.name in PAPER_ROWS and not follows_paper(recipe) for recipe in recipes):
        notes.append("The recipes were changed, so the paper's numbers are of another protocol.")
    return ["\n".join(notes)] if notes else []


def _row_document(name: str, runs: Sequence[RunSummary], measures: Sequence[Measure]) -> dict[str, Any]:
    document: dict[str, Any] = {"row": name, "runs": len(runs)}
    for measure in measures:
        ours, paper = _of_runs(measure, runs), measure.paper(name)
        document[measure.key] = {
            "mean": None if ours is None else ours.mean,
            "deviation": None if ours is None else ours.deviation,
            "paper": None if paper is None else paper.mean,
            "paper_deviation": None if paper is None else paper.deviation,
            "difference": None if ours is None or paper is None else ours.mean - paper.mean,
        }
    return document
