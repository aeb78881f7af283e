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
    positions_by_group,
)
from strucspars.convert.folding.layouts import Layout, OrderClasses, stored_order
from strucspars.core.arrays import IntArray
from strucspars.core.permutation import inverse
from strucspars.measure.gathers import contiguous_runs

# Bounds the memory of comparing: every candidate has an entry for every value that a layer reads along the channels.
CANDIDATES_AT_ONCE = 64

# The second pass lets a class follow the neighbours that were decided after it; a third has not been seen to gain.
PASSES = 2

Cost = tuple[IntArray, IntArray, IntArray]


@dataclass(frozen=True, kw_only=True)
class GroupedLayer:
    """A grouped layer between two tensors: its groups, their layouts, and what a gather of either would copy."""

    grouping: Grouping
    inputs: Layout
    outputs: Layout
    in_bytes: int
    out_bytes: int

    @property
    def gather_inputs_first(self) -> bool:
        """Which side to gather where only the sequence of the groups differs: the smaller one."""
        return self.in_bytes < self.out_bytes


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
        gather_inputs_first=layer.gather_inputs_first,
    )


def _best_order(
    root: int, users: Sequence[GroupedLayer], classes: OrderClasses, orders: dict[int, IntArray]
) -> IntArray:
    def cheapest(candidates: Sequence[IntArray]) -> int:
        """Place of the first that costs least."""
        if len(candidates) == 1:
            return 0
        # Many at once: along a residual stream of many layers, each has wishes, and each is asked about all of them.
        costs = [
            gather_cost(users, classes, {**orders, root: np.stack(candidates[start : start + CANDIDATES_AT_ONCE])})
            for start in range(0, len(candidates), CANDIDATES_AT_ONCE)
        ]
        copied, copied_after, runs = (np.concatenate(parts) for parts in zip(*costs, strict=True))
        return int(np.lexsort((runs, copied_after, copied))[0])

    wishes = list(_wishes(root, users, classes, orders))
    candidates = [orders[root], np.arange(classes.width(root))]
    if wishes:
        first = wishes[cheapest([_sorted_by(wish) for wish in wishes])]
        candidates.append(_sorted_by(first))
        # One partition may lie inside the other: then there is an order that suits both.
        for second in wishes:
            candidates += [_sorted_by(first, second), _sorted_by(second, first)]
    return candidates[cheapest(candidates)]


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
            sequence = group_sequence(other_groups[other_order], otherwise=np.arange(layer.grouping.num_groups))
            yield inverse(sequence)[by_channel[:, 0]]


def _sorted_by(*keys: IntArray) -> IntArray:
    """Channels by the first key, among equals by the next, then as they come."""
    return np.lexsort(keys[::-1])


def gather_cost(layers: Sequence[GroupedLayer], classes: OrderClasses, orders: dict[int, IntArray]) -> Cost:
    """Bytes that the layers' gathers copy, those after a layer, and the number of runs they copy them in.

    A gather after a layer parts it from its activation, which runtimes would otherwise compute in passing. Where a
    class has several orders to choose from, `(..., channels)`, each of the three has an entry for every one.
    """
    copied = copied_after = runs = np.zeros((), dtype=np.int64)
    for layer in layers:
        in_orders, out_orders = (stored_order(side, classes, orders) for side in (layer.inputs, layer.outputs))
        reads, fills = positions_by_group(
            layer.grouping, in_orders, out_orders, gather_inputs_first=layer.gather_inputs_first
        )
        in_runs, out_runs = contiguous_runs(reads), contiguous_runs(fills)
        # One run is the order that is there already.
        in_is_gathered, out_is_gathered = in_runs > 1, out_runs > 1
        copied = copied + in_is_gathered * layer.in_bytes + out_is_gathered * layer.out_bytes
        copied_after = copied_after + out_is_gathered * layer.out_bytes
        runs = runs + in_is_gathered * in_runs + out_is_gathered * out_runs
    return copied, copied_after, runs
