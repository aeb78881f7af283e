"""Our runs of a table beside the paper's numbers."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strucspars.cli.run_collection import Collection, FinishedRun
from strucspars.cli.table_rows import base_row, paper_row
from strucspars.cost.text_table import Column, markdown_table, short_count, text_table
from strucspars.paper.measured import Sample, sample_of
from strucspars.paper.noise import NOISE, is_within_noise
from strucspars.report.experiments import NUM_TEST_IMAGES, paper_accuracy
from strucspars.train.outcome import RunSummary
from strucspars.train.outcome_text import OPTIMISM, some_of
from strucspars.train.paper_rows import PAPER_ROWS, PAPER_TIMELINES, PaperRow, PaperTimeline
from strucspars.train.recipe import Recipe
from strucspars.train.recipe_identity import changes, changes_from_recipe
from strucspars.train.recipe_reading import read_recipe


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
    papers: Callable[[PaperRow], Sample | None] = lambda row: None
    timelines: Callable[[PaperTimeline], Sample | None] = lambda timeline: None
    written: Callable[[float], str] = "{:.2f}".format
    shows_deviation: bool = True

    def paper(self, name: str) -> Sample | None:
        """What the paper has for a row."""
        name = paper_row(name)
        row, timeline = PAPER_ROWS.get(name), PAPER_TIMELINES.get(name)
        found = None if row is None else self.papers(row)
        return self.timelines(timeline) if found is None and timeline is not None else found

    def text(self, sample: Sample | None) -> str:
        """A number and its deviation."""
        if sample is None:
            return ""
        if sample.deviation is None or not self.shows_deviation:
            return self.written(sample.mean)
        return f"{self.written(sample.mean)} ± {self.written(sample.deviation)}"


def _percentage(fraction: float | None) -> float | None:
    return None if fraction is None else 100 * fraction


def _single(number: float | None) -> Sample | None:
    return None if number is None else Sample(mean=number, deviation=None, count=1)


def _in_percent(fraction: Sample | None) -> Sample | None:
    """The same in percent."""
    if fraction is None:
        return None
    deviation = None if fraction.deviation is None else 100 * fraction.deviation
    return Sample(mean=100 * fraction.mean, deviation=deviation, count=fraction.count)


PARAMS = Measure(
    key="params",
    title="params",
    ours=lambda run: run.params.after,
    papers=lambda row: _single(row.params),
    written=short_count,
    shows_deviation=False,
)
MACS = Measure(key="macs", title="MACs", ours=lambda run: run.macs.after, written=short_count, shows_deviation=False)
FLOPS = Measure(
    key="paper_flops",
    title="FLOPs",
    ours=lambda run: run.paper_flops.after,
    papers=lambda row: _single(row.flops),
    written=short_count,
    shows_deviation=False,
)
ACCURACY = Measure(
    key="top1",
    title="top-1",
    ours=lambda run: _percentage(run.finetuned.last_top1),
    papers=lambda row: _in_percent(paper_accuracy(row)),
    timelines=lambda timeline: _single(timeline.finetuned),
)
TOP5 = Measure(
    key="top5",
    title="top-5",
    ours=lambda run: _percentage(run.finetuned.last_top5),
    papers=lambda row: _single(row.top5_accuracy),
)
# The authors' code reports the best epoch, so the paper's accuracies are to be held against both.
BEST = Measure(
    key="best_top1",
    title="best epoch",
    ours=lambda run: _percentage(run.finetuned.best_top1),
    papers=ACCURACY.papers,
    timelines=ACCURACY.timelines,
)
BEFORE = Measure(
    key="before_compression",
    title="before",
    ours=lambda run: _percentage(run.before_compression_top1),
    timelines=lambda timeline: _single(timeline.before_compression),
)
AFTER = Measure(
    key="after_compression",
    title="after",
    ours=lambda run: _percentage(run.compressed_top1),
    timelines=lambda timeline: _single(timeline.after_compression),
)
THRESHOLD = Measure(
    key="min_kept_norm",
    title="kept norm",
    ours=lambda run: run.min_kept_norm,
    timelines=lambda timeline: _single(timeline.min_kept_norm),
    written="{:.3f}".format,
)


@dataclass(frozen=True, kw_only=True)
class BaseGain:
    """A row over its base.

    Attributes:
        points: of accuracy, seed by seed; None where there is nothing to compare.
        remark: why there is not, where runs of the base are there all the same.
    """

    points: Sample | None = None
    remark: str | None = None


def gain_over_base(name: str, runs: Sequence[FinishedRun], collection: Collection) -> BaseGain:
    """Compare the runs of a row with those of its base, pairs of the same seed.

    Args:
        name: of the row.
        runs: of the row, all of one protocol.
        collection: holds those of the base.
    """
    base = base_row(name)
    if base is None or not runs:
        return BaseGain()
    try:
        base_runs = collection.comparable(base)
    except ValueError as error:
        return BaseGain(remark=f"{name} is not compared with {base}: {error}.")
    if base_runs and (other := _differing_changes(runs[0].recipe, base_runs[0].recipe)):
        return BaseGain(remark=f"{name} is not compared with {base}, which was run with other {some_of(other)}.")
    accuracies = {run.recipe.seed: ACCURACY.ours(run.summary) for run in base_runs}
    pairs = [(ACCURACY.ours(run.summary), accuracies.get(run.recipe.seed)) for run in runs]
    return BaseGain(points=sample_of([mine - its for mine, its in pairs if mine is not None and its is not None]))


def _differing_changes(variant: Recipe, base: Recipe) -> list[str]:
    """Keys that one of two runs has otherwise than the recipe of its name, and the other has not likewise."""
    mine, its = _asked(variant), _asked(base)
    differing = [setting for setting in (*mine, *its) if (setting in mine) != (setting in its)]
    return list(dict.fromkeys(setting.partition("=")[0] for setting in differing))


def _asked(recipe: Recipe) -> list[str]:
    """What was asked to be otherwise than in the recipe of that name; warm-ups follow from epochs."""
    followed = {
        "stage1.epochs": recipe.stage1.epochs,
        "stage2.epochs": recipe.stage2.epochs,
        "model.weights": recipe.model.weights,  # without which there may be no epoch of the first stage
    }
    overrides = [f"{key}={json.dumps(value)}" for key, value in followed.items()]
    asked = [setting for setting in changes_from_recipe(recipe) if setting.partition("=")[0] in followed]
    return [*changes(recipe, read_recipe(recipe.name, overrides)), *asked]


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
