"""Numbers over several runs, and when two accuracies differ by more than chance explains."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.special import stdtrit

# The share of purely random differences that the tests take for real ones.
SIGNIFICANCE = 0.05
NOISE = (
    "Differences are in percent points. Noise: not rejected by t-tests at 5 %, with the deviations of the two sides "
    "pooled and with each side's own (the paper's are of ten runs). Where a side has a single run, the variance is at "
    "least p (1 - p) divided by the number of test images."
)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A number over several runs; the deviation is None for one run, or where it is unknown."""

    mean: float
    deviation: float | None
    count: int


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A difference of two accuracies, in percent points, and whether chance explains it."""

    points: float
    is_within_noise: bool


def sample_of(values: Sequence[float]) -> Sample | None:
    """Mean and deviation; None without values."""
    if not values:
        return None
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return Sample(mean=statistics.fmean(values), deviation=deviation, count=len(values))


def difference(ours: Sample | None, other: Sample | None, *, test_images: int | None) -> Difference | None:
    """Our accuracy minus another one, both fractions; None where one is missing."""
    if ours is None or other is None:
        return None
    is_noise = is_within_noise(ours, other, test_images=test_images)
    return Difference(points=100 * (ours.mean - other.mean), is_within_noise=is_noise)


def is_within_noise(one: Sample, other: Sample, *, test_images: int | None) -> bool:
    """Whether two accuracies differ by no more than `NOISE` explains."""
    # A difference equal to the limit counts as within it; the margin absorbs rounding.
    return abs(one.mean - other.mean) <= noise_limit(one, other, test_images=test_images) * (1 + 1e-9)


def noise_limit(one: Sample, other: Sample, *, test_images: int | None) -> float:
    """The largest difference of two means that counts as noise; see `NOISE`."""
    known = [(sample.deviation, sample.count) for sample in (one, other) if sample.deviation is not None]
    limits = []
    if known:
        freedom = sum(count - 1 for _, count in known)
        variance = sum((count - 1) * deviation**2 for deviation, count in known) / freedom
        limits.append(_t_limit(variance * (1 / one.count + 1 / other.count), freedom))
    if len(known) == 2:
        limits.append(_welch_limit(known))
    else:
        mean = (one.mean + other.mean) / 2
        variance = 0.0 if test_images is None else mean * (1 - mean) / test_images
        limits.append(_t_limit(variance, math.inf))
    return max(limits)


def _t_limit(variance: float, freedom: float) -> float:
    """The largest difference of this variance that a t-test does not reject."""
    return float(stdtrit(freedom, 1 - SIGNIFICANCE / 2)) * math.sqrt(variance)


def _welch_limit(samples: Sequence[tuple[float, int]]) -> float:
    """The same by Welch's test, for the (deviation, count) of each side."""
    variances = [deviation**2 / count for deviation, count in samples]
    if not any(variances):
        return 0.0
    shares = [variance**2 / (count - 1) for variance, (_, count) in zip(variances, samples, strict=True)]
    return _t_limit(sum(variances), sum(variances) ** 2 / sum(shares))
