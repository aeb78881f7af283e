"""Whether a difference is noise, against SciPy's t-test on the runs themselves."""

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.stats import ttest_ind

from strucspars.paper.noise import Sample, is_within_noise, noise_limit, sample_of

ACCURACIES = st.lists(st.floats(0.1, 0.99), min_size=2, max_size=12)


def sampled(values: list[float]) -> Sample:
    sample = sample_of(values)
    assert sample is not None
    return sample


@given(ACCURACIES, ACCURACIES)
def test_noise_is_what_not_both_t_tests_reject(ours: list[float], theirs: list[float]) -> None:
    # Where all runs of a side are alike, SciPy warns of cancellation.
    assume(all(max(side) - min(side) > 1e-6 for side in (ours, theirs)))
    p_value = max(float(ttest_ind(ours, theirs, equal_var=is_pooled).pvalue) for is_pooled in (True, False))
    assume(abs(p_value - 0.05) > 1e-9)
    assert is_within_noise(sampled(ours), sampled(theirs), test_images=10_000) == (p_value > 0.05)


def test_single_runs_are_judged_by_the_test_images() -> None:
    one, other = (Sample(mean=mean, deviation=None, count=1) for mean in (0.90, 0.92))
    assert noise_limit(one, other, test_images=10_000) == pytest.approx(1.95996 * math.sqrt(0.91 * 0.09 / 10_000), 1e-5)
    assert not is_within_noise(one, other, test_images=10_000)
    assert is_within_noise(one, other, test_images=500)


def test_a_single_run_is_no_surer_than_its_test_images_however_little_the_others_differ() -> None:
    one = Sample(mean=0.917, deviation=None, count=1)
    alike, unlike = (Sample(mean=0.914, deviation=deviation, count=10) for deviation in (0.0004, 0.01))
    by_images = 1.95996 * math.sqrt(0.9155 * 0.0845 / 10_000)
    assert noise_limit(one, alike, test_images=10_000) == pytest.approx(by_images, 1e-5)
    assert noise_limit(alike, one, test_images=10_000) == noise_limit(one, alike, test_images=10_000)
    by_deviation = 2.26216 * 0.01 * math.sqrt(1.1)
    assert noise_limit(one, unlike, test_images=10_000) == pytest.approx(by_deviation, 1e-5)


def test_single_runs_on_unknown_images_are_noise_only_if_equal() -> None:
    one, other = (Sample(mean=mean, deviation=None, count=1) for mean in (0.90, 0.9001))
    assert is_within_noise(one, one, test_images=None)
    assert not is_within_noise(one, other, test_images=None)


def test_runs_that_are_all_alike_make_every_difference_count() -> None:
    one, other = (Sample(mean=mean, deviation=0.0, count=3) for mean in (0.90, 0.901))
    assert is_within_noise(one, one, test_images=10_000)
    assert not is_within_noise(one, other, test_images=10_000)
