"""Where a grouped layer needs a gather: arrays of channels in, arrays of channels out.

An order lists channels by their natural number, `order[position] = channel`. A grouped layer can read an order as it is
if the channels of every group stand together: the order within a group, and that of whole groups, only permute its
weight. The same holds for what it puts out, with the groups in the same sequence.

Channels lie along the last axis. Axes before it, where a function speaks of several orders, count alternatives.
"""

from dataclasses import dataclass

import numpy as np

from strucspars.core.arrays import IntArray
from strucspars.core.permutation import inverse
from strucspars.measure.gathers import contiguous_runs


@dataclass(frozen=True, kw_only=True)
class Grouping:
    """Which channels a grouped layer connects: the group of every input channel, and of every output channel."""

    in_groups: IntArray
    out_groups: IntArray
    num_groups: int


@dataclass(frozen=True, kw_only=True)
class Placement:
    """How a grouped layer computes between two given orders.

    Attributes:
        in_order: the channels as the layer reads them, group after group.
        out_order: the channels as the layer puts them out, in the same sequence of groups.
        in_gather: positions of the given input order that are copied to make `in_order`; None if it is that order.
        out_gather: positions of `out_order` that are copied to make the wanted output order; None likewise.
    """

    in_order: IntArray
    out_order: IntArray
    in_gather: IntArray | None
    out_gather: IntArray | None


def group_sequence(groups_in_order: IntArray, *, otherwise: IntArray) -> IntArray:
    """The groups one after the other, of each order in which the channels of each stand together; otherwise another.

    Args:
        groups_in_order: the group of every position, for one order or several, `(..., channels)`.
        otherwise: sequences for orders in which a group is scattered, `(..., groups)`.

    >>> group_sequence(np.array([[1, 1, 0, 0], [1, 0, 1, 0]]), otherwise=np.array([0, 1]))
    array([[1, 0],
           [0, 1]])
    """
    by_run = groups_in_order.reshape(*groups_in_order.shape[:-1], otherwise.shape[-1], -1)
    first = by_run[..., :1]
    stand_together = (by_run == first).all(axis=(-2, -1))
    return np.where(stand_together[..., None], first[..., 0], otherwise)


def positions_by_group(
    grouping: Grouping, in_orders: IntArray, out_orders: IntArray, *, gather_inputs_first: bool
) -> tuple[IntArray, IntArray]:
    """The positions that a layer between two orders, or several pairs of them, reads and fills, group after group.

    On both sides the groups have one sequence, and on as many of them as the orders allow the positions are simply
    0, 1, 2 and so on: no gather.

    Args:
        grouping: the layer's groups.
        in_orders: orders in which its input is stored, `(..., in_channels)`.
        out_orders: orders in which its output is to be stored, `(..., out_channels)`.
        gather_inputs_first: where only the sequence of the groups differs, gather the inputs instead of the outputs.
    """
    in_groups, out_groups = grouping.in_groups[in_orders], grouping.out_groups[out_orders]
    sequence = np.arange(grouping.num_groups)
    # The last one that has a sequence imposes it on the other.
    for groups in (in_groups, out_groups) if gather_inputs_first else (out_groups, in_groups):
        sequence = group_sequence(groups, otherwise=sequence)
    return _sorted_positions(in_groups, sequence), _sorted_positions(out_groups, sequence)


def placement(
    grouping: Grouping, in_order: IntArray, out_order: IntArray, *, gather_inputs_first: bool = False
) -> Placement:
    """Place a layer between two orders with as few gathers as they allow; arguments as in `positions_by_group`."""
    reads, fills = positions_by_group(grouping, in_order, out_order, gather_inputs_first=gather_inputs_first)
    return Placement(
        in_order=in_order[reads],
        out_order=out_order[fills],
        in_gather=None if contiguous_runs(reads) == 1 else reads,
        out_gather=None if contiguous_runs(fills) == 1 else inverse(fills),
    )


def _sorted_positions(groups_in_order: IntArray, sequence: IntArray) -> IntArray:
    """Positions group after group; within a group in rising order, so that neighbours are copied together."""
    groups = np.broadcast_to(groups_in_order, (*sequence.shape[:-1], groups_in_order.shape[-1]))
    # In the smallest type that holds it: a stable sort of short numbers is several times faster.
    rank = np.argsort(sequence, axis=-1).astype(np.min_scalar_type(sequence.shape[-1]))
    return np.argsort(np.take_along_axis(rank, groups, axis=-1), axis=-1, kind="stable")
