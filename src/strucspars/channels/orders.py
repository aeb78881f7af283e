"""Classes of tensors whose channels share an order, and the order of each that leaves the fewest bytes of gathers."""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from strucspars.core.checks import IntArray
from strucspars.core.permutation import inverse
from strucspars.cost.gathers import contiguous_runs

UNLIKE = "they are combined with channels that are counted in another way"


@dataclass(frozen=True)
class Layout:
    """The channels of a tensor along one of its axes, several classes after a concatenation.

    After flattening, `repeat` neighbouring entries belong to one channel.
    """

    classes: tuple[int, ...]
    axis: int
    repeat: int = 1


@dataclass
class OrderClasses:
    """Order classes that can be joined, divided, or pinned to the natural order.

    Why a class is pinned, and why the number of its channels is held, is a text that is empty where it is not.
    """

    _parents: list[int] = field(default_factory=list)
    _widths: list[int] = field(default_factory=list)
    _pinned: list[str] = field(default_factory=list)
    _held: list[str] = field(default_factory=list)
    _parts: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def new(self, width: int, axis: int, *, pinned: str = "", held: str = "") -> Layout:
        """Channels of a class of their own."""
        self._parents.append(len(self._parents))
        self._widths.append(width)
        self._pinned.append(pinned)
        self._held.append(held)
        return Layout((len(self._parents) - 1,), axis)

    def root(self, name: int) -> int:
        """The name that a class shares with those joined to it."""
        while self._parents[name] != name:
            name = self._parents[name]
        return name

    def roots(self, layout: Layout) -> tuple[int, ...]:
        """The classes of a layout, by their shared names; parts in place of those that have been divided."""
        return tuple(part for name in layout.classes for part in self._undivided(name))

    def width(self, name: int) -> int:
        """Number of channels of a class."""
        return self._widths[name]

    def widths(self, layout: Layout) -> tuple[int, ...]:
        """Number of channels of every class of a layout."""
        return tuple(self.width(root) for root in self.roots(layout))

    def is_pinned(self, name: int) -> bool:
        """Whether the class must stay in the natural order."""
        return bool(self._pinned[self.root(name)])

    def reason_to_keep_all(self, name: int) -> str:
        """Why no channel of the class can go; empty where some can."""
        return self._pinned[self.root(name)] or self._held[self.root(name)]

    def channels(self, layout: Layout) -> int:
        """Entries along the channel axis."""
        return layout.repeat * sum(self.width(name) for name in layout.classes)

    def pin(self, layout: Layout | None, reason: str) -> None:
        """Keep the channels in the natural order, all of them."""
        for root in () if layout is None else self.roots(layout):
            self._pinned[root] = self._pinned[root] or reason

    def hold(self, layout: Layout | None, reason: str) -> None:
        """Keep all channels, in any order."""
        for root in () if layout is None else self.roots(layout):
            self._held[root] = self._held[root] or reason

    def join(self, one: Layout, other: Layout) -> None:
        """Store both in one order, or both in the natural one where their channels are counted differently."""
        if one.repeat != other.repeat or self.channels(one) != self.channels(other):
            self.pin(one, UNLIKE)
            self.pin(other, UNLIKE)
            return
        # A class that is in both layouts, at different places, needs several passes.
        while self.widths(one) != self.widths(other):
            self.divide(one, self.widths(other))
            self.divide(other, self.widths(one))
        for root, other_root in zip(self.roots(one), self.roots(other), strict=True):
            root, other_root = self.root(root), self.root(other_root)
            self._pinned[root] = self._pinned[root] or self._pinned[other_root]
            self._held[root] = self._held[root] or self._held[other_root]
            self._parents[other_root] = root

    def divide(self, layout: Layout, widths: Sequence[int]) -> tuple[Layout, ...]:
        """Split a layout into parts of these numbers of channels; a class that would be in two parts is divided."""
        ends = list(itertools.accumulate(widths))
        for end in ends:
            self._end_class_at(layout, end)
        roots = list(zip(self.roots(layout), itertools.accumulate(self.widths(layout)), strict=True))
        return tuple(
            replace(layout, classes=tuple(root for root, root_end in roots if start < root_end <= end))
            for start, end in itertools.pairwise((0, *ends))
        )

    def all_roots(self) -> list[int]:
        """Every class once."""
        return [name for name, parent in enumerate(self._parents) if name == parent and name not in self._parts]

    def _undivided(self, name: int) -> Iterator[int]:
        root = self.root(name)
        if root not in self._parts:
            yield root
            return
        for part in self._parts[root]:
            yield from self._undivided(part)

    def _end_class_at(self, layout: Layout, channel: int) -> None:
        start = 0
        for root in self.roots(layout):
            width = self.width(root)
            if start < channel < start + width:
                sizes = (channel - start, start + width - channel)
                reasons = {"pinned": self._pinned[root], "held": self._held[root]}
                parts = [self.new(size, layout.axis, **reasons) for size in sizes]
                self._parts[root] = (*parts[0].classes, *parts[1].classes)
                return
            start += width


def stored_order(layout: Layout, classes: OrderClasses, orders: dict[int, IntArray]) -> IntArray:
    """The order of all entries along the channel axis, `order[position] = natural entry`, of every alternative."""
    parts = [orders[root] for root in classes.roots(layout)]
    alternatives = np.broadcast_shapes(*(part.shape[:-1] for part in parts))
    starts = itertools.accumulate((part.shape[-1] for part in parts[:-1]), initial=0)
    moved = [part + start for part, start in zip(parts, starts, strict=True)]
    order = np.concatenate([np.broadcast_to(part, (*alternatives, part.shape[-1])) for part in moved], axis=-1)
    return (order[..., None] * layout.repeat + np.arange(layout.repeat)).reshape(*alternatives, -1)


@dataclass(frozen=True, kw_only=True)
class GroupedLayer:
    """A grouped layer between two tensors: its own orders, and the bytes that gathers would copy.

    `in_places` and `out_places` hold the place of every channel in the layer's own orders, group after group.
    """

    num_groups: int
    in_places: IntArray
    out_places: IntArray
    inputs: Layout
    outputs: Layout
    in_bytes: int
    out_bytes: int

    @cached_property
    def in_groups(self) -> IntArray:
        """The group of every input channel."""
        return self.in_places // (len(self.in_places) // self.num_groups)

    @cached_property
    def out_groups(self) -> IntArray:
        """The group of every output channel."""
        return self.out_places // (len(self.out_places) // self.num_groups)

    @property
    def natural_sequence(self) -> IntArray:
        """The groups, each once."""
        return np.arange(self.num_groups)


@dataclass(frozen=True, kw_only=True)
class Placement:
    """How a grouped layer computes between two given orders: its own orders, and the gathers to and from them."""

    in_order: IntArray
    out_order: IntArray
    in_gather: IntArray | None
    out_gather: IntArray | None


def group_sequence(groups_in_order: IntArray, *, otherwise: IntArray) -> IntArray:
    """The sequence of groups in each order `(..., channels)` that keeps them together, `otherwise` in the others."""
    by_run = groups_in_order.reshape(*groups_in_order.shape[:-1], otherwise.shape[-1], -1)
    first = by_run[..., :1]
    are_together = (by_run == first).all(axis=(-2, -1))
    return np.where(are_together[..., None], first[..., 0], otherwise)


def positions_by_group(layer: GroupedLayer, in_orders: IntArray, out_orders: IntArray) -> tuple[IntArray, IntArray]:
    """The positions that a layer between two orders, or several pairs of them, reads and fills, group after group.

    The groups have one sequence on both sides. Where the orders allow it, positions are 0, 1, 2 and so on: no gather.
    Where only the sequence of the groups differs, the side with fewer bytes is gathered.
    """
    in_groups, out_groups = layer.in_groups[in_orders], layer.out_groups[out_orders]
    sequence = layer.natural_sequence
    # The last side that has a sequence decides for both.
    for groups in (in_groups, out_groups) if layer.in_bytes < layer.out_bytes else (out_groups, in_groups):
        sequence = group_sequence(groups, otherwise=sequence)
    return _sorted_positions(in_groups, sequence), _sorted_positions(out_groups, sequence)


def placement(layer: GroupedLayer, in_order: IntArray, out_order: IntArray) -> Placement:
    """Place a layer between two orders with as few gathers as they allow."""
    reads, fills = positions_by_group(layer, in_order, out_order)
    return Placement(
        in_order=in_order[reads],
        out_order=out_order[fills],
        in_gather=None if contiguous_runs(reads) == 1 else reads,
        out_gather=None if contiguous_runs(fills) == 1 else inverse(fills),
    )


def _sorted_positions(groups_in_order: IntArray, sequence: IntArray) -> IntArray:
    """Positions group after group; rising within a group, so that neighbours are copied together."""
    groups = np.broadcast_to(groups_in_order, (*sequence.shape[:-1], groups_in_order.shape[-1]))
    # In the smallest type that holds it: a stable sort of short numbers is several times faster.
    rank = np.argsort(sequence, axis=-1).astype(np.min_scalar_type(sequence.shape[-1]))
    return np.argsort(np.take_along_axis(rank, groups, axis=-1), axis=-1, kind="stable")


# Bounds the memory of comparing candidates: each has an entry for every channel that a layer reads.
CANDIDATES_AT_ONCE = 64

# The second pass lets a class follow neighbours that were decided after it; a third never lowered the cost.
PASSES = 2

# Pieces of one channel are no structure to keep.
SHORTEST_PIECE = 2

Cost = tuple[IntArray, IntArray, IntArray]


def chosen_orders(layers: Sequence[GroupedLayer], classes: OrderClasses) -> dict[int, IntArray]:
    """An order for every class: natural where it is pinned or where only dense layers meet it.

    Every class starts in an order that its layers share. Then classes with the largest copies come first; each takes
    the cheapest order that one or two of its layers prefer. Those that share one come last: the others can suit them.
    """
    starts, shared = _starts(layers, classes)
    orders = dict(starts)
    users: dict[int, list[GroupedLayer]] = defaultdict(list)
    for layer in layers:
        for root in dict.fromkeys(classes.roots(layer.inputs) + classes.roots(layer.outputs)):
            users[root].append(layer)
    free = [root for root in users if not classes.is_pinned(root)]
    free.sort(key=lambda root: (root in shared, -sum(layer.in_bytes + layer.out_bytes for layer in users[root])))
    for _ in range(PASSES):
        for root in free:
            orders[root] = _best_order(root, users[root], classes, orders, starts[root])
    return orders


def _starts(layers: Sequence[GroupedLayer], classes: OrderClasses) -> tuple[dict[int, IntArray], set[int]]:
    """For every class, the order that its layers share, or of which they move whole pieces; else the natural one.

    Also the classes with an order that is the same for all its layers. A class that only one layer sees, by itself,
    needs no start: it can follow the layer.
    """
    places: dict[int, list[IntArray]] = defaultdict(list)
    parts: set[int] = set()
    for layer in layers:
        for layout, own_places in ((layer.inputs, layer.in_places), (layer.outputs, layer.out_places)):
            # A channel that is a run of entries has several places.
            if layout.repeat == 1:
                roots, ends = classes.roots(layout), np.cumsum(classes.widths(layout))
                parts.update(roots if len(roots) > 1 else ())
                for root, part in zip(roots, np.split(own_places, ends[:-1]), strict=True):
                    places[root].append(part)
    starts, shared = {root: np.arange(classes.width(root)) for root in classes.all_roots()}, set()
    for root, (first, *others) in places.items():
        others = others or [first] * (root in parts)
        if others and not classes.is_pinned(root):
            order = np.argsort(first)
            runs = contiguous_runs(np.stack(others)[:, order])
            if runs.mean() * SHORTEST_PIECE <= len(order):
                starts[root] = order
                shared.update([root] if runs.max() == 1 else [])
    return starts, shared


def _best_order(
    root: int, users: Sequence[GroupedLayer], classes: OrderClasses, orders: dict[int, IntArray], start: IntArray
) -> IntArray:
    def cheapest(candidates: Sequence[IntArray]) -> int:
        """Place of the first that costs least."""
        if len(candidates) == 1:
            return 0
        # Many at once: along a residual stream every layer has preferences, and a cost for each of them.
        costs = [
            gather_cost(users, classes, {**orders, root: np.stack(candidates[first : first + CANDIDATES_AT_ONCE])})
            for first in range(0, len(candidates), CANDIDATES_AT_ONCE)
        ]
        copied, copied_after, runs = (np.concatenate(parts) for parts in zip(*costs, strict=True))
        return int(np.lexsort((runs, copied_after, copied))[0])

    preferences = list(_preferred(root, users, classes, orders))
    candidates = [orders[root], start]
    if preferences:
        first = preferences[cheapest([_sorted_by(start, preference) for preference in preferences])]
        candidates.append(_sorted_by(start, first))
        # Where one partition refines the other, an order suits both.
        for second in preferences:
            candidates += [_sorted_by(start, first, second), _sorted_by(start, second, first)]
    return candidates[cheapest(candidates)]


def _preferred(
    root: int, users: Sequence[GroupedLayer], classes: OrderClasses, orders: dict[int, IntArray]
) -> Iterator[IntArray]:
    """For each side of a layer that meets the class: the place of every channel's group in the sequence it prefers."""
    for layer in users:
        sides = (
            (layer.inputs, layer.in_groups, layer.outputs, layer.out_groups),
            (layer.outputs, layer.out_groups, layer.inputs, layer.in_groups),
        )
        for layout, groups, other_layout, other_groups in sides:
            if classes.roots(layout) != (root,):
                continue
            by_channel = groups.reshape(-1, layout.repeat)
            if (by_channel != by_channel[:, :1]).any():
                continue
            other_order = stored_order(other_layout, classes, orders)
            sequence = group_sequence(other_groups[other_order], otherwise=layer.natural_sequence)
            yield inverse(sequence)[by_channel[:, 0]]


def _sorted_by(start: IntArray, *keys: IntArray) -> IntArray:
    """Channels by the first key, among equals by the next, then as they start."""
    return start[np.lexsort([key[start] for key in keys[::-1]])]


def gather_cost(layers: Sequence[GroupedLayer], classes: OrderClasses, orders: dict[int, IntArray]) -> Cost:
    """Bytes that the layers' gathers copy, those after a layer, and the number of runs they copy them in.

    A gather after a layer separates it from its activation, which runtimes could fuse otherwise. With alternative
    orders of a class, `(..., channels)`, each of the three has an entry for every alternative.
    """
    copied = copied_after = runs = np.zeros((), dtype=np.int64)
    for layer in layers:
        in_orders, out_orders = (stored_order(side, classes, orders) for side in (layer.inputs, layer.outputs))
        reads, fills = positions_by_group(layer, in_orders, out_orders)
        in_runs, out_runs = contiguous_runs(reads), contiguous_runs(fills)
        # A single run is the existing order.
        in_is_gathered, out_is_gathered = in_runs > 1, out_runs > 1
        copied = copied + in_is_gathered * layer.in_bytes + out_is_gathered * layer.out_bytes
        copied_after = copied_after + out_is_gathered * layer.out_bytes
        runs = runs + in_is_gathered * in_runs + out_is_gathered * out_runs
    return copied, copied_after, runs
