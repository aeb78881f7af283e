"""The fast solver: annealed bisection finds a start, exact half-steps over 32 groups finish it, the leaves come last.

The halvings that cost more than 1/32 of the first are the trunk: at the paper's decay the first five, 32 groups. The
channels inside each trunk group are then ordered by further bisection alone: the leaves.
"""

import numpy as np

from strucspars.core.alternation import alternate
from strucspars.core.arrays import FloatArray, IntArray
from strucspars.core.bisection import PRESENT_ORDER, BisectionEffort, Float32Array, bisect_blocks
from strucspars.core.connectivity import Connectivity, cheaper, measured_connectivity
from strucspars.core.hierarchy import block_sums
from strucspars.core.transport import assign_by_group_cycles

LEAF_PENALTY = 1 / 32
TRUNK_EFFORT = BisectionEffort(starts=12, annealing_steps=(20, 12, 8), rounded_steps=2)
# Up to 64 x 64 channels, more starts cost next to nothing, and there are few enough optima to see them all.
SMALL_LAYER = 64 * 64
SMALL_LAYER_EFFORT = BisectionEffort(starts=64, annealing_steps=(20, 12, 8), rounded_steps=3)


def search_from_scratch(
    importance: FloatArray, penalty: FloatArray, *, generator: np.random.Generator, max_sweeps: int
) -> Connectivity:
    """Cold search for the orders that minimise `sum(S[P][:, Q] * R)`. Never worse than the identity order.

    Args:
        importance: S, `(C_out, C_in)`.
        penalty: R between the finest groups, `(G, G)`, as `group_penalty` gives it.
        generator: the source of the random starts.
        max_sweeps: limit on the alternation.
    """
    trunk_halvings = _halvings(len(penalty) // _leaf_groups(penalty))
    effort = SMALL_LAYER_EFFORT if importance.size <= SMALL_LAYER else TRUNK_EFFORT
    orders = bisect_blocks(_scaled(importance)[None], trunk_halvings, effort=effort, generator=generator)
    found = _polish(importance, penalty, orders.rows[0], orders.columns[0], max_sweeps)
    out_channels, in_channels = importance.shape
    return cheaper(found, importance, penalty, out_perm=np.arange(out_channels), in_perm=np.arange(in_channels))


def refresh(
    importance: FloatArray, penalty: FloatArray, *, out_perm: IntArray, in_perm: IntArray, max_sweeps: int
) -> Connectivity:
    """Warm search from given orders, without random starts.

    Never worse than its start, although what pays in the trunk can cost more in the leaves: then the start comes back.
    """
    found = _polish(importance, penalty, out_perm, in_perm, max_sweeps)
    return cheaper(found, importance, penalty, out_perm=out_perm, in_perm=in_perm)


def _polish(
    importance: FloatArray, penalty: FloatArray, out_perm: IntArray, in_perm: IntArray, max_sweeps: int
) -> Connectivity:
    """Exact alternation over the trunk's groups, then bisection inside each of them."""
    leaf_groups = _leaf_groups(penalty)
    trunk_penalty = penalty[::leaf_groups, ::leaf_groups]
    end = alternate(
        importance,
        trunk_penalty,
        out_perm=out_perm,
        in_perm=in_perm,
        assign=assign_by_group_cycles,
        max_sweeps=max_sweeps,
    )
    rows, columns = end.out_perm.reshape(len(trunk_penalty), -1), end.in_perm.reshape(len(trunk_penalty), -1)
    if leaf_groups > 1:
        rows, columns = _order_leaves(importance, penalty[:leaf_groups, :leaf_groups], rows, columns)
    return measured_connectivity(
        importance,
        penalty,
        out_perm=rows.ravel(),
        in_perm=columns.ravel(),
        sweeps=end.sweeps,
        converged=end.converged,
    )


def _order_leaves(
    importance: FloatArray, penalty: FloatArray, rows: IntArray, columns: IntArray
) -> tuple[IntArray, IntArray]:
    """Bisect inside the trunk's groups, `(B, n)` and `(B, m)`, from the present order; only where that pays."""
    blocks = importance[rows[:, :, None], columns[:, None, :]]
    orders = bisect_blocks(_scaled(blocks), _halvings(len(penalty)), effort=PRESENT_ORDER, generator=None)
    reordered = np.take_along_axis(blocks, orders.rows[:, :, None], axis=1)
    reordered = np.take_along_axis(reordered, orders.columns[:, None, :], axis=2)
    old_cost = (block_sums(blocks, len(penalty)) * penalty).sum(axis=(1, 2))
    new_cost = (block_sums(reordered, len(penalty)) * penalty).sum(axis=(1, 2))
    better = (new_cost < old_cost)[:, None]
    rows = np.where(better, np.take_along_axis(rows, orders.rows, axis=1), rows)
    columns = np.where(better, np.take_along_axis(columns, orders.columns, axis=1), columns)
    return rows, columns


def _leaf_groups(penalty: FloatArray) -> int:
    """How many of the finest groups one trunk group holds. Their separation from the first one costs little."""
    return int(np.count_nonzero(penalty[0] <= LEAF_PENALTY))


def _halvings(groups: int) -> int:
    return groups.bit_length() - 1


def _scaled(importance: FloatArray) -> Float32Array:
    """Single precision with the largest entry 1: tiny or huge weights neither underflow nor overflow."""
    largest = importance.max()
    return (importance / largest if largest > 0 else importance).astype(np.float32)
