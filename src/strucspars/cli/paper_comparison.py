"""Our runs of a table beside the paper's numbers."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strucspars.cli.reproduction import PlannedRow
from strucspars.cli.run_state import run_state
from strucspars.cli.running import Outcomes, failed_runs, finished_runs
from strucspars.measure.text_table import Column, text_table
from strucspars.training.outcome import RunSummary
from strucspars.training.outcome_text import follows_paper
from strucspars.training.paper_rows import PAPER_ROWS, PAPER_TIMELINES, PaperRow, PaperTimeline


@dataclass(frozen=True)
class Spread:
    """A number over several runs, ours or the paper's.

    Attributes:
        mean: of them.
        deviation: of the sample; None where it is not known.
    """

    mean: float
    deviation: float | None = None


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A column of a table.

    Attributes:
        key: its name in the document.
        title: its name in the text.
        ours: its number of a run; None if the run has none.
        papers: its number of a row of Tables 1 to 3.
        timelines: its number of a column of Table 5.
        written: the number as text.
        shows_deviation: whether its deviation is worth a place.
    """

    key: str
    title: str
    ours: Callable[[RunSummary], float | None]
    papers: Callable[[PaperRow], Spread | None] = lambda row: None
    timelines: Callable[[PaperTimeline], Spread | None] = lambda timeline: None
    written: Callable[[float], str] = "{:.2f}".format
    shows_deviation: bool = True

    def paper(self, name: str) -> Spread | None:
        """What the paper has for a row."""
        row, timeline = PAPER_ROWS.get(name), PAPER_TIMELINES.get(name)
        found = None if row is None else self.papers(row)
        return self.timelines(timeline) if found is None and timeline is not None else found

    def text(self, spread: Spread | None) -> str:
        """A number and its deviation."""
        if spread is None:
            return ""
        if spread.deviation is None or not self.shows_deviation:
            return self.written(spread.mean)
        return f"{self.written(spread.mean)} ± {self.written(spread.deviation)}"


def scaled(count: float) -> str:
    """A count in three digits.

    >>> scaled(219_482), scaled(4.14e9)
    ('219K', '4.14G')
    """
    size, unit = next(
        pair for pair in ((1e9, "G"), (1e6, "M"), (1e3, "K"), (1, "")) if count >= pair[0] or pair[0] == 1
    )
    return f"{count / size:.3g}{unit}"


def spread(values: Sequence[float]) -> Spread | None:
    """Mean and deviation of some runs; None of none.

    >>> spread([93.0, 94.0, 95.0])
    Spread(mean=94.0, deviation=1.0)
    """
    if not values:
        return None
    return Spread(statistics.mean(values), statistics.stdev(values) if len(values) > 1 else None)


def _percentage(fraction: float | None) -> float | None:
    return None if fraction is None else 100 * fraction


def _known(number: float | None, deviation: float | None = None) -> Spread | None:
    return None if number is None else Spread(number, deviation)


PARAMS = Measure(
    key="params",
    title="params",
    ours=lambda run: run.params.after,
    papers=lambda row: Spread(row.params),
    written=scaled,
    shows_deviation=False,
)
FLOPS = Measure(
    key="paper_flops",
    title="FLOPs",
    ours=lambda run: run.paper_flops.after,
    papers=lambda row: Spread(row.flops),
    written=scaled,
    shows_deviation=False,
)
ACCURACY = Measure(
    key="top1",
    title="top-1",
    ours=lambda run: _percentage(run.finetuned.last_top1),
    papers=lambda row: _known(row.accuracy, row.accuracy_deviation),
    timelines=lambda timeline: Spread(timeline.finetuned),
)
TOP5 = Measure(
    key="top5",
    title="top-5",
    ours=lambda run: _percentage(run.finetuned.last_top5),
    papers=lambda row: _known(row.top5_accuracy),
)
BEST = Measure(key="best_top1", title="best epoch", ours=lambda run: _percentage(run.finetuned.best_top1))
BEFORE = Measure(
    key="before_compression",
    title="before",
    ours=lambda run: _percentage(run.before_compression_top1),
    timelines=lambda timeline: Spread(timeline.before_compression),
)
AFTER = Measure(
    key="after_compression",
    title="after",
    ours=lambda run: _percentage(run.compressed_top1),
    timelines=lambda timeline: Spread(timeline.after_compression),
)
THRESHOLD = Measure(
    key="min_kept_norm",
    title="kept norm",
    ours=lambda run: run.min_kept_norm,
    timelines=lambda timeline: Spread(timeline.min_kept_norm),
    written="{:.3f}".format,
)

MEASURES: Mapping[str, tuple[Measure, ...]] = {
    "table1": (PARAMS, FLOPS, ACCURACY, BEST),
    "table2": (PARAMS, FLOPS, ACCURACY, BEST),
    "table3": (PARAMS, ACCURACY, TOP5),
    "table5": (BEFORE, AFTER, ACCURACY, THRESHOLD),
}


def compared(table: str, planned: Sequence[PlannedRow], outcomes: Outcomes) -> tuple[str, dict[str, Any]]:
    """The finished runs of a table beside the paper's numbers, as a text and as a document.

    Args:
        table: such as `table1`.
        planned: its rows.
        outcomes: of their runs.
    """
    finished = finished_runs(outcomes)
    rows = {row.name: [finished[path] for path in row.recipes if path in finished] for row in planned}
    present = {name: runs for name, runs in rows.items() if runs}
    parts = [_table(MEASURES[table], present)] if present else []
    parts += _notes(table, planned, finished, failed_runs(outcomes))
    return "\n\n".join(parts), {
        "table": table,
        "rows": [_row_document(name, runs, MEASURES[table]) for name, runs in present.items()],
        "failed": [{"folder": str(path), "error": reason} for path, reason in failed_runs(outcomes).items()],
    }


def _of_runs(measure: Measure, runs: Sequence[RunSummary]) -> Spread | None:
    return spread([number for number in map(measure.ours, runs) if number is not None])


def _table(measures: Sequence[Measure], rows: Mapping[str, Sequence[RunSummary]]) -> str:
    columns = [Column("row", list(rows), is_text=True), Column("n", [str(len(runs)) for runs in rows.values()])]
    for measure in measures:
        ours = [_of_runs(measure, runs) for runs in rows.values()]
        papers = [measure.paper(name) for name in rows]
        columns.append(Column(measure.title, [measure.text(number) for number in ours]))
        columns.append(Column("paper", [measure.text(number) for number in papers]))
        if measure is ACCURACY:
            columns.append(Column("differ", [_difference(*pair) for pair in zip(ours, papers, strict=True)]))
    return text_table(columns)


def _difference(ours: Spread | None, paper: Spread | None) -> str:
    return "" if ours is None or paper is None else f"{ours.mean - paper.mean:+.2f}"


def _notes(
    table: str, planned: Sequence[PlannedRow], finished: Mapping[Path, RunSummary], failed: Mapping[Path, str]
) -> list[str]:
    notes = [f"not finished: {path} ({run_state(path).words})" for path in failed]
    recipes = [recipe for row in planned for path, recipe in row.recipes.items() if path in finished]
    if recipes and MEASURES[table][-1] is BEST:
        notes.append("top-1 is of the last epoch, in percent; n runs and their deviation, the paper's over ten.")
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
