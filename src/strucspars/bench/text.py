"""A bench as tables to read."""

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from strucspars.bench.results import BenchReport, BenchRow, Ratio, RowTiming, sitting_words
from strucspars.bench.runtimes import known_runtime
from strucspars.cost.text_table import Column, text_table

TEXT_WIDTH = 120
RATE_TOLERANCE = 0.02
# Paragraphs of what columns mean, by title.
EXPLANATIONS = (
    {
        "ms": "ms: median over all calls for the whole batch, with quartiles.",
        "speed-up": "Speed-ups: against the same runtime's dense network and against the best dense runtime of the "
        "table; median over the rounds of the ratio within a round.",
    },
    {
        "bound": "bound: speed-up of the same network with all channel orders the identity, so without any gather: a "
        "limit, not an exact network.",
        "share": "share: of the time, what goes with the gathers.",
        "MACs": "MACs: how many times fewer than dense.",
        "eff.": "eff.: speed-up by that.",
        "MB": "MB: what the gathers copy for one image.",
    },
)

# Cells by title; a title that no line of a table has is left out.
Line = Mapping[str, str]
TITLES = (
    "runtime",
    "network",
    "images",
    "ms",
    "quartiles",
    "fps",
    "speed-up",
    "of best",
    "bound",
    "MACs",
    "eff.",
    "gathers",
    "MB",
    "share",
    "note",
)
TEXTS = ("runtime", "network", "images")


@dataclass(frozen=True)
class PublishedTime:
    """Times that others published of a network; their first row is the dense network.

    Attributes:
        rate: None for the dense network.
        gflops: as they count them.
        ms: average run time.
        frames_per_second: as printed.
    """

    rate: float | None
    gflops: float
    ms: float
    frames_per_second: float


@dataclass(frozen=True, kw_only=True)
class PublishedTimes:
    """A published table of times, of batch 1 and one thread.

    Attributes:
        source: what the rows are called.
        conditions: where it was published, and the hardware.
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
    """The report for people: a table for every network, batch size and number of threads, then explanations.

    Args:
        report: what was measured.
        published: times to show beside those of the same network under the same conditions.
    """
    errors = dict.fromkeys(row.error for row in report.rows if row.error)
    numbers = {error: f"[{number}]" for number, error in enumerate(errors, start=1)}
    sittings = _by_sitting(report.rows)
    lines = {title: _lines(rows, numbers, published) for title, rows in sittings.items()}
    printed = {title for each in lines.values() for line in each for title, cell in line.items() if cell}
    parts = [_table(title, lines[title], rows) for title, rows in sittings.items()]
    notes = [*_legend(printed), *_notes(report, numbers, published)]
    parts += ["\n".join(_wrapped(line) for line in part) for part in (notes, _origin(report))]
    return "\n\n".join(part for part in parts if part)


def _by_sitting(rows: Sequence[BenchRow]) -> dict[str, list[BenchRow]]:
    sittings: dict[str, list[BenchRow]] = {}
    for row in rows:
        title = sitting_words(row.network, row.image_shape, batch=row.batch, threads=row.threads)
        sittings.setdefault(title, []).append(row)
    return sittings


def _lines(rows: Sequence[BenchRow], notes: Mapping[str, str], published: PublishedTimes | None) -> list[Line]:
    bounds = {_place(row): row for row in rows if row.form == "bound"}
    lines = [_line(row, bounds.get(_place(row)), notes) for row in rows if row.form != "bound"]
    return lines + _published_lines(rows[0], published)


def _table(title: str, lines: Sequence[Line], rows: Sequence[BenchRow]) -> str:
    columns = [Column(title, [line.get(title, "") for line in lines], is_text=title in TEXTS) for title in TITLES]
    said = "\n".join(_wrapped(line) for line in _fastest_ways(rows))
    return f"{title}\n{text_table(columns, TEXT_WIDTH)}" + (f"\n{said}" if said else "")


def _place(row: BenchRow) -> tuple[object, ...]:
    return row.rate, row.runtime, row.images_per_call


def _line(row: BenchRow, bound: BenchRow | None, notes: Mapping[str, str]) -> Line:
    line = {
        "runtime": known_runtime(row.runtime).title,
        "network": _rate(row.rate),
        "images": _way(row),
        "MACs": f"{row.size.operation_ratio:.2f}",
        "note": " ".join(notes[each.error] for each in (row, bound) if each is not None and each.error),
    }
    if row.form != "dense" and row.num_gathers is not None and row.gathered_bytes is not None:
        line |= {"gathers": str(row.num_gathers), "MB": f"{row.gathered_bytes / 1e6:.1f}"}
    if row.timing is not None:
        line |= _time_cells(row.timing)
    if bound is not None and bound.timing is not None:
        line["bound"] = _ratio(bound.timing.speedup)
    return line


def _time_cells(timing: RowTiming) -> dict[str, str]:
    return {
        "ms": _number(timing.ms),
        "quartiles": f"{_number(timing.ms_low)}-{_number(timing.ms_high)}",
        "fps": _number(timing.frames_per_second),
        "speed-up": _ratio(timing.speedup),
        "of best": _ratio(timing.speedup_over_best),
        "eff.": "" if timing.efficiency is None else f"{timing.efficiency:.2f}",
        "share": "" if timing.gather_share is None else _share(timing.gather_share),
    }


def _published_lines(row: BenchRow, published: PublishedTimes | None) -> list[Line]:
    """The published rows, where they are of the same network under the same conditions."""
    if published is None or row.batch != 1 or row.threads != 1:
        return []
    if (row.network, row.image_shape) != (published.network, published.image_shape):
        return []
    return [_published_line(each, published) for each in published.rows]


def _published_line(row: PublishedTime, published: PublishedTimes) -> Line:
    speedup, ratio = published.speedup(row), published.operation_ratio(row)
    return {
        "runtime": published.source,
        "network": _rate(row.rate),
        "ms": f"{row.ms:.1f}",
        "fps": f"{row.frames_per_second:.1f}",
        "speed-up": f"{speedup:.2f}",
        "of best": f"{speedup:.2f}",
        "MACs": f"{ratio:.2f}",
        "eff.": f"{speedup / ratio:.2f}",
    }


def _fastest_ways(rows: Sequence[BenchRow]) -> Iterator[str]:
    """Of a batch of several images: whether to compute them at once or one by one."""
    if rows[0].batch == 1:
        return
    for rate in dict.fromkeys(row.rate for row in rows):
        times = {
            row.timing.ms: row for row in rows if row.rate == rate and row.form != "bound" and row.timing is not None
        }
        if times:
            ms = min(times)
            fastest = times[ms]
            yield (
                f"{_rate(rate)}: fastest in {known_runtime(fastest.runtime).title}, {_way(fastest)}, "
                f"{_number(ms / fastest.batch)} ms per image"
            )


def _legend(printed: Set[str]) -> list[str]:
    """What the columns mean that are there."""
    paragraphs = (" ".join(text for title, text in explained.items() if title in printed) for explained in EXPLANATIONS)
    return [paragraph for paragraph in paragraphs if paragraph]


def _notes(report: BenchReport, numbers: Mapping[str, str], published: PublishedTimes | None) -> list[str]:
    lines = [] if report.rows else ["nothing was timed: none of the runtimes is installed"]
    if published is not None and any(_published_lines(row, published) for row in report.rows):
        lines.append(f"{published.source}: {published.conditions}.")
    lines += _counted_rates(report.rows)
    lines += list(dict.fromkeys(_other_rate(row) for row in report.rows if _other_rate(row)))
    compared = {row.network for row in report.rows if row.form != "dense"}
    lines += [
        f"{name}: nothing is removed from this network; it was timed once, as dense, and there is nothing to compare"
        for name in dict.fromkeys(row.network for row in report.rows)
        if name not in compared
    ]
    lines += [f"{number} {error}" for error, number in numbers.items()]
    lines += [f"{each.title} is not installed and was left out; {each.install}" for each in report.missing]
    return lines


def _counted_rates(rows: Sequence[BenchRow]) -> Iterator[str]:
    """What the rates of a network count, and what they are of all parameters."""
    dense = {row.network: row.size.params for row in rows if row.form == "dense"}
    removed: dict[str, dict[str, str]] = {}
    for row in rows:
        if row.form == "compressed" and row.network in dense:
            fraction = 1 - row.size.params / dense[row.network]
            removed.setdefault(row.network, {})[_rate(row.rate)] = f"{fraction:.1%}"
    for network, fractions in removed.items():
        listed = ", ".join(f"{rate} is {fraction}" for rate, fraction in fractions.items())
        yield (
            f"{network}: rates count the convolutions' weights; of all parameters, which compress --target counts, "
            f"{listed}"
        )


def _other_rate(row: BenchRow) -> str:
    """Where a network has lost more or less than its rate says by two points."""
    removed = row.size.removed_conv_fraction
    if row.rate is None or abs(removed - row.rate) < RATE_TOLERANCE:
        return ""
    return f"{row.network} {_rate(row.rate)}: {removed:.1%} of the convolutions' weights are removed"


def _origin(report: BenchReport) -> list[str]:
    known = {name: value for name, value in {**report.hardware, **report.versions}.items() if value is not None}
    facts = ", ".join(f"{name} {value}" for name, value in known.items())
    return [f"{report.command} (commit {report.commit or 'unknown'})", facts]


def _wrapped(line: str) -> str:
    return textwrap.fill(line, TEXT_WIDTH, subsequent_indent="    ")


def _number(value: float) -> str:
    """Three digits or more.

    >>> _number(0.8456), _number(76.04), _number(1276.2)
    ('0.846', '76.0', '1276')
    """
    decimals = max(0, 2 - math.floor(math.log10(value))) if value > 0 else 0
    return f"{value:.{decimals}f}"


def _share(share: float) -> str:
    # A whole number has no negative zero.
    return f"{round(100 * share)}%"


def _ratio(ratio: Ratio | None) -> str:
    return "" if ratio is None else f"{ratio.median:.2f}"


def _rate(rate: float | None) -> str:
    return "dense" if rate is None else f"{100 * rate:.3g}%"


def _way(row: BenchRow) -> str:
    if row.batch == 1:
        return ""
    return "1 by 1" if row.images_per_call == 1 else f"{row.images_per_call} at once"
