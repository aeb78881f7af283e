"""Orders of channels, and the pair of them that is learned for a layer (Sec. 3.2).

`perm[new] = old`, so `S[out_perm][:, in_perm]` is the permuted matrix.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from strucspars.core.checks import FloatArray, IntArray


def checked_permutation(perm: npt.ArrayLike, length: int, *, name: str) -> IntArray:
    """A read-only int64 copy, or a `ValueError` unless it holds every channel from 0 to `length - 1` once."""
    values = np.asarray(perm)
    if values.shape != (length,):
        raise ValueError(f"{name} must list {length} channels, got shape {values.shape}")
    if not np.issubdtype(values.dtype, np.integer):
        raise ValueError(f"{name} must hold whole numbers, got {values.dtype}")
    present = np.zeros(length, dtype=np.bool_)
    present[values[(values >= 0) & (values < length)]] = True
    if not present.all():
        raise ValueError(
            f"{name} is not a permutation: it must hold every channel from 0 to {length - 1} exactly once, "
            f"but lacks {present.argmin()}"
        )
    return locked_copy(values.astype(np.int64))


def inverse(perm: IntArray) -> IntArray:
    """The permutation that undoes this one: `inverse(perm)[perm[new]] = new`."""
    undo = np.empty_like(perm)
    undo[perm] = np.arange(len(perm))
    return undo


def locked_copy(perm: IntArray) -> IntArray:
    """A read-only copy, because several objects share the result."""
    copy = perm.copy()
    copy.setflags(write=False)
    return copy


@dataclass(frozen=True, eq=False)
class Connectivity:
    """Learned channel orders of one layer.

    Attributes:
        out_perm: order P of the output channels, `perm[new] = old`, read-only.
        in_perm: order Q of the input channels, likewise.
        cost: what was minimised, `sum(S[out_perm][:, in_perm] * R)`.
        sweeps: pairs of exact half-steps made.
        converged: False if the sweep limit ended the search; the orders are valid nevertheless.

    >>> import strucspars as ss
    >>> learned = ss.core.learn_permutations([[0.0, 1.0], [1.0, 0.0]])
    >>> learned.cost, learned.converged
    (0.0, True)
    """

    out_perm: IntArray
    in_perm: IntArray
    cost: float
    sweeps: int
    converged: bool


def connection_cost(importance: FloatArray, penalty: FloatArray, out_perm: IntArray, in_perm: IntArray) -> float:
    """`sum(S[P][:, Q] * R)` with R given between groups: the metric of block-diagonality (Sec. 3.2)."""
    groups, (out_channels, in_channels) = len(penalty), importance.shape
    # Sum the wider side by groups first: less is left to reorder.
    if out_channels < in_channels:
        return connection_cost(importance.T, penalty.T, in_perm, out_perm)
    by_row_group = importance.take(out_perm, axis=0).reshape(groups, -1, in_channels).sum(axis=1)
    by_group = by_row_group.take(in_perm, axis=1).reshape(groups, groups, -1).sum(axis=2)
    return float((by_group * penalty).sum())


def measured_connectivity(
    importance: FloatArray, penalty: FloatArray, *, out_perm: IntArray, in_perm: IntArray, sweeps: int, converged: bool
) -> Connectivity:
    """The result of a search. All costs use this one formula, so equal orders have bitwise equal costs."""
    cost = connection_cost(importance, penalty, out_perm, in_perm)
    return Connectivity(locked_copy(out_perm), locked_copy(in_perm), cost, sweeps, converged)


def cheaper(
    found: Connectivity, importance: FloatArray, penalty: FloatArray, *, out_perm: IntArray, in_perm: IntArray
) -> Connectivity:
    """The found orders if they cost less than the given ones, else those."""
    given_cost = connection_cost(importance, penalty, out_perm, in_perm)
    if found.cost < given_cost:
        return found
    return replace(found, out_perm=locked_copy(out_perm), in_perm=locked_copy(in_perm), cost=given_cost)
