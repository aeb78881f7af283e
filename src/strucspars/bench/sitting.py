"""One sitting: all forms of a network, in all runtimes, at one batch size and number of threads, checked and timed."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from strucspars.bench.networks import BenchNetwork, Form, ImageShape
from strucspars.bench.results import BenchRow, NetworkSize, sitting_words
from strucspars.bench.runtimes import GathersLeft, Images, InferenceForms, Program, Runtime, Target, torch_threads
from strucspars.bench.timing import Clock, Samples, TimingRules, interleaved_times, row_timing
from strucspars.convert.comparison import compare_outputs
from strucspars.export.program import first_line

# What is being done, and how much of it is done, from 0 to 1.
Observer = Callable[[str, float], None]


@dataclass(frozen=True, kw_only=True, eq=False)
class Contestant:
    """A network with all that is known of it before it is timed."""

    network: BenchNetwork
    forms: InferenceForms
    size: NetworkSize


@dataclass(frozen=True, kw_only=True)
class Sitting:
    """What is timed together.

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

    @property
    def words(self) -> str:
        """For progress."""
        return sitting_words(self.network, self.image_shape, batch=self.batch, threads=self.threads)


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """Who a time belongs to."""

    rate: float | None
    form: Form
    runtime: str
    images_per_call: int

    def other(self, form: Form) -> "_Entry":
        """Another form of the same network, run in the same way."""
        rate = None if form == "dense" else self.rate
        return _Entry(rate=rate, form=form, runtime=self.runtime, images_per_call=self.images_per_call)


@dataclass(frozen=True, kw_only=True)
class _Checked:
    """A program that may be timed, or the reason why not."""

    contestant: Contestant
    gathers: GathersLeft | None = None
    difference: float | None = None
    error: str = ""
    timed: Callable[[], object] | None = None


def sitting_rows(
    sitting: Sitting, contestants: Sequence[Contestant], rules: TimingRules, *, observer: Observer, clock: Clock
) -> list[BenchRow]:
    """Check every network in every runtime against PyTorch, time those that are right, and compare.

    Args:
        sitting: what to time.
        contestants: the forms of one network, the dense one among them.
        rules: how long.
        observer: told how far it is.
        clock: seconds.
    """
    images = np.random.default_rng(0).standard_normal((sitting.batch, *sitting.image_shape), dtype=np.float32)
    with torch_threads(sitting.threads):
        checked = dict(_checked_programs(sitting, contestants, images, observer))
        programs = {entry: program.timed for entry, program in checked.items() if program.timed is not None}
        samples = interleaved_times(
            programs,
            rules,
            clock=clock,
            on_round=lambda number, elapsed: observer(
                f"{sitting.words}: timing {len(programs)} programs, round {number}", min(1.0, elapsed / rules.seconds)
            ),
        )
    return [_row(sitting, entry, program, samples) for entry, program in checked.items()]


def _checked_programs(
    sitting: Sitting, contestants: Sequence[Contestant], images: Images, observer: Observer
) -> Iterator[tuple[_Entry, _Checked]]:
    ways = sorted({sitting.batch, 1}, reverse=True)
    observer(f"{sitting.words}: what PyTorch computes", 0.0)
    expected = [_expected(contestant, images) for contestant in contestants]
    total = len(sitting.runtimes) * len(contestants) * len(ways)
    done = 0
    for runtime in sitting.runtimes:
        for contestant, outputs in zip(contestants, expected, strict=True):
            network = contestant.network
            for images_per_call in ways:
                words = network.form if network.rate is None else f"{network.form} {100 * network.rate:.3g}%"
                observer(f"{sitting.words}: preparing {words} for {runtime.title}", done / total)
                entry = _Entry(
                    rate=network.rate, form=network.form, runtime=runtime.name, images_per_call=images_per_call
                )
                target = Target(batch=images_per_call, threads=sitting.threads)
                yield entry, _checked_program(contestant, runtime, target, images, outputs)
                done += 1


def _checked_program(
    contestant: Contestant, runtime: Runtime, target: Target, images: Images, expected: Images
) -> _Checked:
    gathers = None
    try:
        program = runtime.prepare(contestant.forms, target)
        gathers = runtime.gathers(contestant.forms)
        outputs = _in_parts(program, images, target.batch)
    # Converters and runtimes fail in any way at all; one that does must not take the others' times with it.
    except Exception as error:
        reason = f"not timed: {type(error).__name__}: {first_line(error)}"
        return _Checked(contestant=contestant, gathers=gathers, error=reason)
    # Copies: runtimes give out memory that is theirs, and read-only.
    compared = compare_outputs(torch.tensor(outputs), torch.tensor(expected))
    return _Checked(
        contestant=contestant,
        gathers=gathers,
        difference=compared.relative_error,
        error=f"not timed: {compared.complaint}" if compared.complaint else "",
        timed=None if compared.complaint else partial(_in_parts, program, images, target.batch),
    )


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
    if not isinstance(outputs, torch.Tensor):
        raise ValueError(
            f"the network gives a {type(outputs).__name__}; networks are timed that give one tensor, by which runtimes "
            "are compared: wrap it in a module that returns one"
        )
    expected: Images = outputs.numpy()
    if not np.isfinite(expected).all():
        raise ValueError("the network gives NaN or infinity for random images, by which runtimes cannot be compared")
    return expected


def _row(sitting: Sitting, entry: _Entry, program: _Checked, samples: Mapping[_Entry, Samples]) -> BenchRow:
    timing = None
    if entry in samples:
        dense = [times for other, times in samples.items() if other.form == "dense"]
        timing = row_timing(
            samples[entry],
            batch=sitting.batch,
            operation_ratio=program.contestant.size.operation_ratio,
            dense=samples.get(entry.other("dense")),
            best_dense=min(dense, key=lambda times: times.median, default=None),
            bound=samples.get(entry.other("bound")) if entry.form == "compressed" else None,
        )
    return BenchRow(
        network=sitting.network,
        image_shape=sitting.image_shape,
        rate=entry.rate,
        form=entry.form,
        runtime=entry.runtime,
        batch=sitting.batch,
        images_per_call=entry.images_per_call,
        threads=sitting.threads,
        size=program.contestant.size,
        num_gathers=None if program.gathers is None else program.gathers.count,
        gathered_bytes=None if program.gathers is None else program.gathers.nbytes,
        difference=program.difference,
        error=program.error,
        timing=timing,
    )
