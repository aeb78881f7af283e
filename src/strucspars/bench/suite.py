"""A whole bench: networks in all runtimes, by batch size and number of threads, checked against PyTorch and timed."""

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from strucspars.bench.machine import environment, hardware, versions
from strucspars.bench.networks import BenchNetwork, ImageShape
from strucspars.bench.results import BenchReport, BenchRow, MissingRuntime, RowSize, RowTiming, sitting_words
from strucspars.bench.runtimes import Images, InferenceForms, Program, Runtime, known_runtime, torch_threads
from strucspars.bench.timing import Clock, Samples, TimingRules, interleaved_times, row_timing
from strucspars.convert.comparison import compare_outputs, random_image
from strucspars.core.checks import checked_at_least
from strucspars.cost.counting import count_macs
from strucspars.export.program import first_line

DEFAULT_RUNTIMES = ("onnxruntime", "pytorch", "openvino")

# Called with what is being done, and how much of it is done, from 0 to 1.
OnProgress = Callable[[str, float], None]


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """What to measure of a network.

    Attributes:
        runtimes: names; those that are not installed are left out, and named in the report.
        batches: numbers of images.
        threads: numbers of threads. Every batch is timed with each of them.
        widen_groups_below: run groups narrower than so many channels as wider ones, as `fold` does; None: as an
            export for the runtime does by default.
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
                raise ValueError(f"{option} must have one value or more, each once; got {values!r}")
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
        networks: builds its forms when their turn comes: several large ones do not fit into memory together.
        settings: what to measure.
    """

    name: str
    image_shape: ImageShape
    networks: Callable[[], Sequence[BenchNetwork]]
    settings: BenchSettings = BenchSettings()


@dataclass(frozen=True, kw_only=True, eq=False)
class Contestant:
    """A form of a network, its inference graph and files, and its size."""

    network: BenchNetwork
    forms: InferenceForms
    size: RowSize


@dataclass(frozen=True, kw_only=True)
class Sitting:
    """What is timed together: all forms of a network in all runtimes.

    Attributes:
        network: name.
        image_shape: channels, height and width.
        batch: images to be computed. More than one are timed in one call and one by one.
        threads: of every runtime.
        runtimes: installed ones.
    """

    network: str
    image_shape: ImageShape
    batch: int
    threads: int
    runtimes: tuple[Runtime, ...]


def bench(
    subjects: Sequence[Subject],
    *,
    command: str = "strucspars bench",
    rules: TimingRules | None = None,
    on_progress: OnProgress = lambda words, done: None,
    clock: Clock = time.perf_counter,
) -> BenchReport:
    """Measure networks dense and compressed.

    Args:
        subjects: the networks.
        command: what to type to measure the same again.
        rules: how long, for every batch size and number of threads of a network.
        on_progress: told what is being done.
        clock: seconds.
    """
    rules = rules or TimingRules()
    rows: list[BenchRow] = []
    missing: dict[str, MissingRuntime] = {}
    for subject in subjects:
        runtimes = [known_runtime(name) for name in subject.settings.runtimes]
        present = tuple(runtime for runtime in runtimes if runtime.is_installed)
        for each in runtimes:
            if each not in present:
                missing[each.name] = MissingRuntime(name=each.name, title=each.title, install=each.install)
        if present:
            rows += _subject_rows(subject, present, rules, on_progress, clock)
    settings = [
        {"network": subject.name, "image_shape": list(subject.image_shape), **asdict(subject.settings)}
        for subject in subjects
    ]
    here = environment()
    return BenchReport(
        command=command,
        commit=here["commit"],
        hardware=hardware(here),
        versions=versions(here),
        settings={"timing": asdict(rules), "subjects": settings},
        rows=tuple(rows),
        missing=tuple(missing.values()),
    )


def _subject_rows(
    subject: Subject, runtimes: tuple[Runtime, ...], rules: TimingRules, on_progress: OnProgress, clock: Clock
) -> list[BenchRow]:
    rows = []
    with tempfile.TemporaryDirectory(prefix="strucspars-bench-") as folder:
        on_progress(f"{subject.name}: building", 0.0)
        contestants = _contestants(subject, Path(folder))
        for threads in subject.settings.threads:
            for batch in subject.settings.batches:
                sitting = Sitting(
                    network=subject.name,
                    image_shape=subject.image_shape,
                    batch=batch,
                    threads=threads,
                    runtimes=runtimes,
                )
                rows += sitting_rows(sitting, contestants, rules, on_progress=on_progress, clock=clock)
    return rows


def _contestants(subject: Subject, folder: Path) -> list[Contestant]:
    networks, example = subject.networks(), random_image(subject.image_shape)
    counts = [count_macs(network.model, example) for network in networks]
    (dense_macs,) = {count.macs for network, count in zip(networks, counts, strict=True) if network.form == "dense"}
    contestants = []
    for place, (network, count) in enumerate(zip(networks, counts, strict=True)):
        own = folder / str(place)
        own.mkdir()
        size = RowSize(
            params=count.params,
            macs=count.macs,
            removed_conv_fraction=network.removed_conv_fraction,
            operation_ratio=dense_macs / max(count.macs, 1),
        )
        forms = InferenceForms(network.model, example, own, widen_groups_below=subject.settings.widen_groups_below)
        contestants.append(Contestant(network=network, forms=forms, size=size))
    return contestants


def sitting_rows(
    sitting: Sitting, contestants: Sequence[Contestant], rules: TimingRules, *, on_progress: OnProgress, clock: Clock
) -> list[BenchRow]:
    """Check every network in every runtime against PyTorch, and time those whose outputs agree.

    Args:
        sitting: what to time.
        contestants: the forms of one network, the dense one among them.
        rules: how long.
        on_progress: told how far it is.
        clock: seconds.
    """
    words = sitting_words(sitting.network, sitting.image_shape, batch=sitting.batch, threads=sitting.threads)
    images = np.random.default_rng(0).standard_normal((sitting.batch, *sitting.image_shape), dtype=np.float32)

    def on_round(number: int, elapsed: float) -> None:
        done = min(1.0, elapsed / rules.seconds)
        on_progress(f"{words}: timing {len(programs)} programs, round {number}", done)

    with torch_threads(sitting.threads):
        checked = list(_checked_rows(sitting, contestants, images, words, on_progress))
        programs = {row: timed for row, timed in checked if timed is not None}
        samples = interleaved_times(programs, rules, clock=clock, on_round=on_round)
    return [replace(row, timing=_timing(row, samples)) if row in samples else row for row, _ in checked]


CheckedRow = tuple[BenchRow, Callable[[], object] | None]


def _checked_rows(
    sitting: Sitting, contestants: Sequence[Contestant], images: Images, words: str, on_progress: OnProgress
) -> Iterator[CheckedRow]:
    """A row without times for every program, and the program if it may be timed."""
    on_progress(f"{words}: what PyTorch computes", 0.0)
    expected = [_expected(contestant, images) for contestant in contestants]
    work = [
        (runtime, contestant, outputs, images_per_call)
        for runtime in sitting.runtimes
        for contestant, outputs in zip(contestants, expected, strict=True)
        for images_per_call in sorted({sitting.batch, 1}, reverse=True)
    ]
    for done, (runtime, contestant, outputs, images_per_call) in enumerate(work):
        rate, form = contestant.network.rate, contestant.network.form
        name = form if rate is None else f"{form} {100 * rate:.3g}%"
        on_progress(f"{words}: preparing {name} for {runtime.title}", done / len(work))
        row = BenchRow(
            network=sitting.network,
            image_shape=sitting.image_shape,
            rate=rate,
            form=form,
            runtime=runtime.name,
            batch=sitting.batch,
            images_per_call=images_per_call,
            threads=sitting.threads,
            size=contestant.size,
            difference=None,
            error="",
            timing=None,
        )
        yield _checked_row(row, runtime, contestant.forms, images, outputs)


def _checked_row(
    row: BenchRow, runtime: Runtime, forms: InferenceForms, images: Images, expected: Images
) -> CheckedRow:
    try:
        program = runtime.prepare(forms, row.images_per_call, row.threads)
        num_gathers, gathered_bytes = runtime.gathers(forms)
        row = replace(row, num_gathers=num_gathers, gathered_bytes=gathered_bytes)
        outputs = _in_parts(program, images, row.images_per_call)
    # Converters and runtimes raise errors of any kind; the others are timed all the same.
    except Exception as error:
        return replace(row, error=f"not timed: {type(error).__name__}: {first_line(error)}"), None
    # Copies: outputs of runtimes may lie in their own memory, which is read-only.
    compared = compare_outputs(torch.tensor(outputs), torch.tensor(expected))
    row = replace(row, difference=compared.relative_error)
    if compared.complaint:
        return replace(row, error=f"not timed: {compared.complaint}"), None
    return row, partial(_in_parts, program, images, row.images_per_call)


def _in_parts(program: Program, images: Images, images_per_call: int) -> Images:
    if images_per_call == len(images):
        return program(images)
    # Outputs may lie in memory that the next call overwrites.
    parts = [
        program(images[start : start + images_per_call]).copy() for start in range(0, len(images), images_per_call)
    ]
    return np.concatenate(parts)


def _expected(contestant: Contestant, images: Images) -> Images:
    with torch.no_grad():
        outputs = contestant.network.model(torch.from_numpy(images))
    if not isinstance(outputs, torch.Tensor) or not outputs.isfinite().all():
        what = "NaN or infinity" if isinstance(outputs, torch.Tensor) else f"a {type(outputs).__name__}"
        raise ValueError(
            f"the network gives {what} for random images; runtimes are compared by one tensor of finite numbers: wrap "
            "the network in a module that returns one"
        )
    expected: Images = outputs.numpy()
    return expected


def _timing(row: BenchRow, samples: Mapping[BenchRow, Samples]) -> RowTiming:
    """The times of a row, against the dense network run in the same way and against the fastest dense one."""
    dense = {(other.runtime, other.images_per_call): times for other, times in samples.items() if other.form == "dense"}
    return row_timing(
        samples[row],
        batch=row.batch,
        dense=dense.get((row.runtime, row.images_per_call)),
        best_dense=min(dense.values(), key=lambda times: times.median, default=None),
    )
