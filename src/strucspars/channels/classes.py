"""Classes of tensors whose channels must be stored in one order."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from strucspars.core.checks import IntArray


@dataclass(frozen=True)
class Layout:
    """The channels of a tensor, as entries along one of its axes.

    Attributes:
        classes: the order classes along the channel axis, one after the other: several after a concatenation.
        axis: the channel axis, counted from the front.
        repeat: how many neighbouring entries belong to one channel: the positions, after flattening.
    """

    classes: tuple[int, ...]
    axis: int
    repeat: int = 1


@dataclass
class OrderClasses:
    """Order classes that can be joined, divided, or pinned to the natural order."""

    _parents: list[int] = field(default_factory=list)
    _widths: list[int] = field(default_factory=list)
    _pinned: list[bool] = field(default_factory=list)
    _parts: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def new(self, width: int, axis: int, *, pinned: bool = False) -> Layout:
        """Channels of a class of their own."""
        self._parents.append(len(self._parents))
        self._widths.append(width)
        self._pinned.append(pinned)
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
        return self._pinned[self.root(name)]

    def channels(self, layout: Layout) -> int:
        """Entries along the channel axis."""
        return layout.repeat * sum(self.width(name) for name in layout.classes)

    def pin(self, layout: Layout | None) -> None:
        """Keep the channels in the natural order."""
        for root in () if layout is None else self.roots(layout):
            self._pinned[root] = True

    def join(self, one: Layout, other: Layout) -> None:
        """Store both in one order, or both in the natural one where their channels are counted differently.

        A class is divided where one of the other layout ends.
        """
        if one.repeat != other.repeat or self.channels(one) != self.channels(other):
            self.pin(one)
            self.pin(other)
            return
        # A class that is in both layouts, at different places, needs several passes.
        while self.widths(one) != self.widths(other):
            self.divide(one, self.widths(other))
            self.divide(other, self.widths(one))
        for root, other_root in zip(self.roots(one), self.roots(other), strict=True):
            root, other_root = self.root(root), self.root(other_root)
            self._pinned[root] = self._pinned[root] or self._pinned[other_root]
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
                parts = [self.new(size, layout.axis, pinned=self._pinned[root]) for size in sizes]
                self._parts[root] = (*parts[0].classes, *parts[1].classes)
                return
            start += width


def stored_order(layout: Layout, classes: OrderClasses, orders: dict[int, IntArray]) -> IntArray:
    """The order of all entries along the channel axis: `order[position] = natural entry`.

    Classes may have several alternative orders, `(..., channels)`; the layout has as many then.
    """
    parts = [orders[root] for root in classes.roots(layout)]
    alternatives = np.broadcast_shapes(*(part.shape[:-1] for part in parts))
    starts = itertools.accumulate((part.shape[-1] for part in parts[:-1]), initial=0)
    moved = [part + start for part, start in zip(parts, starts, strict=True)]
    order = np.concatenate([np.broadcast_to(part, (*alternatives, part.shape[-1])) for part in moved], axis=-1)
    return (order[..., None] * layout.repeat + np.arange(layout.repeat)).reshape(*alternatives, -1)
