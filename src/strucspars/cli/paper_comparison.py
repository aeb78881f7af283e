"""Our runs of a table beside the paper's numbers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from strucspars.cli.noise import Noise, Spread, noise, spread
from strucspars.cli.row_measures import (
    ACCURACY,
    AFTER,
    BEFORE,
    BEST,
    FLOPS,
    MACS,
    PAPER_RUNS,
    PARAMS,
    THRESHOLD,
    TOP5,
    Measure,
)
from strucspars.cli.run_collection import Collection, FinishedRun
from strucspars.cli.table_rows import base_row
from strucspars.measure.text_table import Column, markdown_table, text_table
from strucspars.training.outcome_text import changes_of_paper, some_of
from strucspars.training.recipe import Recipe
from strucspars.training.recipe_identity import protocol

MEASURES: Mapping[str, tuple[Measure, ...]] = {
    "table1": (PARAMS, MACS, FLOPS, ACCURACY, BEST),
    "table2": (PARAMS, MACS, FLOPS, ACCURACY, BEST),
    "table3": (PARAMS, ACCURACY, BEST, TOP5),
    "table5": (BEFORE, AFTER, ACCURACY, BEST, THRESHOLD),
    "variants": (PARAMS, ACCURACY, BEST),
}
# Of these it is said whether they differ from the paper's.
JUDGED = (ACCURACY, BEST)
# Names of rows are worth more than a narrow table.
TERMINAL_WIDTH = 140

Rows = Mapping[str, Sequence[FinishedRun]]


class Comparison:
    """The rows of a table beside the paper.

    Args:
        measures: the columns.
        rows: by name, their finished runs.
        collection: all runs there are: how far runs scatter, and what a row is a variant of, is seen from them.
    """

    def __init__(self, measures: Sequence[Measure], rows: Rows, collection: Collection) -> None:
        self._measures = measures
        self._rows = {name: runs for name, runs in rows.items() if runs}
        self._collection = collection
        self._noise = {measure.key: _noise(measure, collection) for measure in JUDGED}

    def columns(self) -> list[Column]:
        """Row, number of runs, and for every measure ours and the paper's."""
        names = list(self._rows)
        columns = [
            Column("row", names, is_text=True),
            Column("n", [str(len(runs)) for runs in self._rows.values()]),
        ]
        for measure in self._measures:
            columns.append(Column(measure.title, [measure.text(self._ours(measure, name)) for name in names]))
            if measure is not BEST:  # the same as of the last epoch
                columns.append(Column("paper", [measure.text(measure.paper(name)) for name in names]))
            if measure in JUDGED:
                columns.append(Column("differ", [self._difference_text(measure, name) for name in names]))
            if measure is ACCURACY:
                columns.append(Column("over its base", [_gain_text(self._gain(name)) for name in names]))
        return columns

    def notes(self) -> list[str]:
        """What one must know to read the columns."""
        if not self._rows:
            return []
        said = []
        papers = [ACCURACY.paper(name) for name in self._rows]
        if BEST in self._measures:
            said.append("top-1 is of the last epoch, in percent; the best epoch is chosen on the test images.")
        if BEST in self._measures and any(papers):
            over = f", over {PAPER_RUNS} runs" if any(paper and paper.deviation for paper in papers) else ""
            said.append(f"The paper's is, by the authors' code, of the best epoch{over}.")
        if any(self._verdict(measure, name) for measure in self._measures for name in self._rows):
            said.append("noise: chance alone makes such a difference in more than one of twenty comparisons.")
        if any(self._gain(name) for name in self._rows):
            said.append("over its base: the mean over pairs of runs of the same seed, their number in brackets.")
        changes = {key: None for runs in self._rows.values() for run in runs for key in changes_of_paper(run.recipe)}
        if changes:
            said.append(f"Changed against the paper's protocol: {some_of(list(changes))}.")
        return said

    def document(self) -> list[dict[str, Any]]:
        """The same for a program."""
        return [self._row_document(name) for name in self._rows]

    def _ours(self, measure: Measure, name: str) -> Spread | None:
        numbers = [measure.ours(run.summary) for run in self._rows[name]]
        return spread([number for number in numbers if number is not None])

    def _difference(self, measure: Measure, name: str) -> float | None:
        ours, paper = self._ours(measure, name), measure.paper(name)
        return None if ours is None or paper is None else ours.mean - paper.mean

    def _verdict(self, measure: Measure, name: str) -> str | None:
        ours, paper, scatter = self._ours(measure, name), measure.paper(name), self._noise.get(measure.key)
        if ours is None or paper is None or scatter is None:
            return None
        return scatter.verdict(ours, paper)

    def _difference_text(self, measure: Measure, name: str) -> str:
        difference, verdict = self._difference(measure, name), self._verdict(measure, name)
        return "" if difference is None else f"{difference:+.2f} {verdict or ''}".rstrip()

    def _gain(self, name: str) -> Spread | None:
        """How much better a row is than the one it varies, seed by seed."""
        base = base_row(name)
        if base is None:
            return None
        accuracies = {run.recipe.seed: ACCURACY.ours(run.summary) for run in self._collection.comparable(base)}
        pairs = [(ACCURACY.ours(run.summary), accuracies.get(run.recipe.seed)) for run in self._rows[name]]
        return spread([mine - its for mine, its in pairs if mine is not None and its is not None])

    def _row_document(self, name: str) -> dict[str, Any]:
        document: dict[str, Any] = {"row": name, "runs": len(self._rows[name])}
        for measure in self._measures:
            ours, paper = self._ours(measure, name), measure.paper(name)
            document[measure.key] = {
                "mean": None if ours is None else ours.mean,
                "deviation": None if ours is None else ours.deviation,
                "paper": None if paper is None else paper.mean,
                "paper_deviation": None if paper is None else paper.deviation,
                "difference": self._difference(measure, name),
            }
            if measure in JUDGED:
                document[measure.key]["verdict"] = self._verdict(measure, name)
        gain = self._gain(name)
        if gain is not None:
            document["over_base"] = {"mean": gain.mean, "deviation": gain.deviation, "pairs": gain.runs}
        return document


def compared(
    table: str, rows: Rows, collection: Collection, *, failed: Mapping[Path, str], as_markdown: bool = False
) -> tuple[str, dict[str, Any]]:
    """The finished runs of a table beside the paper's numbers, as a text and as a document.

    Args:
        table: such as `table1`.
        rows: by name, their finished runs.
        collection: all runs there are.
        failed: run folders that should be among them and are not, and why.
        as_markdown: the text for a page instead of a terminal.
    """
    comparison = Comparison(MEASURES[table], rows, collection)
    columns = comparison.columns()
    parts = [markdown_table(columns) if as_markdown else _terminal_table(columns)] if any(rows.values()) else []
    if failed:
        parts.append("\n".join(f"not finished: {path} ({reason})" for path, reason in failed.items()))
    if notes := comparison.notes():
        parts.append("\n".join(notes))
    return "\n\n".join(parts), {
        "table": table,
        "rows": comparison.document(),
        "failed": [{"folder": str(path), "error": reason} for path, reason in failed.items()],
    }


def _terminal_table(columns: Sequence[Column]) -> str:
    """Without MACs, which say the same as FLOPs, so that names have their place."""
    return text_table([column for column in columns if column.title != MACS.title], max_width=TERMINAL_WIDTH)


def _gain_text(gain: Spread | None) -> str:
    if gain is None:
        return ""
    deviation = "" if gain.deviation is None else f" ± {gain.deviation:.2f}"
    return f"{gain.mean:+.2f}{deviation} ({gain.runs})"


def _noise(measure: Measure, collection: Collection) -> Noise | None:
    """Of single runs, from all rows; runs of one name and different protocols are different rows."""
    groups: dict[tuple[str, Recipe], list[float]] = {}
    for name, runs in collection.rows.items():
        for run in runs:
            number = measure.ours(run.summary)
            if number is not None:
                groups.setdefault((name, protocol(run.recipe)), []).append(number)
    return noise(list(groups.values()))
