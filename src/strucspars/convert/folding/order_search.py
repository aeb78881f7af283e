"""The channel order of every class, chosen to leave the fewest bytes of gathers."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from strucspars.convert.folding.group_matching import (
    Grouping,
    Placement,
    group_sequence,
    placement,
)
from strucspars.convert.folding.layouts import Layout, OrderClasses, stored_order
from strucspars.core.arrays import IntArray
from strucspars.core.permutation import inverse
from strucspars.measure.gathers import contiguous_runs

# The second pass lets a class follow the neighbours that were decided after it; a third has not been seen to gain.
PASSES = 2

Cost = tuple[int, int, int]


@dataclass(frozen=True, kw_only=True)
class GroupedLayer:
    """A grouped layer between two tensors: its groups, their layouts, and what a gather of either would copy."""

    grouping: Grouping
    inputs: Layout
    outputs: Layout
    in_bytes: int
    out_bytes: int


def chosen_orders(layers: Sequence[GroupedLayer], classes: OrderClasses) -> dict[int, IntArray]:
    """An order for every class: natural where it is pinned or where only dense layers meet it.

    Class by class, the widest copies first, the cheapest order is taken that one of its layers, or two of them,
    would like best.
    """
    orders = {root: np.arange(classes.width(root)) for root in classes.all_roots()}
    users: dict[int, list[GroupedLayer]] = defaultdict(list)
    for layer in layers:
        for root in dict.fromkeys(classes.roots(layer.inputs) + classes.roots(layer.outputs)):
            users[root].append(layer)
    free = [root for root in users if not classes.is_pinned(root)]
    free.sort(key=lambda root: -sum(layer.in_bytes + layer.out_bytes for layer in users[root]))
    for _ in range(PASSES):
        for root in free:
            orders[root] = _best_order(root, users[root], classes, orders)
    return orders


def layer_placement(layer: GroupedLayer, classes: OrderClasses, orders: dict[int, IntArray]) -> Placement:
    """Where the layer gathers under these orders."""
    return placement(
        layer.grouping,
        stored_order(layer.inputs, classes, orders),
        stored_order(layer.outputs, classes, orders),
        gather_inputs_first=layer.in_bytes < layer.out_bytes,
    )


def _best_order(
    root: int, users: Sequence[GroupedLayer], classes: OrderClasses, orders: dict[int, IntArray]
) -> IntArray:
    wishes = list(_wishes(root, users, classes, orders))

    def cost(order: IntArray) -> Cost:
        return gather_cost(users, classes, {**orders, root: order})

    first = min(wishes, key=lambda wish: cost(_sorted_by(wish)), default=None)
    candidates = [orders[root], np.arange(classes.width(root))]
    if first is not None:
        candidates.append(_sorted_by(first))
        # One partition may lie inside the other: then there is an order that suits both.
        for second in wishes:
            candidates += [_sorted_by(first, second), _sorted_by(second, first)]
    return min(candidates, key=cost)


def _wishes(
    root: int, users: Sequence[GroupedLayer], classes: OrderClasses, orders: dict[int, IntArray]
) -> Iterator[IntArray]:
    """By channel of the class, the group that a layer would like to find it in, in the sequence it would like."""
    for layer in users:
        sides = (
            (layer.inputs, layer.grouping.in_groups, layer.outputs, layer.grouping.out_groups),
            (layer.outputs, layer.grouping.out_groups, layer.inputs, layer.grouping.in_groups),
        )
        for layout, groups, other_layout, other_groups in sides:
            if classes.roots(layout) != (root,):
                continue
            by_channel = groups.reshape(-1, layout.repeat)
            if (by_channel != by_channel[:, :1]).any():
                continue
            other_order = stored_order(other_layout, classes, orders)
            sequence = group_sequence(other_groups[other_order], layer.grouping.num_groups)
            yield by_channel[:, 0] if sequence is None else inverse(sequence)[by_channel[:, 0]]


def _sorted_by(*keys: IntArray) -> IntArray:
    """Channels by the first key, among equals by the next, then as they come."""
    return np.lexsort(keys[::-1])


def gather_cost(layers: Sequence[GroupedLayer], classes: OrderClasses, orders: dict[int, IntArray]) -> Cost:
    """Bytes that the layers' gathers copy, those after a layer, and the number of runs they copy them in.

    A gather after a layer parts it from its activation, which runtimes would otherwise compute in passing.
    """
    copied = copied_after = runs = 0
    for layer in layers:
        placed = layer_placement(layer, classes, orders)
        if placed.in_gather is not None:
            copied += layer.in_bytes
            runs += contiguous_runs(placed.in_gather)
        if placed.out_gather is not None:
            copied += layer.out_bytes
            copied_after += layer.out_bytes
            runs += contiguous_runs(placed.out_gather)
    return copied, copied_after, runs
