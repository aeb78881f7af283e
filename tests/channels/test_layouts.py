import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from strucspars.channels.orders import Layout, OrderClasses, stored_order

WIDTHS = st.lists(st.integers(1, 4), min_size=1, max_size=4)


def side_by_side(classes: OrderClasses, widths: list[int]) -> Layout:
    """A layout of a new class per width."""
    return Layout(tuple(classes.new(width, 1).classes[0] for width in widths), 1)


def random_orders(classes: OrderClasses, seed: int) -> dict[int, np.ndarray]:
    generator = np.random.default_rng(seed)
    return {root: generator.permutation(classes.width(root)) for root in classes.all_roots()}


def test_classes_that_do_not_line_up_are_divided_when_joined_and_not_pinned() -> None:
    classes = OrderClasses()
    whole, both = classes.new(8, 1), side_by_side(classes, [5, 3])
    classes.join(whole, both)
    assert classes.roots(whole) == classes.roots(both)
    assert classes.widths(whole) == (5, 3)
    assert not any(classes.is_pinned(root) for root in classes.all_roots())


@given(WIDTHS, WIDTHS, st.integers(0, 100))
def test_joined_layouts_are_stored_in_one_order(widths: list[int], others: list[int], seed: int) -> None:
    classes = OrderClasses()
    one, other = side_by_side(classes, widths), side_by_side(classes, others)
    classes.join(one, other)
    orders = random_orders(classes, seed) if sum(widths) == sum(others) else {}
    if orders:
        np.testing.assert_array_equal(stored_order(one, classes, orders), stored_order(other, classes, orders))
    else:
        assert all(classes.is_pinned(root) for root in classes.all_roots())


@given(WIDTHS, st.permutations(range(4)), st.integers(0, 100))
def test_a_layout_can_be_joined_with_its_own_classes_in_another_sequence(
    widths: list[int], sequence: list[int], seed: int
) -> None:
    classes = OrderClasses()
    one = side_by_side(classes, widths)
    other = Layout(tuple(one.classes[place] for place in sequence if place < len(widths)), 1)
    classes.join(one, other)
    orders = random_orders(classes, seed)
    np.testing.assert_array_equal(stored_order(one, classes, orders), stored_order(other, classes, orders))


@given(WIDTHS, st.data())
def test_the_parts_of_a_divided_layout_are_the_pieces_of_its_order(widths: list[int], data: st.DataObject) -> None:
    classes = OrderClasses()
    layout = side_by_side(classes, widths)
    ends = sorted(data.draw(st.sets(st.integers(1, sum(widths)))) | {sum(widths)})
    sizes = np.diff([0, *ends]).tolist()
    parts = classes.divide(layout, sizes)
    orders = random_orders(classes, data.draw(st.integers(0, 100)))
    pieces = np.split(stored_order(layout, classes, orders), ends[:-1])
    for part, piece, end, size in zip(parts, pieces, ends, sizes, strict=True):
        np.testing.assert_array_equal(stored_order(part, classes, orders) + end - size, piece)


def test_a_pin_from_before_and_after_holds_for_all_parts() -> None:
    classes = OrderClasses()
    pinned_before, pinned_after = classes.new(6, 1, pinned="natural"), classes.new(6, 1)
    for layout in (pinned_before, pinned_after):
        classes.divide(layout, [2, 4])
    classes.pin(pinned_after, "natural")
    assert all(classes.is_pinned(root) for layout in (pinned_before, pinned_after) for root in classes.roots(layout))


def test_channels_that_are_counted_otherwise_are_pinned_when_joined() -> None:
    classes = OrderClasses()
    one, flattened = classes.new(4, 1), Layout(classes.new(2, 1).classes, 1, repeat=2)
    classes.join(one, flattened)
    assert all(classes.is_pinned(root) for root in classes.all_roots())
