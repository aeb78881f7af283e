"""The alternation of Sec. 3.2: the best row order for this column order, the best column order for that, and so on."""

from dataclasses import dataclass

import numpy as np

from strucspars.core.arrays import FloatArray, IntArray
from strucspars.core.transport import AssignToGroups


@dataclass(frozen=True, eq=False)
class Alternation:
    """Where the alternation ended, after how many pairs of steps, and whether by itself."""

    out_perm: IntArray
    in_perm: IntArray
    sweeps: int
    converged: bool


def alternate(
    importance: FloatArray,
    penalty: FloatArray,
    *,
    out_perm: IntArray,
    in_perm: IntArray,
    assign: AssignToGroups,
    max_sweeps: int,
) -> Alternation:
    """Lower `sum(S[P][:, Q] * R)` by exact steps over P and Q in turn until neither can gain (Sec. 3.2).

    Every step is optimal for the other side's present order, so the cost never rises; the end is a partial optimum,
    not always the global one.

    Args:
        importance: S, `(C_out, C_in)`.
        penalty: R between groups, symmetric `(G, G)`; `G` divides both widths.
        out_perm, in_perm: where to start.
        assign: the exact solver of one half-step.
        max_sweeps: limit on the pairs of steps.
    """
    rows_first = (importance, importance.T)
    perms = [out_perm, in_perm]
    converged = False
    for half_step in range(2 * max_sweeps):
        side = half_step % 2
        better = _better_order(rows_first[side], penalty, perm=perms[side], other_perm=perms[1 - side], assign=assign)
        # The other side was just solved for this very order; if it stays, both are optimal.
        converged = half_step > 0 and better is None
        if converged:
            break
        if better is not None:
            perms[side] = better
    return Alternation(perms[0], perms[1], sweeps=half_step // 2 + 1, converged=converged)


def _better_order(
    importance: FloatArray, penalty: FloatArray, *, perm: IntArray, other_perm: IntArray, assign: AssignToGroups
) -> IntArray | None:
    """Best order of the rows of `importance` for a fixed order of its columns; None if the present one is as good."""
    channels, other_channels = importance.shape
    groups = len(penalty)
    penalty_of_other = np.empty((other_channels, groups))
    penalty_of_other[other_perm] = penalty.repeat(other_channels // groups, axis=0)
    cost = (importance @ penalty_of_other)[perm]
    order = assign(cost)
    group_of_place = np.arange(groups).repeat(channels // groups)
    # Only channels that change their group count: the others, however heavy, must not blur a small saving.
    moved = np.flatnonzero(group_of_place[order] != group_of_place)
    old_cost, new_cost = cost[order[moved], group_of_place[order[moved]]], cost[order[moved], group_of_place[moved]]
    rounding = np.finfo(np.float64).eps * float(old_cost.sum() + new_cost.sum())
    saved = float((old_cost - new_cost).sum())
    return perm[order] if saved > rounding else None
