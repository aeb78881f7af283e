"""Fewer channels: which of a class are kept where layers with groups see them, and what that makes of a module.

A class of channels (`channels.sharing`) loses the same channels in all its layers and norms. Where a layer with groups
sees the class, every group loses as many as every other.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from strucspars.core.checks import FloatArray, IntArray, is_whole_number


@dataclass(frozen=True)
class KeptChannels:
    """The channels of a class that stay, of `width`, in ascending order.

    >>> KeptChannels(width=4, kept=(0, 3)).is_narrower
    True
    """

    width: int
    kept: tuple[int, ...]

    def __post_init__(self) -> None:
        numbers = (self.width, *self.kept)
        ascends = all(low < high for low, high in zip(self.kept, self.kept[1:], strict=False))
        if not all(map(is_whole_number, numbers)) or not self.kept or not ascends:
            raise ValueError(f"kept channels must be whole numbers that ascend, one at least; got {self.kept[:8]}")
        if self.kept[0] < 0 or self.kept[-1] >= self.width:
            raise ValueError(f"kept channels must lie in 0 .. {self.width - 1}, got {self.kept[0]} .. {self.kept[-1]}")

    @property
    def is_narrower(self) -> bool:
        """Whether some channels go."""
        return len(self.kept) < self.width


@dataclass(frozen=True, kw_only=True)
class ModuleChannels:
    """The classes of a module's channels, in order along the channels; a side that stays as it is has none.

    Attributes:
        outputs: of a norm or a depthwise convolution, whose inputs are the same channels, only these.
        repeat: after flattening, so many neighbouring inputs belong to one channel.
    """

    outputs: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    repeat: int = 1


@dataclass(frozen=True, eq=False)
class KeptSides:
    """The places along both sides of a module that stay; None for all."""

    outputs: IntArray | None = None
    inputs: IntArray | None = None


def kept_sides(sides: ModuleChannels, classes: Mapping[str, KeptChannels]) -> KeptSides:
    """The places that stay along the sides of a module.

    >>> classes = {"a": KeptChannels(2, (1,)), "b": KeptChannels(3, (0, 2))}
    >>> kept_sides(ModuleChannels(inputs=("a", "b"), repeat=2), classes).inputs
    array([2, 3, 4, 5, 8, 9])
    """
    outputs, inputs = (_joined([classes[name] for name in names]) for names in (sides.outputs, sides.inputs))
    if inputs is not None:
        inputs = (inputs[:, None] * sides.repeat + np.arange(sides.repeat)).ravel()
    return KeptSides(outputs, inputs)


def full_widths(sides: ModuleChannels, classes: Mapping[str, KeptChannels]) -> tuple[int, int]:
    """How many (outputs, inputs) the sides of a module have with all channels; 0 for a side that has no classes."""
    outputs, inputs = (sum(classes[name].width for name in names) for names in (sides.outputs, sides.inputs))
    return outputs, inputs * sides.repeat


def _joined(classes: Sequence[KeptChannels]) -> IntArray | None:
    starts = np.cumsum([0, *(each.width for each in classes)])
    parts = [np.array(each.kept, dtype=np.int64) + start for each, start in zip(classes, starts, strict=False)]
    return np.concatenate(parts) if parts else None


def order_of_kept(perm: IntArray, kept: IntArray, num_groups: int) -> IntArray:
    """The order of the channels that stay, renumbered, from that of all; `perm[new] = old`, group after group.

    Raises:
        ValueError: the groups do not lose the same number of channels.

    >>> order_of_kept(np.array([3, 1, 0, 2]), np.array([1, 2]), num_groups=2)
    array([0, 1])
    """
    place = np.full(len(perm), -1)
    place[kept] = np.arange(len(kept))
    renumbered = place[perm]
    counts = (renumbered.reshape(num_groups, -1) >= 0).sum(1)
    if counts.min() < counts.max():
        raise ValueError(f"its groups must keep the same number of channels, but they keep {counts.tolist()[:16]}")
    order: IntArray = renumbered[renumbered >= 0]
    return order


def order_of_all(perm: IntArray, kept: IntArray, width: int, num_groups: int) -> IntArray:
    """An order of all channels of which `order_of_kept` makes this one; the others fill up the groups, ascending.

    >>> order_of_all(np.array([1, 0]), np.array([1, 2]), width=4, num_groups=2)
    array([2, 0, 1, 3])
    """
    others = np.setdiff1d(np.arange(width), kept).reshape(num_groups, -1)
    order: IntArray = np.concatenate([kept[perm].reshape(num_groups, -1), others], axis=1).ravel()
    return order


def narrower_widths(width: int, num_groups: Sequence[int] = (), *, multiple: int = 1) -> list[int]:
    """The numbers of channels that a class may keep, all of them first, then the multiples below, descending.

    >>> narrower_widths(20, [2], multiple=8)
    [20, 16, 8]
    >>> narrower_widths(12, [2, 3])
    [12, 6]
    """
    step = math.lcm(multiple, *num_groups)
    return [width, *range((width - 1) // step * step, 0, -step)]


def most_important(scores: FloatArray, count: int, partitions: Sequence[IntArray] = ()) -> IntArray | None:
    """The channels of the largest sum of scores, as many in every group as in every other; ascending.

    Args:
        scores: of every channel, not negative.
        count: how many channels to keep.
        partitions: for every layer with groups that sees the channels, the group of each channel, 0, 1, 2, ...

    Returns:
        The channels; None where no choice is even in all partitions, which takes three that do not refine each other.

    >>> most_important(np.array([9.0, 8, 7, 1]), 2, [np.array([0, 0, 1, 1])])
    array([0, 2])
    """
    if any(count % (int(groups.max()) + 1) for groups in partitions):
        return None
    needed = _finest(partitions)
    if len(needed) <= 1:
        return _best_of_each(scores, count, needed[0] if needed else np.zeros(len(scores), dtype=np.int64))
    rows = [groups == group for groups in needed for group in range(int(groups.max()) + 1)]
    shares = [count // (int(groups.max()) + 1) for groups in needed for _ in range(int(groups.max()) + 1)]
    objective = scores / (float(scores.max()) or 1.0)
    found = milp(
        -objective,
        integrality=np.ones(len(scores), dtype=np.int64),
        bounds=Bounds(0, 1),
        constraints=LinearConstraint(np.stack(rows).astype(float), shares, shares),
    )
    return None if found.x is None else np.flatnonzero(found.x > 0.5)


def _best_of_each(scores: FloatArray, count: int, groups: IntArray) -> IntArray:
    """The best of every group; of equal ones the first."""
    order = np.lexsort((np.arange(len(scores)), -scores, groups))
    share = count // (int(groups.max()) + 1)
    ranks = np.arange(len(scores)) - np.searchsorted(groups[order], groups[order])
    kept: IntArray = np.sort(order[ranks < share])
    return kept


def _finest(partitions: Sequence[IntArray]) -> list[IntArray]:
    """The partitions that no other one refines: where its groups are even, theirs are."""
    kept: list[IntArray] = []
    for groups in sorted(partitions, key=lambda each: -int(each.max())):
        if not any(_refines(finer, groups) for finer in kept):
            kept.append(groups)
    return kept


def _refines(finer: IntArray, coarser: IntArray) -> bool:
    pairs = np.unique(np.stack([finer, coarser]), axis=1)
    return len(pairs[0]) == len(np.unique(finer))
