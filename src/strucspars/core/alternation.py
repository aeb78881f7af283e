"""The alternation of Sec. 3.2: the best row order for this column order, the best column order for that, and so on."""

from dataclasses import dataclass

import numpy as np

from strucspars.core.arrays import FloatArray, IntArray
from strucspars.core.connectivity import Connectivity
from strucspars.core.permutation import read_only
from strucspars.core.transport import AssignToGroups

# Savings below this fraction of the whole norm are rounding, not progress.
RELATIVE_PROGRESS = 1e-12


@dataclass(frozen=True)
class _HalfStep:
    perm: IntArray
    cost: float
    saved: float


def alternate(
    importance: FloatArray,
    penalty: FloatArray,
    *,
    out_perm: IntArray,
    in_perm: IntArray,
    assign: AssignToGroups,
    max_sweeps: int,
) -> Connectivity:
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
    progress = RELATIVE_PROGRESS * float(importance.sum())
    rows_first = (importance, importance.T)
    perms = [out_perm, in_perm]
    converged = False
    for half_step in range(2 * max_sweeps):
        side = half_step % 2
        step = _half_step(rows_first[side], penalty, perm=perms[side], other_perm=perms[1 - side], assign=assign)
        perms[side] = step.perm
        # The other side was just solved for this very order; if it stays, both are optimal.
        converged = half_step > 0 and step.saved <= progress
        if converged:
            break
    return Connectivity(read_only(perms[0]), read_only(perms[1]), step.cost, half_step // 2 + 1, converged)


def _half_step(
    importance: FloatArray, penalty: FloatArray, *, perm: IntArray, other_perm: IntArray, assign: AssignToGroups
) -> _HalfStep:
    """Best order of the rows of `importance` for a fixed order of its columns."""
    channels, other_channels = importance.shape
    groups = len(penalty)
    penalty_of_other = np.empty((other_channels, groups))
    penalty_of_other[other_perm] = penalty.repeat(other_channels // groups, axis=0)
    cost = (importance @ penalty_of_other)[perm]
    order = assign(cost)
    group_of_place = np.arange(groups).repeat(channels // groups)
    cost_before = float(cost[np.arange(channels), group_of_place].sum())
    cost_after = float(cost[order, group_of_place].sum())
    if cost_after >= cost_before:
        return _HalfStep(perm, cost_before, saved=0.0)
    return _HalfStep(perm[order], cost_after, saved=cost_before - cost_after)
