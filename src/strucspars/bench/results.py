"""What a bench measured, and its JSON."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from strucspars.bench.networks import BenchForm, ImageShape
from strucspars.io.records import as_record, check_header, parse_json, plain, to_json

HEADER: dict[str, str | int] = {"format": "strucspars-bench", "format_version": 2}


@dataclass(frozen=True, kw_only=True)
class RowSize:
    """What a network holds and computes.

    Attributes:
        params: parameters of the whole network.
        macs: multiply-accumulates for one image.
        removed_conv_fraction: fraction of the convolutions' weights that is gone.
        operation_ratio: how many times fewer multiply-accumulates than the dense network.
    """

    params: int
    macs: int
    removed_conv_fraction: float
    operation_ratio: float


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """A ratio of times taken within each round: median over the rounds, first and third quartile.

    >>> Ratio(median=2.0, low=1.9, high=2.1).median
    2.0
    """

    median: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class RowTiming:
    """How fast a network is.

    Attributes:
        ms, ms_low, ms_high: milliseconds for the whole batch: median and quartiles over all calls.
        frames_per_second: images per second at the median.
        rounds, calls: how often it was measured.
        speedup: against the same runtime's dense network, run in the same way; None where that has no time.
        speedup_over_best: against the fastest dense network of all runtimes, at this batch and these threads.
        efficiency: speed-up by operation ratio; 1 if the time shrinks as the operations do.
        gather_share: fraction of the time that goes when every gather does; None without a bound to compare with.
    """

    ms: float
    ms_low: float
    ms_high: float
    frames_per_second: float
    rounds: int
    calls: int
    speedup: Ratio | None
    speedup_over_best: Ratio | None
    efficiency: float | None
    gather_share: float | None


@dataclass(frozen=True, kw_only=True)
class BenchRow:
    """One network in one runtime.

    Attributes:
        network: its name.
        image_shape: channels, height and width.
        rate: fraction of the convolutions' weights that was to go; None for the dense one.
        form: `dense`, `compressed`, or `bound`: no network to use, but what `compressed` would be without gathers.
        runtime: its name.
        batch: images to be computed.
        images_per_call: of them at a time; 1 for a batch of 16 means sixteen calls.
        threads: that the runtime may use.
        size: of the network.
        num_gathers: channel shuffles that remain in the graph that this runtime runs; None where it got none.
        gathered_bytes: what they copy for one image.
        difference: of the outputs from PyTorch's, relative to the largest; None where there were none to compare.
        error: why there is no time; empty if there is one.
        timing: None after an error.
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
    difference: float | None
    error: str
    timing: RowTiming | None


@dataclass(frozen=True, kw_only=True)
class MissingRuntime:
    """A runtime that was asked for and is not installed."""

    name: str
    title: str
    install: str


@dataclass(frozen=True, kw_only=True)
class BenchReport:
    """Everything that a bench measured, and how.

    Attributes:
        command: that measures the same again.
        commit: of the code; None where it is not a checkout.
        hardware: processor, cores, instruction set.
        versions: of the packages that matter.
        settings: what was to be measured.
        rows: in the order in which they were asked for.
        missing: runtimes that could not be measured.
    """

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


def report_from_json(text: str, where: str = "the report") -> BenchReport:
    """Read a report that `to_json` wrote, or raise a `RecordError` that says what is wrong, and where."""
    return as_record(BenchReport, check_header(parse_json(text, where), where, **HEADER), where)


def sitting_words(network: str, image_shape: ImageShape, *, batch: int, threads: int) -> str:
    """What is timed together, in words.

    >>> sitting_words("resnet50", (3, 224, 224), batch=16, threads=1)
    'resnet50, 224 x 224, batch 16, 1 thread'
    """
    height, width = image_shape[1:]
    return f"{network}, {height} x {width}, batch {batch}, {threads} thread{'s' if threads > 1 else ''}"
