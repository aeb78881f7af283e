"""A bench as tables to read."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from strucspars.bench.results import BenchReport, BenchRow, Ratio, sitting_words
from strucspars.bench.runtimes import known_runtime
from strucspars.cost.text_table import Column, text_table

TEXT_WIDTH = 120
# Cells by title; columns that are empty in all lines of a table are left out.
Line = Mapping[str, str]
TITLES = {
    "runtime": True,
    "network": True,
    "images": True,
    "ms": False,
    "quartiles": False,
    "fps": False,
    "speed-up": False,
    "of best": False,
    "bound": False,
    "MACs": False,
    "params": False,
    "gathers": False,
    "note": False,
}
NOTES = (
    "network: the removed fraction of the convolutions' weights, as in the paper's Table 2. params: of all parameters, "
    "which is what a percentage means everywhere else (compress --target). MACs: how many times fewer than dense.",
    "ms: median over all calls for the whole batch, with quartiles. speed-up: against the same runtime's dense network "
    "and against the best dense runtime of the table; median over the rounds of the ratio within a round.",
    "bound: speed-up of the same network without any gather, a limit and not a network to use. gathers: channel "
    "shuffles that are left.",
)


@dataclass(frozen=True)
class PublishedTime:
    """A published time of a network.

    Attributes:
        rate: None for the dense network.
        gflops: as they were published.
        ms: average run time.
        frames_per_second: as published.
    """

    rate: float | None
    gflops: float
    ms: float
    frames_per_second: float


@dataclass(frozen=True, kw_only=True)
class PublishedTimes:
    """A published table of times, of batch 1 and one thread; its first row is the dense network.

    Attributes:
        source: what the rows are called.
        conditions: where it was published, and the hardware.
        network: its name.
        image_shape: channels, height and width.
        rows: the times.
    """

    source: str
    conditions: str
    network: str
    image_shape: tuple[int, int, int]
    rows: tuple[PublishedTime, ...]

    def speedup(self, row: PublishedTime) -> float:
        """Against the dense network."""
        return self.rows[0].ms / row.ms

    def operation_ratio(self, row: PublishedTime) -> float:
        """How many times fewer operations than the dense network."""
        return self.rows[0].gflops / row.gflops


def report_text(report: BenchReport, published: PublishedTimes | None = None) -> str:
    """The report for people: a table for every network, batch size and number of threads, then notes.

    Args:
        report: what was measured.
        published: times to show beside those of the same network under the same conditions.
    """
    errors = dict.fromkeys(row.error for row in report.rows if row.error)
    numbers = {error: f"[{number}]" for number, error in enumerate(errors, start=1)}
    sittings: dict[str, list[BenchRow]] = {}
    for row in report.rows:
        title = sitting_words(row.network, row.image_shape, batch=row.batch, threads=row.threads)
        sittings.setdefault(title, []).append(row)
    tables = [_table(title, rows, numbers, published) for title, rows in sittings.items()]
    notes = [*NOTES] if report.rows else ["nothing was timed: none of the runtimes is installed"]
    compared = {row.network for row in report.rows if row.form != "dense"}
    dense_alone = dict.fromkeys(row.network for row in report.rows if row.network not in compared)
    notes += [f"{name}: nothing is removed from this network, so there is nothing to compare" for name in dense_alone]
    if published is not None and any(_is_comparable(row, published) for row in report.rows):
        notes.append(f"{published.source}: {published.conditions}.")
    notes += [f"{number} {error}" for error, number in numbers.items()]
    notes += [f"{each.title} is not installed and was left out; {each.install}" for each in report.missing]
    known = {name: value for name, value in {**report.hardware, **report.versions}.items() if value is not None}
    origin = [
        f"{report.command} (commit {report.commit or 'unknown'})",
        ", ".join(f"{name} {value}" for name, value in known.items()),
    ]
    paragraphs = [
        "\n".join(textwrap.fill(line, TEXT_WIDTH, subsequent_indent="    ") for line in part)
        for part in (notes, origin)
    ]
    return "\n\n".join((*tables, *paragraphs))


def _table(title: str, rows: Sequence[BenchRow], numbers: Mapping[str, str], published: PublishedTimes | None) -> str:
    bounds = {(row.rate, row.runtime, row.images_per_call): row for row in rows if row.form == "bound"}
    dense_params = max((row.size.params for row in rows if row.form == "dense"), default=0)
    lines = [
        _line(row, bounds.get((row.rate, row.runtime, row.images_per_call)), dense_params, numbers)
        for row in rows
        if row.form != "bound"
    ]
    if published is not None and _is_comparable(rows[0], published):
        lines += [_published_line(each, published) for each in published.rows]
    columns = [
        Column(name, [line.get(name, "") for line in lines], is_text=is_text) for name, is_text in TITLES.items()
    ]
    return f"{title}\n{text_table(columns, TEXT_WIDTH)}"


def _line(row: BenchRow, bound: BenchRow | None, dense_params: int, numbers: Mapping[str, str]) -> Line:
    line = {
        "runtime": known_runtime(row.runtime).title,
        "network": _rate(row.rate),
        "images": "" if row.batch == 1 else "1 by 1" if row.images_per_call == 1 else f"{row.images_per_call} at once",
        "MACs": f"{row.size.operation_ratio:.2f}",
        "note": " ".join(numbers[each.error] for each in (row, bound) if each is not None and each.error),
    }
    if row.form != "dense":
        line["params"] = f"{row.size.params / dense_params - 1:.1%}" if dense_params else ""
        line["gathers"] = "" if row.num_gathers is None else str(row.num_gathers)
    if row.timing is not None:
        line |= {
            "ms": _number(row.timing.ms),
            "quartiles": f"{_number(row.timing.ms_low)}-{_number(row.timing.ms_high)}",
            "fps": _number(row.timing.frames_per_second),
            "speed-up": _ratio(row.timing.speedup),
            "of best": _ratio(row.timing.speedup_over_best),
        }
    if bound is not None and bound.timing is not None:
        line["bound"] = _ratio(bound.timing.speedup)
    return line


def _is_comparable(row: BenchRow, published: PublishedTimes) -> bool:
    is_same_network = (row.network, row.image_shape) == (published.network, published.image_shape)
    return is_same_network and row.batch == row.threads == 1


def _published_line(row: PublishedTime, published: PublishedTimes) -> Line:
    speedup = f"{published.speedup(row):.2f}"
    return {
        "runtime": published.source,
        "network": _rate(row.rate),
        "ms": f"{row.ms:.1f}",
        "fps": f"{row.frames_per_second:.1f}",
        "speed-up": speedup,
        "of best": speedup,
        "MACs": f"{published.operation_ratio(row):.2f}",
    }


def _number(value: float) -> str:
    """Three digits or more.

    >>> _number(0.8456), _number(76.04), _number(1276.2)
    ('0.846', '76.0', '1276')
    """
    decimals = max(0, 2 - math.floor(math.log10(value))) if value > 0 else 0
    return f"{value:.{decimals}f}"


def _ratio(ratio: Ratio | None) -> str:
    return "" if ratio is None else f"{ratio.median:.2f}"


def _rate(rate: float | None) -> str:
    return "dense" if rate is None else f"{100 * rate:.3g}%"
