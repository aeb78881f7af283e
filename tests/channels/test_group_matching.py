import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strucspars.channels.orders import GroupedLayer, OrderClasses, group_sequence, placement
from strucspars.core.checks import IntArray
from strucspars.core.permutation import inverse
from strucspars.cost.gathers import contiguous_runs


def places(groups: IntArray) -> IntArray:
    """The place of every channel where each group has its channels in natural order."""
    return inverse(np.argsort(groups, kind="stable"))


def grouped_layer(in_groups: IntArray, out_groups: IntArray, *, gather_inputs_first: bool = False) -> GroupedLayer:
    classes = OrderClasses()
    inputs, outputs = classes.new(len(in_groups), 1), classes.new(len(out_groups), 1)
    in_bytes, out_bytes = (1, 2) if gather_inputs_first else (1, 1)
    return GroupedLayer(
        num_groups=int(in_groups.max()) + 1,
        in_places=places(in_groups),
        out_places=places(out_groups),
        inputs=inputs,
        outputs=outputs,
        in_bytes=in_bytes,
        out_bytes=out_bytes,
    )


def random_layer(
    generator: np.random.Generator, groups: int, in_width: int, out_width: int, *, gather_inputs_first: bool = False
) -> GroupedLayer:
    in_groups, out_groups = (generator.permutation(np.arange(groups).repeat(width)) for width in (in_width, out_width))
    return grouped_layer(in_groups, out_groups, gather_inputs_first=gather_inputs_first)


def order_by(groups: IntArray, sequence: IntArray, generator: np.random.Generator) -> IntArray:
    """Group after group in the sequence, at random within each."""
    return np.concatenate([generator.permutation(np.flatnonzero(groups == group)) for group in sequence])


@given(st.integers(0, 10_000), st.integers(1, 5), st.integers(1, 4), st.integers(1, 4), st.booleans())
def test_between_any_orders_the_layer_sees_whole_groups_and_gathers_reach_the_wanted_orders(
    seed: int, groups: int, in_width: int, out_width: int, gather_inputs_first: bool
) -> None:
    generator = np.random.default_rng(seed)
    layer = random_layer(generator, groups, in_width, out_width, gather_inputs_first=gather_inputs_first)
    in_order, out_order = generator.permutation(groups * in_width), generator.permutation(groups * out_width)
    placed = placement(layer, in_order, out_order)
    scattered = np.full(groups, -1)
    in_sequence = group_sequence(layer.in_groups[placed.in_order], otherwise=scattered)
    assert (in_sequence >= 0).all()
    out_sequence = group_sequence(layer.out_groups[placed.out_order], otherwise=scattered)
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
    layer = random_layer(generator, groups, in_width, out_width)
    sequence = generator.permutation(groups)
    in_order = order_by(layer.in_groups, sequence, generator)
    out_order = order_by(layer.out_groups, sequence, generator)
    placed = placement(layer, in_order, out_order)
    assert placed.in_gather is None
    assert placed.out_gather is None


@pytest.mark.parametrize("gather_inputs_first", [True, False])
def test_another_sequence_of_groups_costs_one_gather_of_whole_groups(gather_inputs_first: bool) -> None:
    halves = np.array([0, 0, 0, 1, 1, 1])
    layer = grouped_layer(halves, halves, gather_inputs_first=gather_inputs_first)
    swapped = np.array([3, 4, 5, 0, 1, 2])
    placed = placement(layer, np.arange(6), swapped)
    assert (placed.in_gather is not None, placed.out_gather is not None) == (
        gather_inputs_first,
        not gather_inputs_first,
    )
    gather = placed.in_gather if placed.in_gather is not None else placed.out_gather
    assert gather is not None
    assert contiguous_runs(gather) == 2


def test_a_gather_copies_neighbours_of_a_group_together() -> None:
    layer = grouped_layer(np.array([0, 0, 1, 1, 1, 0]), np.array([0, 1]))
    placed = placement(layer, np.arange(6), np.arange(2))
    assert placed.in_gather is not None
    np.testing.assert_array_equal(placed.in_gather, [0, 1, 5, 2, 3, 4])
