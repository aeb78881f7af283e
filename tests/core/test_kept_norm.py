import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.testing import assert_allclose, assert_array_equal

from strucspars.core.checks import FloatArray
from strucspars.core.hierarchy import connection_mask, max_group_level
from strucspars.core.importance import kept_norm_by_level, largest_group_level, level_keeping

matrices = st.tuples(st.sampled_from([1, 2, 3, 4, 8, 12]), st.sampled_from([1, 2, 4, 6, 16])).flatmap(
    lambda shape: arrays(np.float64, shape, elements=st.sampled_from([0.0, 1.0]) | st.floats(1e-3, 1e3))
)


@given(matrices)
def test_kept_norms_are_those_of_the_masks(importance: FloatArray) -> None:
    kept = kept_norm_by_level(importance)
    assert len(kept) == max_group_level(*importance.shape)
    total = importance.sum()
    out_channels, in_channels = importance.shape
    for level, fraction in enumerate(kept, start=1):
        mask = connection_mask(out_channels, in_channels, level)
        expected = (importance * mask).sum() / total if total > 0 else 1.0
        assert_allclose(fraction, expected, atol=1e-12)


@given(matrices)
def test_kept_norms_start_at_one_and_never_rise(importance: FloatArray) -> None:
    kept = kept_norm_by_level(importance)
    assert kept[0] == 1.0
    assert (np.diff(kept) <= 0).all()
    assert kept[-1] >= 0.0


@given(matrices, st.floats(0, 1))
def test_the_largest_level_satisfies_the_papers_equation(importance: FloatArray, threshold: float) -> None:
    kept = kept_norm_by_level(importance)
    level = largest_group_level(importance, min_kept_norm=threshold)
    satisfying = [candidate for candidate in range(1, len(kept) + 1) if kept[candidate - 1] >= threshold]
    assert level == max(satisfying)


@given(matrices, st.floats(0, 1), st.integers(1, 20))
def test_a_minimum_width_lowers_the_level_only_as_far_as_the_width_asks(
    importance: FloatArray, threshold: float, width: int
) -> None:
    level = largest_group_level(importance, threshold, min_channels_per_group=width)
    free = largest_group_level(importance, threshold)
    assert level == min(free, max_group_level(*importance.shape, min_channels_per_group=width))


@pytest.mark.parametrize("lost", range(1, 30))
def test_a_level_that_keeps_exactly_the_threshold_is_taken(lost: int) -> None:
    importance = [[1.0, lost], [0.0, 0.0]]
    assert largest_group_level(importance, min_kept_norm=1 / (1 + lost)) == 2


@pytest.mark.parametrize("level", [1, 2, 3, 4, 5])
def test_exactly_grouped_weights_keep_everything_even_at_threshold_one(level: int) -> None:
    grouped = np.random.default_rng(level).random((48, 16)) * connection_mask(48, 16, level)
    assert_array_equal(kept_norm_by_level(grouped)[:level], np.ones(level))
    assert largest_group_level(grouped, min_kept_norm=1.0) == level


def test_the_top_level_is_reached() -> None:
    assert largest_group_level(np.eye(64)) == 7


def test_an_all_zero_layer_is_at_the_top_level() -> None:
    assert largest_group_level(np.zeros((8, 16))) == 4
    assert_array_equal(kept_norm_by_level(np.zeros((8, 16))), np.ones(4))


def test_an_odd_layer_is_at_level_one() -> None:
    assert largest_group_level(np.ones((7, 64))) == 1


@pytest.mark.parametrize("threshold", [-0.1, 1.1, math.nan, "0.9", None])
def test_a_bad_threshold_is_named(threshold: float) -> None:
    with pytest.raises(ValueError, match=r"min_kept_norm must lie in \[0, 1\]"):
        level_keeping([1.0], threshold)


def test_a_bad_matrix_is_named() -> None:
    with pytest.raises(ValueError, match="permuted_importance must not be negative"):
        kept_norm_by_level([[1.0, -1.0]])


def test_rounding_makes_no_kept_norm_rise_and_takes_none_from_grouped_weights() -> None:
    # In about a third and a fifth of these the sums alone would.
    for seed in range(100):
        grouped = np.random.default_rng(seed).random((48, 16)) * connection_mask(48, 16, 5)
        assert_array_equal(kept_norm_by_level(grouped), np.ones(5))
        assert largest_group_level(grouped, min_kept_norm=1.0) == 5
        grouped[0, -1] = 1e-20  # outside the groups, and too small to be seen in any sum
        assert (np.diff(kept_norm_by_level(grouped)) <= 0).all()
