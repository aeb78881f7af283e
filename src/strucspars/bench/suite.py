"""A whole bench: networks, batch sizes and numbers of threads, sitting by sitting."""

import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from strucspars.bench.machine import environment, hardware, versions
from strucspars.bench.networks import BenchNetwork, ImageShape
from strucspars.bench.results import BenchReport, BenchRow, MissingRuntime, NetworkSize
from strucspars.bench.runtimes import InferenceForms, Runtime, known_runtime, split_by_presence
from strucspars.bench.sitting import Contestant, Observer, Sitting, sitting_rows
from strucspars.bench.timing import Clock, TimingRules
from strucspars.convert.comparison import random_image
from strucspars.core.checks import checked_at_least
from strucspars.cost.counting import NetworkCount, count_macs

DEFAULT_RUNTIMES = ("onnxruntime", "pytorch", "openvino")


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """What to measure of a network.

    Attributes:
        runtimes: names; those that are not installed are left out, and named in the report.
        batches: numbers of images.
        threads: numbers of threads. Every batch is timed with each of them.
        widen_groups_below: run groups narrower than so many channels as wider ones, as `fold` does; None: as an
            export for the runtime does by default.

    >>> BenchSettings(runtimes=("onnxruntime",), batches=(1, 16)).threads
    (1,)
    """

    runtimes: tuple[str, ...] = DEFAULT_RUNTIMES
    batches: tuple[int, ...] = (1,)
    threads: tuple[int, ...] = (1,)
    widen_groups_below: int | None = None

    def __post_init__(self) -> None:
        for name in self.runtimes:
            known_runtime(name)
        for option in ("runtimes", "batches", "threads"):
            values = getattr(self, option)
            if not values or len(set(values)) < len(values):
                raise ValueError(f"{option} must name something, and nothing twice; got {values!r}")
        for option in ("batches", "threads"):
            for value in getattr(self, option):
                checked_at_least(f"each of {option}", value, 1)
        if self.widen_groups_below is not None:
            checked_at_least("widen_groups_below", self.widen_groups_below, 1)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A network to be measured.

    Attributes:
        name: in the report.
        image_shape: channels, height and width of its images.
        networks: builds its forms when their turn comes: several large ones would not fit into memory together.
        settings: what to measure.
    """

    name: str
    image_shape: ImageShape
    networks: Callable[[], Sequence[BenchNetwork]]
    settings: BenchSettings = BenchSettings()


def bench(
    subjects: Sequence[Subject],
    *,
    command: str = "strucspars bench",
    rules: TimingRules | None = None,
    observer: Observer = lambda words, done: None,
    clock: Clock = time.perf_counter,
) -> BenchReport:
    """Measure networks dense and compressed.

    Args:
        subjects: the networks.
        command: what to type to measure the same again.
        rules: how long, for every batch size and number of threads of a network.
        observer: told what is being done.
        clock: seconds.
    """
    rules = rules or TimingRules()
    rows: list[BenchRow] = []
    missing: dict[str, MissingRuntime] = {}
    for subject in subjects:
        present, absent = split_by_presence([known_runtime(name) for name in subject.settings.runtimes])
        missing |= {
            each.name: MissingRuntime(name=each.name, title=each.title, install=each.install) for each in absent
        }
        if present:
            rows += _subject_rows(subject, present, rules, observer, clock)
    return BenchReport(
        command=command,
        commit=environment()["commit"],
        hardware=hardware(),
        versions=versions(),
        settings={"timing": asdict(rules), "subjects": [_plain_settings(subject) for subject in subjects]},
        rows=tuple(rows),
        missing=tuple(missing.values()),
    )


def _subject_rows(
    subject: Subject, runtimes: Sequence[Runtime], rules: TimingRules, observer: Observer, clock: Clock
) -> list[BenchRow]:
    rows = []
    with tempfile.TemporaryDirectory(prefix="strucspars-bench-") as folder:
        contestants = _contestants(subject, Path(folder), observer)
        for threads in subject.settings.threads:
            for batch in subject.settings.batches:
                sitting = Sitting(
                    network=subject.name,
                    image_shape=subject.image_shape,
                    batch=batch,
                    threads=threads,
                    runtimes=tuple(runtimes),
                )
                rows += sitting_rows(sitting, contestants, rules, observer=observer, clock=clock)
    return rows


def _contestants(subject: Subject, folder: Path, observer: Observer) -> list[Contestant]:
    observer(f"{subject.name}: building", 0.0)
    networks = subject.networks()
    example = random_image(subject.image_shape)
    counts = [count_macs(network.model, example) for network in networks]
    (dense_macs,) = {count.macs for network, count in zip(networks, counts, strict=True) if network.form == "dense"}
    contestants = []
    for place, (network, count) in enumerate(zip(networks, counts, strict=True)):
        own = folder / str(place)
        own.mkdir()
        forms = InferenceForms(network.model, example, own, widen_groups_below=subject.settings.widen_groups_below)
        contestants.append(Contestant(network=network, forms=forms, size=_size(network, count, dense_macs)))
    return contestants


def _size(network: BenchNetwork, count: NetworkCount, dense_macs: int) -> NetworkSize:
    return NetworkSize(
        params=count.params,
        macs=count.macs,
        removed_conv_fraction=network.removed_conv_fraction,
        operation_ratio=dense_macs / count.macs if count.macs else math.nan,
    )


def _plain_settings(subject: Subject) -> dict[str, object]:
    return {"network": subject.name, "image_shape": list(subject.image_shape), **asdict(subject.settings)}
