import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strucspars.channels.orders import Grouping, group_sequence, placement
from strucspars.core.checks import IntArray
from strucspars.cost.gathers import contiguous_runs


def random_grouping(generator: np.random.Generator, groups: int, in_width: int, out_width: int) -> Grouping:
    return Grouping(
        in_groups=generator.permutation(np.arange(groups).repeat(in_width)),
        out_groups=generator.permutation(np.arange(groups).repeat(out_width)),
        num_groups=groups,
    )


def order_by(groups: IntArray, sequence: IntArray, generator: np.random.Generator) -> IntArray:
    """Group after group in the sequence, at random within each."""
    return np.concatenate([generator.permutation(np.flatnonzero(groups == group)) for group in sequence])


@given(st.integers(0, 10_000), st.integers(1, 5), st.integers(1, 4), st.integers(1, 4), st.booleans())
def test_between_any_orders_the_layer_sees_whole_groups_and_gathers_reach_the_wanted_orders(
    seed: int, groups: int, in_width: int, out_width: int, gather_inputs_first: bool
) -> None:
    generator = np.random.default_rng(seed)
    grouping = random_grouping(generator, groups, in_width, out_width)
    in_order, out_order = generator.permutation(groups * in_width), generator.permutation(groups * out_width)
    placed = placement(grouping, in_order, out_order, gather_inputs_first=gather_inputs_first)
    scattered = np.full(groups, -1)
    in_sequence = group_sequence(grouping.in_groups[placed.in_order], otherwise=scattered)
    assert (in_sequence >= 0).all()
    out_sequence = group_sequence(grouping.out_groups[placed.out_order], otherwise=scattered)
    np.testing.assert_array_equal(in_sequence, out_sequence)
    read = in_order if placed.in_gather is None else in_order[placed.in_gather]
    np.testing.assert_array_equal(read, placed.in_order)
    written = placed.out_order if placed.out_gather is None else placed.out_order[placed.out_gather]
    np.testing.assert_array_equal(written, out_order)


@given(st.integers(0, 10_000), st.integers(1, 5), st.integers(1, 4), st.integers(1, 4))
def test_orders_with_whole_groups_in_one_sequence_need_no_gather(
    seed: int, groups: int, in_width: int, out_width: int
) -> None:
    generator = np.random.default_rng(seed)
    grouping = random_grouping(generator, groups, in_width, out_width)
    sequence = generator.permutation(groups)
    in_order = order_by(grouping.in_groups, sequence, generator)
    out_order = order_by(grouping.out_groups, sequence, generator)
    placed = placement(grouping, in_order, out_order)
    assert placed.in_gather is None
    assert placed.out_gather is None


@pytest.mark.parametrize("gather_inputs_first", [True, False])
def test_another_sequence_of_groups_costs_one_gather_of_whole_groups(gather_inputs_first: bool) -> None:
    halves = np.array([0, 0, 0, 1, 1, 1])
    grouping = Grouping(in_groups=halves, out_groups=halves, num_groups=2)
    swapped = np.array([3, 4, 5, 0, 1, 2])
    placed = placement(grouping, np.arange(6), swapped, gather_inputs_first=gather_inputs_first)
    assert (placed.in_gather is not None, placed.out_gather is not None) == (
        gather_inputs_first,
        not gather_inputs_first,
    )
    gather = placed.in_gather if placed.in_gather is not None else placed.out_gather
    assert gather is not None
    assert contiguous_runs(gather) == 2


def test_a_gather_copies_neighbours_of_a_group_together() -> None:
    grouping = Grouping(in_groups=np.array([0, 0, 1, 1, 1, 0]), out_groups=np.array([0, 1]), num_groups=2)
    placed = placement(grouping, np.arange(6), np.arange(2))
    assert placed.in_gather is not None
    np.testing.assert_array_equal(placed.in_gather, [0, 1, 5, 2, 3, 4])
