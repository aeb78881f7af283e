"""Where a grouped layer needs a gather: arrays of channels in, arrays of channels out.

An order lists channels by their natural number, `order[position] = channel`. A grouped layer can read an order as it is
if the channels of every group stand together: the order within a group, and that of whole groups, only permute its
weight. The same holds for what it puts out, with the groups in the same sequence.
"""

from dataclasses import dataclass

import numpy as np

from strucspars.core.arrays import IntArray
from strucspars.core.permutation import inverse


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


def group_sequence(groups_in_order: IntArray, num_groups: int) -> IntArray | None:
    """The groups one after the other, if the channels of each stand together; None if they do not.

    >>> group_sequence(np.array([1, 1, 0, 0]), 2)
    array([1, 0])
    >>> group_sequence(np.array([1, 0, 1, 0]), 2) is None
    True
    """
    by_run = groups_in_order.reshape(num_groups, -1)
    if (by_run != by_run[:, :1]).any():
        return None
    sequence: IntArray = by_run[:, 0]
    return sequence


def placement(
    grouping: Grouping, in_order: IntArray, out_order: IntArray, *, gather_inputs_first: bool = False
) -> Placement:
    """Place a layer between two orders with as few gathers as they allow.

    Args:
        grouping: the layer's groups.
        in_order: order in which its input is stored.
        out_order: order in which its output is to be stored.
        gather_inputs_first: where only the sequence of the groups differs, gather the inputs instead of the outputs.
    """
    in_sequence = group_sequence(grouping.in_groups[in_order], grouping.num_groups)
    out_sequence = group_sequence(grouping.out_groups[out_order], grouping.num_groups)
    if in_sequence is not None and out_sequence is not None and not np.array_equal(in_sequence, out_sequence):
        if gather_inputs_first:
            in_sequence = None
        else:
            out_sequence = None
    sequence = in_sequence if in_sequence is not None else out_sequence
    if sequence is None:
        sequence = np.arange(grouping.num_groups)
    in_gather = None if in_sequence is not None else _positions_by_group(grouping.in_groups[in_order], sequence)
    by_group = None if out_sequence is not None else _positions_by_group(grouping.out_groups[out_order], sequence)
    return Placement(
        in_order=in_order if in_gather is None else in_order[in_gather],
        out_order=out_order if by_group is None else out_order[by_group],
        in_gather=in_gather,
        out_gather=None if by_group is None else inverse(by_group),
    )


def _positions_by_group(groups_in_order: IntArray, sequence: IntArray) -> IntArray:
    """Positions group after group; within a group in rising order, so that neighbours are copied together."""
    rank = inverse(sequence)
    return np.argsort(rank[groups_in_order], kind="stable")
