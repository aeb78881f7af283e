"""A whole bench: networks in all runtimes, by batch size and number of threads, checked against PyTorch and timed.

All programs run in turn, round after round, so that noise affects all of them equally and times can be compared.
"""

import gc
import math
import tempfile
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from strucspars.bench.machine import environment, hardware, versions
from strucspars.bench.networks import BenchNetwork, ImageShape, conv_params
from strucspars.bench.results import BenchReport, BenchRow, MissingRuntime, Ratio, RowSize, RowTiming, table_title
from strucspars.bench.runtimes import Images, InferenceForms, Program, Runtime, known_runtime, torch_threads
from strucspars.convert.comparison import compare_outputs, random_image
from strucspars.cost.counting import count_macs
from strucspars.export.program import first_line

Key = TypeVar("Key", bound=Hashable)
# Seconds of every timed call of one program, by round.
Rounds = tuple[tuple[float, ...], ...]
Clock = Callable[[], float]
# Of the outputs of an int8 program, relative to the largest; a wrong order of channels makes them unrelated.
INT8_DIFFERENCE = 0.6
# Called with what is being done, and how much of it is done, from 0 to 1.
OnProgress = Callable[[str, float], None]


@dataclass(frozen=True, kw_only=True)
class TimingRules:
    """How long and how often to measure.

    `seconds` are for everything together, but for at least `min_rounds`. In a round, every program is called for
    `visit_seconds`, at least once and at most `max_calls` times; `warmup_calls` before the first round are not timed.
    """

    seconds: float = 90.0
    visit_seconds: float = 0.25
    max_calls: int = 20
    warmup_calls: int = 3
    min_rounds: int = 3
    max_rounds: int = 50

    def __post_init__(self) -> None:
        if not 0 < self.seconds < math.inf:
            raise ValueError(f"seconds must be a positive number of seconds, got {self.seconds!r}")


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A network, and what to measure of it; `build` makes its forms, the dense one first.

    Runtimes that are not installed are left out, and named in the report. Several images are timed in one call and one
    by one. `widen_groups_below` is as in `fold`; None: as an export for the runtime does by default.
    """

    network: str
    image_shape: ImageShape
    build: Callable[[], Sequence[BenchNetwork]]
    runtimes: tuple[str, ...]
    batches: tuple[int, ...] = (1,)
    threads: tuple[int, ...] = (1,)
    widen_groups_below: int | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Contestant:
    """A form of a network, its inference graph and files, and its size."""

    network: BenchNetwork
    forms: InferenceForms
    size: RowSize


def bench(
    subject: Subject,
    *,
    command: str = "strucspars bench",
    rules: TimingRules | None = None,
    on_progress: OnProgress = lambda words, done: None,
) -> BenchReport:
    """Measure a network dense and compressed; `command` is what to type to measure the same again."""
    rules = rules or TimingRules()
    runtimes = [known_runtime(name) for name in subject.runtimes]
    present = [runtime for runtime in runtimes if runtime.is_installed]
    rows: list[BenchRow] = []
    if present:
        on_progress(f"{subject.network}: building", 0.0)
        with tempfile.TemporaryDirectory(prefix="strucspars-bench-") as folder:
            contestants = _contestants(subject, Path(folder))
            for threads, batch in product(subject.threads, subject.batches):
                rows += timed_rows(subject, contestants, present, batch, threads, rules, on_progress)
    here, missing = environment(), [runtime for runtime in runtimes if runtime not in present]
    settings = {key: value for key, value in vars(subject).items() if key != "build"}
    return BenchReport(
        command=command,
        commit=here["commit"],
        hardware=hardware(here),
        versions=versions(here),
        settings={"timing": asdict(rules), "subjects": [settings]},
        rows=tuple(rows),
        missing=tuple(MissingRuntime(name=each.name, title=each.title, install=each.install) for each in missing),
    )


def _contestants(subject: Subject, folder: Path) -> list[Contestant]:
    networks, example = subject.build(), random_image(subject.image_shape)
    counts = [count_macs(network.model, example) for network in networks]
    dense_macs, dense_conv_params = counts[0].macs, conv_params(networks[0].model)
    contestants = []
    for place, (network, count) in enumerate(zip(networks, counts, strict=True)):
        own = folder / str(place)
        own.mkdir()
        size = RowSize(
            params=count.params,
            macs=count.macs,
            removed_conv_fraction=1 - conv_params(network.model) / dense_conv_params,
            operation_ratio=dense_macs / max(count.macs, 1),
        )
        forms = InferenceForms(network.model, example, own, widen_groups_below=subject.widen_groups_below)
        contestants.append(Contestant(network=network, forms=forms, size=size))
    return contestants


def timed_rows(
    subject: Subject,
    contestants: Sequence[Contestant],
    runtimes: Sequence[Runtime],
    batch: int,
    threads: int,
    rules: TimingRules,
    on_progress: OnProgress = lambda words, done: None,
    *,
    clock: Clock = time.perf_counter,
) -> list[BenchRow]:
    """Check every form of a network in every runtime against PyTorch, and time those whose outputs agree."""
    title = table_title(subject.network, subject.image_shape, batch=batch, threads=threads)
    images = np.random.default_rng(0).standard_normal((batch, *subject.image_shape), dtype=np.float32)
    checked: list[BenchRow] = []
    programs: dict[BenchRow, Callable[[], object]] = {}

    def on_round(number: int, elapsed: float) -> None:
        on_progress(f"{title}: timing {len(programs)} programs, round {number}", min(1.0, elapsed / rules.seconds))

    with torch_threads(threads):
        on_progress(f"{title}: what PyTorch computes", 0.0)
        expected = [_expected(contestant, images) for contestant in contestants]
        for number, runtime in enumerate(runtimes):
            on_progress(f"{title}: preparing {runtime.title}", number / len(runtimes))
            for contestant, outputs in zip(contestants, expected, strict=True):
                for images_per_call in sorted({batch, 1}, reverse=True):
                    row = BenchRow(
                        network=subject.network,
                        image_shape=subject.image_shape,
                        rate=contestant.network.rate,
                        form=contestant.network.form,
                        orders=contestant.network.orders,
                        runtime=runtime.name,
                        batch=batch,
                        images_per_call=images_per_call,
                        threads=threads,
                        size=contestant.size,
                    )
                    row, program = _checked_row(row, runtime, contestant.forms, images, outputs)
                    checked.append(row)
                    if program is not None:
                        programs[row] = program
        times = interleaved_times(programs, rules, clock=clock, on_round=on_round)
    return [replace(row, timing=_timing(row, times)) if row in times else row for row in checked]


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


def _checked_row(
    row: BenchRow, runtime: Runtime, forms: InferenceForms, images: Images, expected: Images
) -> tuple[BenchRow, Callable[[], object] | None]:
    """The row with its gathers and its error, and the program if it may be timed."""
    try:
        program = partial(_in_parts, runtime.prepare(forms, row.images_per_call, row.threads), images, row)
        num_gathers, gathered_bytes = runtime.gathers(forms)
        row = replace(row, num_gathers=num_gathers, gathered_bytes=gathered_bytes, nbytes=runtime.nbytes(forms))
        outputs = program()
    # Converters and runtimes raise errors of any kind; the others are timed all the same.
    except Exception as error:
        return replace(row, error=f"not timed: {type(error).__name__}: {first_line(error)}"), None
    # Copies: outputs may be in the runtime's own memory, which is read-only.
    compared = compare_outputs(torch.tensor(outputs), torch.tensor(expected))
    # The export has compared an int8 file with the float32 file on more images.
    is_close = runtime.is_int8 and compared.relative_error < INT8_DIFFERENCE
    complaint = f"not timed: {compared.complaint}" if compared.complaint and not is_close else ""
    return replace(row, difference=compared.relative_error, error=complaint), None if complaint else program


def _in_parts(program: Program, images: Images, row: BenchRow) -> Images:
    size = row.images_per_call
    if size == len(images):
        return program(images)
    # Outputs may be in memory that the next call overwrites.
    return np.concatenate([program(images[start : start + size]).copy() for start in range(0, len(images), size)])


def interleaved_times(
    programs: Mapping[Key, Callable[[], object]],
    rules: TimingRules,
    *,
    clock: Clock = time.perf_counter,
    on_round: Callable[[int, float], None] = lambda rounds, elapsed: None,
) -> dict[Key, Rounds]:
    """Time programs in turn, every second round in reverse order; `on_round` gets its number and the seconds so far."""
    started, was_enabled = clock(), gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        calls = {key: _calls_per_visit(program, rules, clock) for key, program in programs.items()}
        rounds: dict[Key, list[tuple[float, ...]]] = {key: [] for key in programs}
        longest = 0.0
        for number in range(rules.max_rounds):
            round_started = clock()
            if number >= rules.min_rounds and round_started - started + longest > rules.seconds:
                break
            for key in list(programs) if number % 2 == 0 else reversed(list(programs)):
                rounds[key].append(_visit(programs[key], calls[key], clock))
            longest = max(longest, clock() - round_started)
            on_round(number + 1, clock() - started)
    finally:
        if was_enabled:
            gc.enable()
    return {key: tuple(times) for key, times in rounds.items()}


def _calls_per_visit(program: Callable[[], object], rules: TimingRules, clock: Clock) -> int:
    """Warm a program up; returns how many calls fill a visit."""
    for _ in range(rules.warmup_calls):
        started = clock()
        program()
        seconds = clock() - started
    wanted = math.ceil(rules.visit_seconds / seconds) if seconds > 0 else rules.max_calls
    return max(1, min(wanted, rules.max_calls))


def _visit(program: Callable[[], object], calls: int, clock: Clock) -> tuple[float, ...]:
    if calls > 1:
        # The previous program left its data in the caches. Where one call fills a visit, that hardly matters.
        program()
    times = []
    for _ in range(calls):
        started = clock()
        program()
        times.append(clock() - started)
    return tuple(times)


def _timing(row: BenchRow, times: Mapping[BenchRow, Rounds]) -> RowTiming:
    """The times of a row, against the dense network run in the same way and against the fastest dense ones."""
    dense = {other: rounds for other, rounds in times.items() if other.form == "dense"}
    same = next(
        (
            rounds
            for other, rounds in dense.items()
            if (other.runtime, other.images_per_call) == (row.runtime, row.images_per_call)
        ),
        None,
    )

    def fastest(*, int8: bool) -> Rounds | None:
        of_precision = [rounds for other, rounds in dense.items() if known_runtime(other.runtime).is_int8 == int8]
        return min(of_precision, key=lambda rounds: quartiles(rounds)[1], default=None)

    is_int8 = known_runtime(row.runtime).is_int8
    best, float32 = fastest(int8=is_int8), fastest(int8=False) if is_int8 else None
    own = times[row]
    low, median, high = quartiles(own)
    return RowTiming(
        ms=1000 * median,
        ms_low=1000 * low,
        ms_high=1000 * high,
        frames_per_second=row.batch / median,
        rounds=len(own),
        calls=sum(map(len, own)),
        speedup=None if same is None else paired_ratio(same, own),
        speedup_over_best=None if best is None else paired_ratio(best, own),
        speedup_over_float32=None if float32 is None else paired_ratio(float32, own),
    )


def paired_ratio(numerator: Rounds, denominator: Rounds) -> Ratio:
    """How many times longer one took than the other, within every round: slow rounds cancel."""
    pairs = zip(numerator, denominator, strict=True)
    low, median, high = quartiles([[float(np.median(above) / np.median(below)) for above, below in pairs]])
    return Ratio(median=median, low=low, high=high)


def quartiles(rounds: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """First quartile, median and third quartile over all rounds."""
    low, median, high = np.percentile(np.concatenate(rounds), (25, 50, 75))
    return float(low), float(median), float(high)
