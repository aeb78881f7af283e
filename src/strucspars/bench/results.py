"""What a bench measured: the records, their JSON, and the table for people."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from strucspars.bench.networks import BenchForm, ImageShape
from strucspars.bench.runtimes import known_runtime
from strucspars.cost.text_table import Column, text_table
from strucspars.io.records import as_record, check_header, parse_json, plain, to_json

HEADER: dict[str, str | int] = {"format": "strucspars-bench", "format_version": 3}
TEXT_WIDTH = 120
# Cells by title; columns that are empty in all lines of a table are left out.
Line = Mapping[str, str]
TEXTS = ("runtime", "network", "orders", "images")
SPEEDS = ("ms", "quartiles", "fps", "speed-up", "of best", "of fp32", "bound")
NUMBERS = (*SPEEDS, "MACs", "params", "MB", "gathers", "note")
NOTES = (
    "network: the removed fraction of the convolutions' weights, as in the paper's Table 2. params: of all parameters, "
    "which is what a percentage means everywhere else (compress --target). MACs: how many times fewer than dense.",
    "ms: median over all calls for the whole batch, with quartiles. speed-up: against the same runtime's dense network "
    "and against the best dense runtime of the table; median over the rounds of the ratio within a round.",
    "bound: speed-up of the same network without any gather, a limit and not a network to use. gathers: channel "
    "shuffles that are left.",
)
INT8_NOTE = (
    "int8: calibrated on random images, to measure times alone. of best compares int8 with int8; of fp32 is over the "
    "best dense runtime in float32. MB: the file."
)


@dataclass(frozen=True, kw_only=True)
class RowSize:
    """What a network holds and computes; `operation_ratio` is how many times fewer MACs than the dense one."""

    params: int
    macs: int
    removed_conv_fraction: float
    operation_ratio: float


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """A ratio of times taken within each round: median over the rounds, first and third quartile."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class RowTiming:
    """How fast a network is: milliseconds for the whole batch, median and quartiles over all calls.

    The speed-ups are against the same runtime's dense network, against the fastest dense one of the same precision in
    all runtimes, and in int8 against the fastest dense one in float32.
    """

    ms: float
    ms_low: float
    ms_high: float
    frames_per_second: float
    rounds: int
    calls: int
    speedup: Ratio | None
    speedup_over_best: Ratio | None
    speedup_over_float32: Ratio | None = None


@dataclass(frozen=True, kw_only=True)
class BenchRow:
    """One network in one runtime; `rate` is None for the dense network, `timing` after an `error`.

    The form `bound` is the compressed network without gathers: a limit, not a usable network. With one image per call,
    a batch of 16 means sixteen calls. The difference is that of the outputs from PyTorch's, relative to the largest.
    `orders` is the policy by which layers share channel orders.
    """

    network: str
    image_shape: ImageShape
    rate: float | None
    form: BenchForm
    runtime: str
    batch: int
    images_per_call: int
    threads: int
    size: RowSize
    num_gathers: int | None = None
    gathered_bytes: int | None = None
    nbytes: int | None = None
    difference: float | None = None
    error: str = ""
    timing: RowTiming | None = None
    orders: str | None = None


@dataclass(frozen=True, kw_only=True)
class MissingRuntime:
    """A runtime that was asked for and is not installed."""

    name: str
    title: str
    install: str


@dataclass(frozen=True, kw_only=True)
class BenchReport:
    """Everything that a bench measured, and how; `missing` are the runtimes that are not installed."""

    command: str
    commit: str | None
    hardware: Mapping[str, Any]
    versions: Mapping[str, str | None]
    settings: Mapping[str, Any]
    rows: tuple[BenchRow, ...]
    missing: tuple[MissingRuntime, ...] = ()

    def document(self) -> dict[str, Any]:
        """The report in the types of JSON."""
        fields: dict[str, Any] = plain(self, "the report")
        return HEADER | fields

    def to_json(self) -> str:
        """The report as JSON text, for a file."""
        return to_json(self.document(), "the report") + "\n"


@dataclass(frozen=True)
class PublishedTime:
    """A published time of a network; the rate is None for the dense one."""

    rate: float | None
    gflops: float
    ms: float
    frames_per_second: float


@dataclass(frozen=True, kw_only=True)
class PublishedTimes:
    """A published table of times, of batch 1 and one thread; its first row is the dense network."""

    source: str
    conditions: str
    network: str
    image_shape: ImageShape
    rows: tuple[PublishedTime, ...]


def report_from_json(text: str, where: str = "the report") -> BenchReport:
    """Read a report that `to_json` wrote, or raise a `RecordError` that says what is wrong, and where."""
    return as_record(BenchReport, check_header(parse_json(text, where), where, **HEADER), where)


def table_title(network: str, image_shape: ImageShape, *, batch: int, threads: int) -> str:
    """The title of a table: all that is timed together.

    >>> table_title("resnet50", (3, 224, 224), batch=16, threads=1)
    'resnet50, 224 x 224, batch 16, 1 thread'
    """
    height, width = image_shape[1:]
    return f"{network}, {height} x {width}, batch {batch}, {threads} thread{'s' if threads > 1 else ''}"


def report_text(report: BenchReport, published: PublishedTimes | None = None) -> str:
    """The report for people: a table for every network, batch and number of threads, with published times and notes."""
    numbers: dict[str, str] = {}
    tables: dict[str, list[BenchRow]] = {}
    for row in report.rows:
        if row.error:
            numbers.setdefault(row.error, f"[{len(numbers) + 1}]")
        title = table_title(row.network, row.image_shape, batch=row.batch, threads=row.threads)
        tables.setdefault(title, []).append(row)
    notes = [*NOTES] if report.rows else ["nothing was timed: none of the runtimes is installed"]
    notes += [INT8_NOTE] * any(known_runtime(row.runtime).is_int8 for row in report.rows)
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
    return "\n\n".join((*(_table(title, rows, numbers, published) for title, rows in tables.items()), *paragraphs))


def _table(title: str, rows: Sequence[BenchRow], numbers: Mapping[str, str], published: PublishedTimes | None) -> str:
    bounds = {(row.rate, row.runtime, row.images_per_call): row for row in rows if row.form == "bound"}
    dense_params = next((row.size.params for row in rows if row.form == "dense"), None)
    lines = [
        _line(row, bounds.get((row.rate, row.runtime, row.images_per_call)), dense_params, numbers)
        for row in rows
        if row.form != "bound"
    ]
    if published is not None and _is_comparable(rows[0], published):
        lines += [_published_line(each, published.rows[0], published.source) for each in published.rows]
    columns = [
        Column(name, [line.get(name, "") for line in lines], is_text=name in TEXTS) for name in (*TEXTS, *NUMBERS)
    ]
    return f"{title}\n{text_table(columns, TEXT_WIDTH)}"


def _line(row: BenchRow, bound: BenchRow | None, dense_params: int | None, numbers: Mapping[str, str]) -> Line:
    line = {
        "runtime": known_runtime(row.runtime).title,
        "network": _rate(row.rate),
        "orders": row.orders or "",
        "images": "" if row.batch == 1 else "1 by 1" if row.images_per_call == 1 else f"{row.images_per_call} at once",
        "MACs": f"{row.size.operation_ratio:.2f}",
        "MB": "" if row.nbytes is None else f"{row.nbytes / 1e6:.1f}",
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
            "of fp32": _ratio(row.timing.speedup_over_float32),
        }
    if bound is not None and bound.timing is not None:
        line["bound"] = _ratio(bound.timing.speedup)
    return line


def _is_comparable(row: BenchRow, published: PublishedTimes) -> bool:
    is_same_network = (row.network, row.image_shape) == (published.network, published.image_shape)
    return is_same_network and row.batch == row.threads == 1


def _published_line(row: PublishedTime, dense: PublishedTime, source: str) -> Line:
    speedup = f"{dense.ms / row.ms:.2f}"
    return {
        "runtime": source,
        "network": _rate(row.rate),
        "ms": f"{row.ms:.1f}",
        "fps": f"{row.frames_per_second:.1f}",
        "speed-up": speedup,
        "of best": speedup,
        "MACs": f"{dense.gflops / row.gflops:.2f}",
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
