"""One exact half-step of Sec. 3.2: place channels into groups of equal size at the smallest total cost.

The paper assigns `N` channels to `N` positions. Positions inside one finest block cost the same, so this is a
transportation problem of `N` channels and `G` groups with `N / G` places each, and that is how we state it. Three
solvers give the same minimum: ours over groups, and the paper's over positions by scipy or by POT.

All take `cost[channel, group]` with channel `i` now sitting in group `i // (N / G)`, and return an order with
`order[new] = old`; group `k` then holds `order[k * N / G : (k + 1) * N / G]`.
"""

from collections.abc import Callable

import numpy as np
from scipy.optimize import linear_sum_assignment

from strucspars.core.checks import FloatArray, IntArray

AssignToGroups = Callable[[FloatArray], IntArray]


def assign_by_group_cycles(cost: FloatArray, sizes: IntArray | None = None) -> IntArray:
    """Exact transport by moving channels around cycles of groups until no cycle saves anything.

    Groups have equal sizes unless `sizes` are given; the channels now sit in the groups one after the other.

    From group `a` to group `b`, the cheapest channel to move is the one with the smallest `cost[i, b] - cost[i, a]`.
    One assignment over these `G x G` prices finds the best set of disjoint cycles, moving at most one channel out of
    and one into each group, so the saving is exact and the group sizes hold. A feasible flow without a negative cycle
    is optimal; hence no further saving proves optimality. Channels that stay keep their place, so a warm start moves
    only channels that lower the cost.
    """
    channels, groups = cost.shape
    group = np.arange(groups)
    sizes = np.full(groups, channels // groups) if sizes is None else sizes
    is_place = np.arange(sizes.max()) < sizes[:, None]
    members = np.zeros(is_place.shape, dtype=np.int64)
    members[is_place] = np.arange(channels)
    price = cost[members] - cost[members, group[:, None]][..., None]  # (from group, place, to group)
    price[~is_place] = np.inf
    while True:
        cheapest_place = price.argmin(axis=1)
        move_price = np.take_along_axis(price, cheapest_place[:, None, :], axis=1)[:, 0, :]
        _, target = linear_sum_assignment(move_price)
        paid = move_price[group, target]
        # A sum that rounding alone could make negative saves nothing, and following such cycles might not end.
        if paid.sum() >= -(groups + 1) * np.finfo(np.float64).eps * np.abs(paid).sum():
            return members[is_place]
        origin = np.flatnonzero(target != group)
        target = target[origin]
        vacated = np.zeros(groups, dtype=np.int64)
        vacated[origin] = cheapest_place[origin, target]
        movers = members[origin, vacated[origin]]
        members[target, vacated[target]] = movers
        price[target, vacated[target]] = cost[movers] - cost[movers, target][:, None]


def saves(cost: FloatArray, order: IntArray, group_of_place: IntArray) -> bool:
    """Whether an order of channels, found for `cost[channel, group]`, costs less than the present one."""
    # Sum over channels that change their group only: rounding in the others' large costs would hide a small saving.
    moved = np.flatnonzero(group_of_place[order] != group_of_place)
    old_cost, new_cost = cost[order[moved], group_of_place[order[moved]]], cost[order[moved], group_of_place[moved]]
    rounding = np.finfo(np.float64).eps * float(old_cost.sum() + new_cost.sum())
    return bool(float((old_cost - new_cost).sum()) > rounding)


def assign_by_positions(cost: FloatArray) -> IntArray:
    """The paper's N x N assignment problem, solved by scipy."""
    channels, groups = cost.shape
    # Channels as rows: with positions as rows the equal rows make the solver up to 15 times slower.
    _, position = linear_sum_assignment(cost.repeat(channels // groups, axis=1))
    return np.argsort(position)


def assign_by_network_simplex(cost: FloatArray) -> IntArray:
    """The paper's N x N optimal transport problem, solved by POT's network simplex as in the authors' code."""
    try:
        import ot
    except ImportError as error:
        raise ValueError(
            "method='paper-pot' needs the package POT: pip install 'strucspars[pot]', or use method='paper'"
        ) from error
    channels, groups = cost.shape
    one_each = np.ones(channels)
    # POT treats differences below a fixed threshold as zero, so the costs are scaled to order one.
    scale = float(np.abs(cost).max()) or 1.0
    positions_by_channels = np.ascontiguousarray((cost / scale).repeat(channels // groups, axis=1).T)
    # POT's default limit of 100,000 pivots is hit from about 2048 channels on, and the plan is then not optimal.
    flow, log = ot.emd(one_each, one_each, positions_by_channels, numItermax=100_000_000, log=True)
    if log["warning"] is not None:
        raise RuntimeError(f"POT did not solve the {channels} x {channels} transport problem: {log['warning']}")
    order: IntArray = np.asarray(flow).argmax(axis=1)
    return order
