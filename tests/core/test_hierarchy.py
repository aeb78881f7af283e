import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from strucspars.core.checks import FloatArray
from strucspars.core.hierarchy import (
    block_sums,
    connection_mask,
    group_penalty,
    max_group_level,
    num_groups,
    penalty_matrix,
)

widths = st.builds(lambda odd, twos: odd * 2**twos, st.integers(1, 5), st.integers(0, 4))


def slow_penalty(out_channels: int, in_channels: int, level: float, decay: float) -> FloatArray:
    """Appendix A, entry by entry: walk down the halvings until one separates output `j` from input `i`."""
    matrix = np.zeros((out_channels, in_channels))
    for j in range(out_channels):
        for i in range(in_channels):
            rows, columns, cost, halving = range(out_channels), range(in_channels), 1.0, 1
            while halving <= level and len(rows) % 2 == 0 and len(columns) % 2 == 0:
                row_half, column_half = len(rows) // 2, len(columns) // 2
                in_upper_rows, in_left_columns = j in rows[:row_half], i in columns[:column_half]
                if in_upper_rows != in_left_columns:
                    matrix[j, i] = cost
                    break
                rows = rows[:row_half] if in_upper_rows else rows[row_half:]
                columns = columns[:column_half] if in_left_columns else columns[column_half:]
                cost, halving = cost * decay, halving + 1
    return matrix


def slow_mask(out_channels: int, in_channels: int, groups: int) -> FloatArray:
    """Eq. (2): output `j` of group n sees the inputs of group n."""
    return np.array(
        [
            [j * groups // out_channels == i * groups // in_channels for i in range(in_channels)]
            for j in range(out_channels)
        ]
    )


@given(widths, widths)
def test_levels_are_those_of_appendix_a(out_channels: int, in_channels: int) -> None:
    level = max_group_level(out_channels, in_channels)
    groups = num_groups(level)
    assert math.gcd(out_channels, in_channels) % groups == 0
    assert math.gcd(out_channels, in_channels) // groups % 2 == 1


@given(widths, widths, st.integers(1, 100))
def test_a_minimum_width_allows_every_level_whose_groups_are_as_wide_and_level_one(
    out_channels: int, in_channels: int, width: int
) -> None:
    levels = range(1, max_group_level(out_channels, in_channels) + 1)
    wide = [level for level in levels if min(out_channels, in_channels) // num_groups(level) >= width]
    assert max_group_level(out_channels, in_channels, min_channels_per_group=width) == max(wide, default=1)


@given(widths, widths, st.sampled_from([1.0, 0.5, 0.3]), st.data())
def test_penalty_equals_the_papers_definition(
    out_channels: int, in_channels: int, decay: float, data: st.DataObject
) -> None:
    level = data.draw(st.none() | st.integers(1, max_group_level(out_channels, in_channels)))
    expected = slow_penalty(out_channels, in_channels, math.inf if level is None else level, decay)
    np.testing.assert_allclose(penalty_matrix(out_channels, in_channels, level, decay=decay), expected, rtol=1e-15)


@given(widths, widths, st.data())
def test_mask_equals_the_papers_definition(out_channels: int, in_channels: int, data: st.DataObject) -> None:
    level = data.draw(st.integers(1, max_group_level(out_channels, in_channels)))
    mask = connection_mask(out_channels, in_channels, level)
    assert mask.dtype == np.bool_
    assert_array_equal(mask, slow_mask(out_channels, in_channels, num_groups(level)))


@given(widths, widths, st.data())
def test_penalty_of_a_level_falls_outside_the_next_levels_groups(
    out_channels: int, in_channels: int, data: st.DataObject
) -> None:
    level = data.draw(st.integers(1, max_group_level(out_channels, in_channels)))
    next_level = min(level + 1, max_group_level(out_channels, in_channels))
    penalised = penalty_matrix(out_channels, in_channels, level) > 0
    assert_array_equal(penalised, ~connection_mask(out_channels, in_channels, next_level))


@given(widths, widths, st.data())
def test_nothing_inside_the_groups_of_the_largest_level_is_penalised(
    out_channels: int, in_channels: int, data: st.DataObject
) -> None:
    levels = st.integers(1, max_group_level(out_channels, in_channels))
    largest, level = data.draw(levels), data.draw(st.none() | levels)
    penalty = penalty_matrix(out_channels, in_channels, level, largest_level=largest)
    deepest = largest if level is None else min(level + 1, largest)
    assert_array_equal(penalty > 0, ~connection_mask(out_channels, in_channels, deepest))
    free = penalty_matrix(out_channels, in_channels, level)
    assert_array_equal(penalty[penalty > 0], free[penalty > 0])


def test_top_level_penalty_is_the_cost_matrix() -> None:
    for level in (4, 5):
        assert_array_equal(penalty_matrix(16, 48, level), penalty_matrix(16, 48))


@pytest.mark.parametrize(("out_channels", "in_channels"), [(3, 64), (64, 3), (1, 1), (7, 7), (1, 8)])
def test_an_odd_width_has_one_level_and_no_penalty(out_channels: int, in_channels: int) -> None:
    assert max_group_level(out_channels, in_channels) == 1
    assert not penalty_matrix(out_channels, in_channels).any()
    assert connection_mask(out_channels, in_channels, 1).all()


@given(widths, widths)
def test_block_sums_add_up_each_block(out_channels: int, in_channels: int) -> None:
    groups = num_groups(max_group_level(out_channels, in_channels))
    stack = np.random.default_rng(0).random((3, out_channels, in_channels))
    sums = block_sums(stack, groups)
    for a in range(groups):
        for b in range(groups):
            rows = slice(a * out_channels // groups, (a + 1) * out_channels // groups)
            columns = slice(b * in_channels // groups, (b + 1) * in_channels // groups)
            np.testing.assert_allclose(sums[:, a, b], stack[:, rows, columns].sum(axis=(1, 2)))


@pytest.mark.parametrize("level", [0, -1, 1.5, True, "2", None])
def test_a_bad_level_is_named(level: object) -> None:
    with pytest.raises(ValueError, match="group_level must be a whole number from 1 on"):
        num_groups(level)  # type: ignore[arg-type]  # the bad type is the point


def test_a_level_out_of_range_names_the_layer_and_its_limit() -> None:
    with pytest.raises(ValueError, match=r"1\.\.4 for a 24 x 8 layer \(at most 8 groups\), got 5"):
        connection_mask(24, 8, 5)
    with pytest.raises(ValueError, match=r"1\.\.4 .* got 9"):
        penalty_matrix(24, 8, 9)
    with pytest.raises(ValueError, match=r"largest_level must lie in 1\.\.4 for a 24 x 8 layer .* got 5"):
        penalty_matrix(24, 8, largest_level=5)


@pytest.mark.parametrize("width", [0, -4, 2.0, True])
def test_a_bad_width_is_named(width: object) -> None:
    with pytest.raises(ValueError, match="out_channels must be a whole number from 1 on"):
        max_group_level(width, 8)  # type: ignore[arg-type]  # the bad type is the point
    with pytest.raises(ValueError, match="in_channels must be a whole number from 1 on"):
        max_group_level(8, width)  # type: ignore[arg-type]  # the bad type is the point
    with pytest.raises(ValueError, match="min_channels_per_group must be a whole number from 1 on"):
        max_group_level(8, 8, min_channels_per_group=width)  # type: ignore[arg-type]  # the bad type is the point


def test_an_absurd_level_is_refused_before_it_fills_the_memory() -> None:
    for level in (65, 10**12, 10**30):
        with pytest.raises(ValueError, match=r"group_level must lie in 1\.\.4"):
            connection_mask(8, 8, level)


@pytest.mark.parametrize("decay", [0.0, -0.5, 1.1, math.nan, "0.5", None])
def test_a_bad_decay_is_named(decay: float) -> None:
    with pytest.raises(ValueError, match=r"decay must lie in \(0, 1\]"):
        group_penalty(2, decay=decay)
