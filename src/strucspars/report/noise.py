"""When two accuracies differ by more than chance explains."""

import math

from scipy.special import ndtri, stdtrit

from strucspars.report.measured import Sample

# Of differences that are chance, so many are taken for more.
SIGNIFICANCE = 0.05
NOISE = (
    "Differences are in percent points. Noise: what a t-test at 5 % does not reject, with the deviations of both sides "
    "pooled (the paper's is of ten runs). A single run is no surer than its test images: p (1 - p) by their number is "
    "the least variance of a difference then."
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
    known = [(sample.deviation, sample.count - 1) for sample in (one, other) if sample.deviation is not None]
    freedom = sum(degrees for _, degrees in known)
    limits = []
    if freedom:
        variance = sum(degrees * deviation**2 for deviation, degrees in known) / freedom
        error = math.sqrt(variance * (1 / one.count + 1 / other.count))
        limits.append(float(stdtrit(freedom, 1 - SIGNIFICANCE / 2)) * error)
    if len(known) < 2:
        mean = (one.mean + other.mean) / 2
        variance = 0.0 if test_images is None else mean * (1 - mean) / test_images
        limits.append(float(ndtri(1 - SIGNIFICANCE / 2)) * math.sqrt(variance))
    return max(limits)


def is_within_noise(one: Sample, other: Sample, *, test_images: int | None) -> bool:
    """Whether two accuracies differ by no more than `NOISE` explains.

    >>> one, other = (Sample(mean=mean, deviation=0.002, count=3) for mean in (0.915, 0.917))
    >>> is_within_noise(one, other, test_images=10_000)
    True
    """
    # Rounding must not decide: equal to the limit is within.
    return abs(one.mean - other.mean) <= noise_limit(one, other, test_images=test_images) * (1 + 1e-9)
