"""Times that can be compared: all programs in turn, round after round, so that noise affects all alike."""

import gc
import math
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from strucspars.bench.results import Ratio, RowTiming
from strucspars.core.checks import checked_at_least, is_number

Key = TypeVar("Key", bound=Hashable)
Clock = Callable[[], float]


@dataclass(frozen=True, kw_only=True)
class TimingRules:
    """How long and how often to measure.

    Attributes:
        seconds: for everything together, warm-up included; exceeded where fewer than `min_rounds` would fit.
        visit_seconds: how long to stay with a program in a round; at least one call.
        max_calls: most timed calls of one visit.
        warmup_calls: untimed calls of every program before the first round.
        min_rounds: fewest rounds, for a spread.
        max_rounds: most rounds.
    """

    seconds: float = 90.0
    visit_seconds: float = 0.25
    max_calls: int = 20
    warmup_calls: int = 3
    min_rounds: int = 3
    max_rounds: int = 50

    def __post_init__(self) -> None:
        for name in ("seconds", "visit_seconds"):
            value = getattr(self, name)
            if not is_number(value) or not 0 < value < math.inf:
                raise ValueError(f"{name} must be a positive number of seconds, got {value!r}")
        for name in ("max_calls", "warmup_calls", "min_rounds"):
            checked_at_least(name, getattr(self, name), 1)
        checked_at_least("max_rounds", self.max_rounds, self.min_rounds)


@dataclass(frozen=True)
class Samples:
    """Seconds of every timed call of one program, by round."""

    rounds: tuple[tuple[float, ...], ...]

    @property
    def calls(self) -> int:
        """How many calls were timed."""
        return sum(map(len, self.rounds))

    @property
    def median(self) -> float:
        """Over all calls."""
        return float(np.median(self._all))

    @property
    def quartiles(self) -> tuple[float, float]:
        """First and third, over all calls."""
        low, high = np.percentile(self._all, (25, 75))
        return float(low), float(high)

    @property
    def round_medians(self) -> tuple[float, ...]:
        """One per round, to compare with those of other programs in the same round."""
        return tuple(float(np.median(calls)) for calls in self.rounds)

    @property
    def _all(self) -> list[float]:
        return [seconds for calls in self.rounds for seconds in calls]


def interleaved_times(
    programs: Mapping[Key, Callable[[], object]],
    rules: TimingRules,
    *,
    clock: Clock = time.perf_counter,
    on_round: Callable[[int, float], None] = lambda rounds, elapsed: None,
) -> dict[Key, Samples]:
    """Time programs in turn; every second round goes backwards, so that none always follows the same neighbour.

    Args:
        programs: what to call, by any key.
        rules: how long and how often.
        clock: returns seconds.
        on_round: called after every round with their number and the seconds since the start.
    """
    started = clock()
    with _without_garbage_collection():
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
    return {key: Samples(tuple(times)) for key, times in rounds.items()}


def _calls_per_visit(program: Callable[[], object], rules: TimingRules, clock: Clock) -> int:
    """Warm a program up; the number of its calls that fill a visit."""
    seconds = 0.0
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


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def paired_ratio(numerator: Samples, denominator: Samples) -> Ratio:
    """How many times longer one took than the other, within every round: slow rounds cancel."""
    ratios = [above / below for above, below in zip(numerator.round_medians, denominator.round_medians, strict=True)]
    low, median, high = np.percentile(ratios, (25, 50, 75))
    return Ratio(median=float(median), low=float(low), high=float(high))


def row_timing(
    samples: Samples,
    *,
    batch: int,
    dense: Samples | None,
    best_dense: Samples | None,
) -> RowTiming:
    """The numbers of one row.

    Args:
        samples: seconds for the whole batch.
        batch: its images.
        dense: of the same runtime; None where it has no times.
        best_dense: of the fastest runtime.
    """
    low, high = samples.quartiles
    return RowTiming(
        ms=1000 * samples.median,
        ms_low=1000 * low,
        ms_high=1000 * high,
        frames_per_second=batch / samples.median,
        rounds=len(samples.rounds),
        calls=samples.calls,
        speedup=None if dense is None else paired_ratio(dense, samples),
        speedup_over_best=None if best_dense is None else paired_ratio(best_dense, samples),
    )
