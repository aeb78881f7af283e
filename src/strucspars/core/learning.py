"""Learning connectivity: minimise S' (x) R over the orders of output and input channels (Sec. 3.2)."""

import math
from dataclasses import replace
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from strucspars.core import hierarchy
from strucspars.core.checks import FloatArray, IntArray, checked_at_least
from strucspars.core.importance import checked_importance
from strucspars.core.permutation import Connectivity, cheaper, checked_permutation
from strucspars.core.search import alternate, refresh, search_from_scratch
from strucspars.core.transport import (
    AssignToGroups,
    assign_by_group_cycles,
    assign_by_network_simplex,
    assign_by_positions,
)

Method = Literal["fast", "paper", "paper-pot"]
# Of the largest importance. Denormal numbers lose digits in products with the penalty, so smaller ones count as zero.
NEGLIGIBLE = 2.0**-960
Start = Connectivity | tuple[npt.ArrayLike, npt.ArrayLike]


def learn_permutations(
    importance: npt.ArrayLike,
    method: Method = "fast",
    *,
    decay: float = 0.5,
    max_group_level: int | None = None,
    start: Start | None = None,
    seed: int = 0,
) -> Connectivity:
    """Minimise `sum(S[P][:, Q] * R)` over row orders P and column orders Q (Sec. 3.2).

    Every method is a local search: the result is never worse than its start, and not always the global optimum.

    Args:
        importance: S, finite and non-negative, `(C_out, C_in)`.
        method: `"fast"` seeds the alternation by annealed bisection and solves its half-steps over groups. `"paper"`
            alternates N x N assignment problems (scipy) from the identity. `"paper-pot"` does the same with the network
            simplex of the package POT, as the authors' code does.
        decay: ratio of the costs of successive halvings, in (0, 1].
        max_group_level: deepest level to prepare for; R then has only the halvings that lead to it. None: all.
            The function `max_group_level` gives the one at which groups keep a minimum width.
        start: a `Connectivity` or a pair `(out_perm, in_perm)` to improve on. With `"fast"` this is a warm refresh
            without random starts, so that channels change their group only where that lowers the cost.
        seed: decides the random starts of `"fast"`.

    Differs from the paper: `"fast"`, the default, searches the same optimum better and faster; see
    `docs/decisions/0006-solver.md`.

    >>> checkerboard = np.tile([[0.0, 1.0], [1.0, 0.0]], (4, 4))
    >>> learned = learn_permutations(checkerboard, max_group_level=2)
    >>> learned.cost
    0.0
    >>> checkerboard[learned.out_perm][:, learned.in_perm][:, :4].sum(axis=1)
    array([4., 4., 4., 4., 0., 0., 0., 0.])
    """
    matrix, exponent = _in_scale(checked_importance(importance))
    halvings = hierarchy.max_group_level(*matrix.shape) - 1
    if max_group_level is not None:
        halvings = hierarchy.checked_group_level(max_group_level, *matrix.shape, name="max_group_level") - 1
    penalty = hierarchy.group_penalty(halvings, decay=decay)
    generator = np.random.default_rng(checked_at_least("seed", seed, 0))
    out_perm, in_perm = _checked_start(start, matrix.shape)
    if method not in get_args(Method):
        raise ValueError(f"method must be one of {', '.join(get_args(Method))}, got {method!r}")
    if method != "fast":
        assign = assign_by_positions if method == "paper" else assign_by_network_simplex
        learned = _improve(matrix, penalty, out_perm, in_perm, assign)
    elif start is None:
        learned = search_from_scratch(matrix, penalty, generator=generator)
    else:
        learned = refresh(matrix, penalty, out_perm=out_perm, in_perm=in_perm)
    return replace(learned, cost=math.ldexp(learned.cost, exponent))


def refine_at_level(importance: npt.ArrayLike, start: Start, *, group_level: int) -> Connectivity:
    """Raise the norm kept at one group level, ignoring all others: minimise `sum(S[P][:, Q] * (1 - U_g))`.

    For use once the levels are decided and the hierarchy that R rewards is no longer needed. Never lowers the kept norm
    of `start`. The `cost` of the result is the norm outside the groups.

    >>> importance = np.random.default_rng(0).random((32, 32))
    >>> learned = learn_permutations(importance)
    >>> outside = ~hierarchy.connection_mask(32, 32, group_level=3)
    >>> dropped = (importance[learned.out_perm][:, learned.in_perm] * outside).sum()
    >>> bool(refine_at_level(importance, learned, group_level=3).cost <= dropped)
    True
    """
    matrix, exponent = _in_scale(checked_importance(importance))
    groups = hierarchy.num_groups(hierarchy.checked_group_level(group_level, *matrix.shape))
    out_perm, in_perm = _checked_start(start, matrix.shape)
    refined = _improve(matrix, 1 - np.eye(groups), out_perm, in_perm, assign_by_group_cycles)
    return replace(refined, cost=math.ldexp(refined.cost, exponent))


def _in_scale(importance: FloatArray) -> tuple[FloatArray, int]:
    """The matrix divided by a power of two, largest entry near 1 and negligible ones zero; and the exponent."""
    exponent = math.frexp(float(importance.max()))[1]
    scaled = np.ldexp(importance, -exponent)
    return np.where(scaled < NEGLIGIBLE, 0.0, scaled), exponent


def _improve(
    importance: FloatArray, penalty: FloatArray, out_perm: IntArray, in_perm: IntArray, assign: AssignToGroups
) -> Connectivity:
    """The plain alternation. Never worse than its start."""
    found = alternate(importance, penalty, out_perm=out_perm, in_perm=in_perm, assign=assign)
    return cheaper(found, importance, penalty, out_perm=out_perm, in_perm=in_perm)


def _checked_start(start: Start | None, shape: tuple[int, ...]) -> tuple[IntArray, IntArray]:
    if start is None:
        return np.arange(shape[0]), np.arange(shape[1])
    out_perm, in_perm = (start.out_perm, start.in_perm) if isinstance(start, Connectivity) else start
    return (
        checked_permutation(out_perm, shape[0], name="start's out_perm"),
        checked_permutation(in_perm, shape[1], name="start's in_perm"),
    )
