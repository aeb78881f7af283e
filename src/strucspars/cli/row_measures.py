"""What a table has of every run: the number of ours, and where the paper has its own."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from strucspars.training.outcome import RunSummary
from strucspars.training.paper_rows import PAPER_ROWS, PAPER_TIMELINES, PaperRow, PaperTimeline

# Where the paper has a deviation, it is over so many runs.
PAPER_RUNS = 10
ERRORS_OF_NOISE = 2


@dataclass(frozen=True)
class Spread:
    """A number over several runs, ours or the paper's.

    Attributes:
        mean: of them.
        deviation: of the sample; None where it is not known.
        runs: how many.
    """

    mean: float
    deviation: float | None = None
    runs: int = 1


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
    Spread(mean=94.0, deviation=1.0, runs=3)
    """
    if not values:
        return None
    return Spread(statistics.mean(values), statistics.stdev(values) if len(values) > 1 else None, len(values))


def pooled_deviation(spreads: Sequence[Spread]) -> float | None:
    """How far single runs of one row scatter, from all rows that have several; None if none has.

    >>> pooled_deviation([Spread(91.0, 0.25, runs=2), Spread(93.0, 0.25, runs=3), Spread(94.0)])
    0.25
    """
    several = [(each.runs - 1, each.deviation) for each in spreads if each.deviation is not None and each.runs > 1]
    if not several:
        return None
    return math.sqrt(sum(more * deviation**2 for more, deviation in several) / sum(more for more, _ in several))


def verdict(ours: Spread, paper: Spread, deviation: float) -> str:
    """Whether a mean is above or below another, or no more than twice the error of their difference away: noise.

    Args:
        ours: of some runs.
        paper: of ten runs with their deviation; without one, of a single run as uncertain as ours.
        deviation: of single runs of ours. Two or three runs know their own deviation badly, so it is that of all rows.

    >>> verdict(Spread(91.2, runs=3), Spread(91.4, 0.04, runs=10), deviation=0.2)
    'noise'
    >>> verdict(Spread(91.1, runs=3), Spread(91.4, 0.04, runs=10), deviation=0.2)
    'below'
    """
    papers = deviation if paper.deviation is None else paper.deviation
    error = math.sqrt(deviation**2 / ours.runs + papers**2 / paper.runs)
    difference = ours.mean - paper.mean
    if abs(difference) <= ERRORS_OF_NOISE * error:
        return "noise"
    return "above" if difference > 0 else "below"


def _percentage(fraction: float | None) -> float | None:
    return None if fraction is None else 100 * fraction


def _known(number: float | None, deviation: float | None = None) -> Spread | None:
    if number is None:
        return None
    return Spread(number) if deviation is None else Spread(number, deviation, PAPER_RUNS)


PARAMS = Measure(
    key="params",
    title="params",
    ours=lambda run: run.params.after,
    papers=lambda row: Spread(row.params),
    written=scaled,
    shows_deviation=False,
)
MACS = Measure(key="macs", title="MACs", ours=lambda run: run.macs.after, written=scaled, shows_deviation=False)
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
