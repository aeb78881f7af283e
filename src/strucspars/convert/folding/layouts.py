"""Classes of tensors whose channels must be stored in one order."""

from dataclasses import dataclass, field, replace

import numpy as np

from strucspars.core.arrays import IntArray


@dataclass(frozen=True)
class Layout:
    """How the channels of a tensor are made up.

    Attributes:
        classes: the order classes along the channel axis, one after the other: several after a concatenation.
        axis: the channel axis, counted from the front.
        repeat: how many neighbouring entries belong to one channel: the positions, after flattening.
    """

    classes: tuple[int, ...]
    axis: int
    repeat: int = 1

    def at(self, axis: int) -> "Layout":
        """The same channels along another axis."""
        return replace(self, axis=axis)


@dataclass
class OrderClasses:
    """Order classes that can be joined, or pinned to the natural order."""

    _parents: list[int] = field(default_factory=list)
    _widths: list[int] = field(default_factory=list)
    _pinned: list[bool] = field(default_factory=list)

    def new(self, width: int, axis: int, *, pinned: bool = False) -> Layout:
        """Channels of a class of their own."""
        self._parents.append(len(self._parents))
        self._widths.append(width)
        self._pinned.append(pinned)
        return Layout((len(self._parents) - 1,), axis)

    def root(self, name: int) -> int:
        """The one name of a class that has been joined with others."""
        while self._parents[name] != name:
            name = self._parents[name]
        return name

    def roots(self, layout: Layout) -> tuple[int, ...]:
        """The classes of a layout, by their one name."""
        return tuple(self.root(name) for name in layout.classes)

    def width(self, name: int) -> int:
        """Number of channels of a class."""
        return self._widths[name]

    def is_pinned(self, name: int) -> bool:
        """Whether the class must stay in the natural order."""
        return self._pinned[self.root(name)]

    def channels(self, layout: Layout) -> int:
        """Entries along the channel axis."""
        return layout.repeat * sum(self.width(name) for name in layout.classes)

    def pin(self, layout: Layout | None) -> None:
        """Keep the channels in the natural order."""
        for name in () if layout is None else layout.classes:
            self._pinned[self.root(name)] = True

    def join(self, one: Layout, other: Layout) -> None:
        """Store both in one order, part by part; where their parts differ in width, both in the natural one."""
        widths = [[self.width(name) for name in layout.classes] for layout in (one, other)]
        if widths[0] != widths[1] or one.repeat != other.repeat:
            self.pin(one)
            self.pin(other)
            return
        for name, other_name in zip(one.classes, other.classes, strict=True):
            root, other_root = self.root(name), self.root(other_name)
            self._pinned[root] = self._pinned[root] or self._pinned[other_root]
            self._parents[other_root] = root

    def all_roots(self) -> list[int]:
        """Every class once."""
        return [name for name, parent in enumerate(self._parents) if name == parent]


def stored_order(layout: Layout, classes: OrderClasses, orders: dict[int, IntArray]) -> IntArray:
    """The order of all entries along the channel axis: `order[position] = natural entry`."""
    parts, offset = [], 0
    for root in classes.roots(layout):
        parts.append(orders[root] + offset)
        offset += len(orders[root])
    order = np.concatenate(parts)
    return (order[:, None] * layout.repeat + np.arange(layout.repeat)).ravel()
