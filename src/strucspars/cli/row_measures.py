"""What a table has of every run: the number of ours, and where the paper has its own."""

from collections.abc import Callable
from dataclasses import dataclass

from strucspars.cli.table_rows import paper_row
from strucspars.measure.short_count import short_count
from strucspars.report.experiments import paper_accuracy
from strucspars.report.measured import Sample
from strucspars.training.outcome import RunSummary
from strucspars.training.paper_rows import PAPER_ROWS, PAPER_TIMELINES, PaperRow, PaperTimeline


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
