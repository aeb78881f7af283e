"""Speed-ups."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strucspars.bench.results import Ratio
from strucspars.bench.timing import Samples, paired_ratio, row_timing

NOISE = st.lists(st.floats(0.01, 100), min_size=1, max_size=8)


@given(NOISE)
def test_what_slows_a_whole_round_down_does_not_change_the_ratio(noise: list[float]) -> None:
    dense = Samples(tuple((8.0 * slow,) for slow in noise))
    fast = Samples(tuple((2.0 * slow,) for slow in noise))
    ratio = paired_ratio(dense, fast)
    assert (ratio.median, ratio.low, ratio.high) == pytest.approx((4, 4, 4))


def test_the_spread_of_a_ratio_is_that_of_the_rounds() -> None:
    ratio = paired_ratio(Samples(((2.0,), (4.0,), (6.0,))), Samples(((1.0,), (1.0,), (1.0,))))
    assert ratio == Ratio(median=4.0, low=3.0, high=5.0)


def test_a_row_has_its_times_and_its_speedups() -> None:
    timing = row_timing(
        Samples(((0.020, 0.040), (0.030,))),
        batch=3,
        dense=Samples(((0.090,), (0.090,))),
        best_dense=Samples(((0.060,), (0.060,))),
    )
    assert (timing.ms, timing.ms_low, timing.ms_high) == pytest.approx((30, 25, 35))
    assert timing.frames_per_second == pytest.approx(100)
    assert (timing.rounds, timing.calls) == (2, 3)
    assert timing.speedup is not None
    assert timing.speedup.median == pytest.approx(3)
    assert timing.speedup_over_best is not None
    assert timing.speedup_over_best.median == pytest.approx(2)


def test_without_a_dense_time_nothing_is_compared() -> None:
    timing = row_timing(Samples(((1.0,),)), batch=1, dense=None, best_dense=None)
    assert timing.ms == 1000
    assert (timing.speedup, timing.speedup_over_best) == (None, None)
