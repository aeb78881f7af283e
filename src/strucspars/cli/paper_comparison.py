"""Our runs of a table beside the paper's numbers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from strucspars.cli.base_gain import gain_over_base
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
)
from strucspars.cli.run_collection import Collection, FinishedRun
from strucspars.measure.text_table import Column, markdown_table, text_table
from strucspars.report.experiments import NUM_TEST_IMAGES
from strucspars.report.measured import Sample, sample_of
from strucspars.report.noise import NOISE, is_within_noise
from strucspars.training.outcome_text import OPTIMISM, some_of
from strucspars.training.recipe_identity import changes_from_recipe

MEASURES: Mapping[str, tuple[Measure, ...]] = {
    "table1": (PARAMS, MACS, FLOPS, ACCURACY, BEST),
    "table2": (PARAMS, MACS, FLOPS, ACCURACY, BEST),
    "table3": (PARAMS, ACCURACY, BEST, TOP5),
    "table5": (BEFORE, AFTER, ACCURACY, BEST, THRESHOLD),
    "variants": (PARAMS, MACS, ACCURACY, BEST),
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
        collection: all runs there are, those among them that a row is a variant of.
    """

    def __init__(self, measures: Sequence[Measure], rows: Rows, collection: Collection) -> None:
        self._measures = measures
        self._rows = {name: runs for name, runs in rows.items() if runs}
        self._gains = {name: gain_over_base(name, runs, collection) for name, runs in self._rows.items()}

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
                columns.append(Column("over its base", [_gain_text(self._gains[name].points) for name in names]))
        return columns

    def notes(self) -> list[str]:
        """What one must know to read the columns."""
        if not self._rows:
            return []
        said = []
        if BEST in self._measures:
            said.append(f"top-1 is of the last epoch, in percent. {OPTIMISM}")
            if any(ACCURACY.paper(name) for name in self._rows):
                said.append("The paper's is, by the authors' code, of the best epoch.")
        if any(self._verdict(measure, name) for measure in JUDGED for name in self._rows):
            said.append(NOISE)
        if any(gain.points for gain in self._gains.values()):
            said.append("over its base: the mean over pairs of runs of the same seed, their number in brackets.")
        said += [gain.remark for gain in self._gains.values() if gain.remark]
        recipes = [runs[0].recipe for runs in self._rows.values()]
        changed = dict.fromkeys(change for recipe in recipes for change in changes_from_recipe(recipe))
        if changed:
            said.append(f"Not quite as in the recipes: {some_of(list(changed))}.")
        return said

    def document(self) -> list[dict[str, Any]]:
        """The same for a program."""
        return [self._row_document(name) for name in self._rows]

    def _ours(self, measure: Measure, name: str) -> Sample | None:
        numbers = [measure.ours(run.summary) for run in self._rows[name]]
        return sample_of([number for number in numbers if number is not None])

    def _difference(self, measure: Measure, name: str) -> float | None:
        ours, paper = self._ours(measure, name), measure.paper(name)
        return None if ours is None or paper is None else ours.mean - paper.mean

    def _verdict(self, measure: Measure, name: str) -> str | None:
        ours, paper = self._ours(measure, name), measure.paper(name)
        if ours is None or paper is None:
            return None
        test_images = NUM_TEST_IMAGES.get(self._rows[name][0].summary.data)
        if is_within_noise(_as_fraction(ours), _as_fraction(paper), test_images=test_images):
            return "noise"
        return "above" if ours.mean > paper.mean else "below"

    def _difference_text(self, measure: Measure, name: str) -> str:
        difference, verdict = self._difference(measure, name), self._verdict(measure, name)
        return "" if difference is None else f"{difference:+.2f} {verdict or ''}".rstrip()

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
        gain = self._gains[name].points
        if gain is not None:
            document["over_base"] = {"mean": gain.mean, "deviation": gain.deviation, "pairs": gain.count}
        return document


def compared(
    table: str,
    rows: Rows,
    collection: Collection,
    *,
    failed: Mapping[Path, str],
    not_counted: Mapping[Path, str] | None = None,
    as_markdown: bool = False,
) -> tuple[str, dict[str, Any]]:
    """The finished runs of a table beside the paper's numbers, as a text and as a document.

    Args:
        table: such as `table1`.
        rows: by name, their finished runs.
        collection: all runs there are.
        failed: run folders that should be among them and are not, and why.
        not_counted: finished runs that may be meant to be among them, and why they are not.
        as_markdown: the text for a page instead of a terminal.
    """
    comparison = Comparison(MEASURES[table], rows, collection)
    columns = comparison.columns()
    parts = [markdown_table(columns) if as_markdown else _terminal_table(columns)] if any(rows.values()) else []
    if failed:
        parts.append("\n".join(f"not finished: {path} ({reason})" for path, reason in failed.items()))
    if not_counted:
        parts.append("\n".join(f"not counted: {path} ({reason})" for path, reason in not_counted.items()))
    if notes := comparison.notes():
        parts.append("\n".join(notes))
    return "\n\n".join(parts), {
        "table": table,
        "rows": comparison.document(),
        "failed": [{"folder": str(path), "error": reason} for path, reason in failed.items()],
        "not_counted": [{"folder": str(path), "reason": reason} for path, reason in (not_counted or {}).items()],
    }


def _terminal_table(columns: Sequence[Column]) -> str:
    """Without MACs, which say the same as FLOPs, so that names have their place."""
    return text_table([column for column in columns if column.title != MACS.title], max_width=TERMINAL_WIDTH)


def _gain_text(gain: Sample | None) -> str:
    if gain is None:
        return ""
    deviation = "" if gain.deviation is None else f" ± {gain.deviation:.2f}"
    return f"{gain.mean:+.2f}{deviation} ({gain.count})"


def _as_fraction(percent: Sample) -> Sample:
    deviation = None if percent.deviation is None else percent.deviation / 100
    return Sample(mean=percent.mean / 100, deviation=deviation, count=percent.count)
