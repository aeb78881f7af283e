import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strucspars.channels import orders as order_search
from strucspars.channels.orders import (
    GroupedLayer,
    Layout,
    OrderClasses,
    Placement,
    chosen_orders,
    gather_cost,
    placement,
    stored_order,
)
from strucspars.core.checks import IntArray
from strucspars.core.permutation import inverse
from strucspars.cost.gathers import contiguous_runs

CHANNELS = 8


def places(groups: IntArray) -> IntArray:
    """The place of every channel where each group has its channels in natural order."""
    return inverse(np.argsort(groups, kind="stable"))


def layer(
    inputs: Layout, outputs: Layout, in_groups: IntArray, out_groups: IntArray, *, in_bytes: int = 1, out_bytes: int = 1
) -> GroupedLayer:
    return GroupedLayer(
        num_groups=int(in_groups.max()) + 1,
        in_places=places(in_groups),
        out_places=places(out_groups),
        inputs=inputs,
        outputs=outputs,
        in_bytes=in_bytes,
        out_bytes=out_bytes,
    )


def placed_in(one: GroupedLayer, classes: OrderClasses, orders: dict[int, IntArray]) -> Placement:
    return placement(one, *(stored_order(side, classes, orders) for side in (one.inputs, one.outputs)))


def gathered_sides(layers: list[GroupedLayer], classes: OrderClasses) -> list[tuple[bool, bool]]:
    orders = chosen_orders(layers, classes)
    placed = [placed_in(one, classes, orders) for one in layers]
    return [(one.in_gather is not None, one.out_gather is not None) for one in placed]


def random_groups(groups: int, seed: int) -> IntArray:
    return np.random.default_rng(seed).permutation(np.arange(groups).repeat(CHANNELS // groups))


def test_a_layer_between_free_classes_needs_no_gather() -> None:
    classes = OrderClasses()
    one = layer(classes.new(CHANNELS, 1), classes.new(CHANNELS, 1), random_groups(4, 0), random_groups(4, 1))
    assert gathered_sides([one], classes) == [(False, False)]


def test_a_pinned_side_keeps_its_gather_and_the_natural_order() -> None:
    classes = OrderClasses()
    inputs, outputs = classes.new(CHANNELS, 1, pinned="natural"), classes.new(CHANNELS, 1)
    one = layer(inputs, outputs, random_groups(4, 0), random_groups(4, 1))
    assert gathered_sides([one], classes) == [(True, False)]
    np.testing.assert_array_equal(chosen_orders([one], classes)[inputs.classes[0]], np.arange(CHANNELS))


def chain(between_out: IntArray, between_in: IntArray) -> list[tuple[bool, bool]]:
    classes = OrderClasses()
    ends, middle = [classes.new(CHANNELS, 1) for _ in range(2)], classes.new(CHANNELS, 1)
    first = layer(ends[0], middle, random_groups(int(between_out.max()) + 1, 0), between_out)
    second = layer(middle, ends[1], between_in, random_groups(int(between_in.max()) + 1, 3))
    return gathered_sides([first, second], classes)


def test_two_layers_in_a_row_need_one_gather_unless_their_groups_agree() -> None:
    assert sum(map(sum, chain(random_groups(4, 1), random_groups(4, 2)))) == 1
    groups = random_groups(4, 1)
    assert sum(map(sum, chain(groups, groups))) == 0
    renumbered = np.array([2, 0, 3, 1])[groups]
    assert sum(map(sum, chain(groups, renumbered))) == 0


def test_groups_inside_those_of_the_neighbour_need_no_gather() -> None:
    fine = random_groups(4, 1)
    coarse = np.array([1, 0, 0, 1])[fine]
    assert sum(map(sum, chain(fine, coarse))) == 0
    assert sum(map(sum, chain(coarse, fine))) == 0


@given(st.integers(0, 1000), st.sampled_from([2, 4]), st.sampled_from([2, 4]))
def test_of_equal_copies_the_one_before_a_layer_stays(seed: int, first_groups: int, second_groups: int) -> None:
    (_, after_first), (_, after_second) = chain(
        random_groups(first_groups, seed), random_groups(second_groups, seed + 1)
    )
    assert not after_first
    assert not after_second


def test_the_larger_copy_is_the_one_to_go() -> None:
    classes = OrderClasses()
    middle = classes.new(CHANNELS, 1)
    small = layer(classes.new(CHANNELS, 1), middle, random_groups(2, 0), random_groups(2, 1), out_bytes=10)
    large = layer(middle, classes.new(CHANNELS, 1), random_groups(2, 2), random_groups(2, 3), in_bytes=40)
    assert gathered_sides([small, large], classes) == [(False, True), (False, False)]


@pytest.mark.parametrize(("in_bytes", "out_bytes", "sides"), [(1, 10, (True, False)), (10, 1, (False, True))])
def test_where_only_the_sequence_of_the_groups_differs_the_smaller_side_is_gathered(
    in_bytes: int, out_bytes: int, sides: tuple[bool, bool]
) -> None:
    classes = OrderClasses()
    inputs, outputs = (classes.new(CHANNELS, 1, pinned="natural") for _ in range(2))
    in_groups = np.arange(2).repeat(CHANNELS // 2)
    one = layer(inputs, outputs, in_groups, 1 - in_groups, in_bytes=in_bytes, out_bytes=out_bytes)
    assert gathered_sides([one], classes) == [sides]


def cost_alone(layers: list[GroupedLayer], classes: OrderClasses, orders: dict[int, IntArray]) -> tuple[int, int, int]:
    placed = [placed_in(one, classes, orders) for one in layers]
    in_gathers = [(one.in_gather, layer.in_bytes) for one, layer in zip(placed, layers, strict=True)]
    out_gathers = [(one.out_gather, layer.out_bytes) for one, layer in zip(placed, layers, strict=True)]
    before, after = (
        sum(nbytes for gather, nbytes in gathers if gather is not None) for gathers in (in_gathers, out_gathers)
    )
    runs = sum(int(contiguous_runs(gather)) for gather, _ in in_gathers + out_gathers if gather is not None)
    return before + after, after, runs


@given(st.integers(0, 10_000))
def test_several_orders_of_a_class_cost_together_what_each_costs_alone(seed: int) -> None:
    generator, classes = np.random.default_rng(seed), OrderClasses()
    one, other = classes.new(4, 1), classes.new(4, 1)
    beside, twice, flattened = Layout((0, 1), 1), Layout((0, 0), 1), Layout((0,), 1, repeat=2)
    layers = []
    for sides in ((one, other), (other, one), (one, one), (beside, other), (twice, one), (flattened, other)):
        in_groups, out_groups = (generator.permutation(np.arange(classes.channels(side)) % 2) for side in sides)
        in_bytes, out_bytes = (int(nbytes) for nbytes in generator.integers(1, 4, 2))
        layers.append(layer(*sides, in_groups, out_groups, in_bytes=in_bytes, out_bytes=out_bytes))
    candidates, other_order = np.stack([generator.permutation(4) for _ in range(5)]), generator.permutation(4)
    together = gather_cost(layers, classes, {0: candidates, 1: other_order})
    alone = [cost_alone(layers, classes, {0: candidate, 1: other_order}) for candidate in candidates]
    np.testing.assert_array_equal(np.transpose(together), alone)


@pytest.mark.parametrize("at_once", [1, 3])
def test_candidates_that_are_asked_about_in_parts_are_chosen_from_all(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def chosen() -> list[list[int]]:
        found = []
        for seed in range(10):
            classes = OrderClasses()
            stream = classes.new(CHANNELS, 1)
            layers = [
                layer(stream, stream, random_groups(groups, seed + place), random_groups(groups, seed + 10 * place))
                for place, groups in enumerate((2, 4, 2, 4))
            ]
            found += [order.tolist() for order in chosen_orders(layers, classes).values()]
        return found

    whole = chosen()
    monkeypatch.setattr(order_search, "CANDIDATES_AT_ONCE", at_once)
    assert chosen() == whole


def test_the_pin_of_one_class_holds_for_those_joined_with_it_before_and_after() -> None:
    classes = OrderClasses()
    first, second, third = (classes.new(4, 1) for _ in range(3))
    classes.join(first, second)
    classes.pin(second, "natural")
    classes.join(third, first)
    assert all(classes.is_pinned(layout.classes[0]) for layout in (first, second, third))


def test_the_order_of_a_flattened_concatenation_follows_its_parts() -> None:
    classes = OrderClasses()
    first, second = classes.new(2, 1), classes.new(2, 1)
    layout = Layout(first.classes + second.classes, 1, repeat=2)
    orders = {0: np.array([1, 0]), 1: np.array([0, 1])}
    np.testing.assert_array_equal(stored_order(layout, classes, orders), [2, 3, 0, 1, 4, 5, 6, 7])


def layer_of_orders(
    inputs: Layout, outputs: Layout, in_perm: IntArray, out_perm: IntArray, groups: int
) -> GroupedLayer:
    return GroupedLayer(
        num_groups=groups,
        in_places=inverse(in_perm),
        out_places=inverse(out_perm),
        inputs=inputs,
        outputs=outputs,
        in_bytes=4 * len(in_perm),
        out_bytes=4 * len(out_perm),
    )


@given(st.integers(0, 10_000), st.lists(st.sampled_from([1, 2, 4, 8]), min_size=4, max_size=4))
def test_layers_with_one_order_for_each_class_need_no_gather(seed: int, groups: list[int]) -> None:
    generator, classes = np.random.default_rng(seed), OrderClasses()
    stream, part = classes.new(CHANNELS, 1), classes.new(CHANNELS, 1)
    both = Layout(stream.classes + part.classes, 1)
    own = [generator.permutation(CHANNELS) for _ in range(2)]
    own_both = np.concatenate([own[0], own[1] + CHANNELS])
    sides = [(stream, own[0], part, own[1]), (both, own_both, stream, own[0]), (stream, own[0], stream, own[0])]
    # The same channels twice.
    sides.append((Layout(part.classes * 2, 1), np.concatenate([own[1], own[1] + CHANNELS]), both, own_both))
    layers = [
        layer_of_orders(inputs, outputs, in_perm, out_perm, number)
        for (inputs, in_perm, outputs, out_perm), number in zip(sides, groups, strict=True)
    ]
    assert not np.any(gathered_sides(layers, classes))


@given(st.integers(0, 10_000), st.sampled_from([2, 4, 8]))
def test_channels_that_one_layer_sees_beside_others_take_the_order_of_their_part(seed: int, groups: int) -> None:
    generator, classes = np.random.default_rng(seed), OrderClasses()
    parts = [classes.new(width, 1) for width in (1, 5, CHANNELS, 2)]
    orders = [generator.permutation(classes.channels(part)) for part in parts]
    in_perm = np.concatenate([order + start for order, start in zip(orders, (0, 1, 6, 6 + CHANNELS), strict=True)])
    both = Layout(tuple(name for part in parts for name in part.classes), 1)
    # As after a stem that stays dense.
    reader = layer_of_orders(both, classes.new(CHANNELS, 1), in_perm, generator.permutation(CHANNELS), groups)
    assert gathered_sides([reader], classes) == [(False, False)]


def gathers_of(placed: Placement) -> list[IntArray]:
    return [gather for gather in (placed.in_gather, placed.out_gather) if gather is not None]


def runs_of(gather: IntArray) -> list[int]:
    """The lengths of the runs that a gather copies."""
    return [len(run) for run in np.split(gather, np.flatnonzero(np.diff(gather) != 1) + 1)]


WIDTH = 32


def moved_in_pieces(order: IntArray, piece: int, generator: np.random.Generator) -> IntArray:
    return generator.permutation(order.reshape(-1, piece)).reshape(-1)


@given(st.integers(0, 10_000), *[st.sampled_from([2, 4, 8])] * 3)
def test_between_orders_that_differ_by_pieces_whole_pieces_are_copied(
    seed: int, piece: int, out_groups: int, in_groups: int
) -> None:
    generator, classes = np.random.default_rng(seed), OrderClasses()
    before, between, after = (classes.new(WIDTH, 1) for _ in range(3))
    order = generator.permutation(WIDTH)
    writer = layer_of_orders(before, between, generator.permutation(WIDTH), order, out_groups)
    in_perm = moved_in_pieces(order, piece, generator)
    reader = layer_of_orders(between, after, in_perm, generator.permutation(WIDTH), in_groups)
    orders = chosen_orders([writer, reader], classes)
    gathers = [gather for one in (writer, reader) for gather in gathers_of(placed_in(one, classes, orders))]
    assert all(min(runs_of(gather)) >= piece for gather in gathers)


@given(st.integers(0, 10_000), st.sampled_from([2, 4, 8]), st.sampled_from([2, 4]))
def test_pieces_of_several_classes_side_by_side_are_copied_whole(seed: int, piece: int, groups: int) -> None:
    generator, classes = np.random.default_rng(seed), OrderClasses()
    parts, own = [classes.new(WIDTH, 1) for _ in range(2)], [generator.permutation(WIDTH) for _ in range(2)]
    writers = [
        layer_of_orders(classes.new(WIDTH, 1), part, generator.permutation(WIDTH), order, groups)
        for part, order in zip(parts, own, strict=True)
    ]
    in_perm = moved_in_pieces(np.concatenate([own[0], own[1] + WIDTH]), piece, generator)
    both = Layout(parts[0].classes + parts[1].classes, 1)
    reader = layer_of_orders(both, classes.new(WIDTH, 1), in_perm, generator.permutation(WIDTH), groups)
    orders = chosen_orders([*writers, reader], classes)
    gathers = [gather for one in (*writers, reader) for gather in gathers_of(placed_in(one, classes, orders))]
    assert all(min(runs_of(gather)) >= piece for gather in gathers)


def shared_row(seed: int) -> tuple[list[GroupedLayer], OrderClasses]:
    """A stream and a narrow tensor that have one order each, and one shuffle on the way back to the stream."""
    generator, classes = np.random.default_rng(seed), OrderClasses()
    stream, narrow, inner = (classes.new(width, 1) for width in (2 * CHANNELS, CHANNELS, CHANNELS))
    on_stream, on_narrow = generator.permutation(2 * CHANNELS), generator.permutation(CHANNELS)
    written, read = (generator.permutation(CHANNELS) for _ in range(2))

    def between(
        inputs: Layout, outputs: Layout, in_places: IntArray, out_places: IntArray, groups: int
    ) -> GroupedLayer:
        return GroupedLayer(
            num_groups=groups,
            in_places=in_places,
            out_places=out_places,
            inputs=inputs,
            outputs=outputs,
            in_bytes=len(in_places),
            out_bytes=len(out_places),
        )

    reduce = between(stream, narrow, on_stream, on_narrow, 2)
    return [
        reduce,
        between(narrow, inner, on_narrow, written, CHANNELS),
        between(inner, stream, read, on_stream, CHANNELS),
    ], classes


@pytest.mark.parametrize("seed", range(4))
def test_a_layer_between_two_orders_that_are_shared_keeps_no_gather(seed: int) -> None:
    layers, classes = shared_row(seed)
    gathered = gathered_sides(layers, classes)
    assert gathered[0] == (False, False)
    assert sum(map(sum, gathered)) == 1
