"""When two accuracies differ by more than chance explains."""

import math
from collections.abc import Sequence

from scipy.special import stdtrit

from strucspars.paper.measured import Sample

# Of differences that are chance, so many are taken for more.
SIGNIFICANCE = 0.05
NOISE = (
    "Differences are in percent points. Noise: what t-tests at 5 % do not reject, both with the deviations of the two "
    "sides pooled and with each side's own (the paper's is of ten runs). A single run is no surer than its test "
    "images: p (1 - p) by their number is the least variance of a difference then."
)


def noise_limit(one: Sample, other: Sample, *, test_images: int | None) -> float:
    """The largest difference of two means that counts as noise; see `NOISE`.

    >>> one, other = (Sample(mean=mean, deviation=0.002, count=3) for mean in (0.915, 0.917))
    >>> round(noise_limit(one, other, test_images=10_000), 4)
    0.0045
    >>> same = Sample(mean=0.5, deviation=None, count=1)
    >>> round(noise_limit(same, same, test_images=10_000), 4)
    0.0098
    """
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
    """Likewise for sides of (deviation, count), each with its own: one that varies little says nothing of the other."""
    variances = [deviation**2 / count for deviation, count in samples]
    if not any(variances):
        return 0.0
    shares = [variance**2 / (count - 1) for variance, (_, count) in zip(variances, samples, strict=True)]
    return _t_limit(sum(variances), sum(variances) ** 2 / sum(shares))


def is_within_noise(one: Sample, other: Sample, *, test_images: int | None) -> bool:
    """Whether two accuracies differ by no more than `NOISE` explains.

    >>> one, other = (Sample(mean=mean, deviation=0.002, count=3) for mean in (0.915, 0.917))
    >>> is_within_noise(one, other, test_images=10_000)
    True
    """
    # Rounding must not decide: equal to the limit is within.
    return abs(one.mean - other.mean) <= noise_limit(one, other, test_images=test_images) * (1 + 1e-9)
