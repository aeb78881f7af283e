"""From seconds to what they are compared for: speed-up, efficiency, share of the gathers."""

import numpy as np

from strucspars.bench.results import Ratio, RowTiming
from strucspars.bench.timing import Samples


def paired_ratio(numerator: Samples, denominator: Samples) -> Ratio:
    """How many times longer one took than the other, within every round: what slows a whole round down cancels.

    >>> paired_ratio(Samples(((4.0,), (8.0,))), Samples(((2.0,), (4.0,))))
    Ratio(median=2.0, low=2.0, high=2.0)
    """
    ratios = [above / below for above, below in zip(numerator.round_medians, denominator.round_medians, strict=True)]
    low, median, high = np.percentile(ratios, (25, 50, 75))
    return Ratio(median=float(median), low=float(low), high=float(high))


def row_timing(
    samples: Samples,
    *,
    batch: int,
    operation_ratio: float,
    dense: Samples | None,
    best_dense: Samples | None,
    bound: Samples | None,
) -> RowTiming:
    """The numbers of one row.

    Args:
        samples: seconds for the whole batch.
        batch: its images.
        operation_ratio: MACs of the dense network by those of this one.
        dense: of the same runtime; None where it has no times.
        best_dense: of the fastest runtime.
        bound: of the same network without gathers, in the same runtime.
    """
    low, high = samples.quartiles
    speedup = None if dense is None else paired_ratio(dense, samples)
    return RowTiming(
        ms=1000 * samples.median,
        ms_low=1000 * low,
        ms_high=1000 * high,
        frames_per_second=batch / samples.median,
        rounds=len(samples.rounds),
        calls=samples.calls,
        speedup=speedup,
        speedup_over_best=None if best_dense is None else paired_ratio(best_dense, samples),
        efficiency=None if speedup is None else speedup.median / operation_ratio,
        gather_share=None if bound is None else 1 - paired_ratio(bound, samples).median,
    )
