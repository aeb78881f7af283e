"""Numbers over several runs, and the differences between them, as cells of a table."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A number over several runs.

    Attributes:
        mean: of them.
        deviation: of the sample; None where there is one run, or it is not known.
        count: number of runs.
    """

    mean: float
    deviation: float | None
    count: int


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A difference of two accuracies.

    Attributes:
        points: percent points.
        is_within_noise: whether chance explains it.
    """

    points: float
    is_within_noise: bool


def sample_of(values: Sequence[float]) -> Sample | None:
    """Mean and deviation; None of none.

    >>> sample_of([0.90, 0.92])
    Sample(mean=0.91, deviation=0.014142135623730963, count=2)
    """
    if not values:
        return None
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return Sample(mean=statistics.fmean(values), deviation=deviation, count=len(values))
