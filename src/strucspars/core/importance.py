"""Importance of connections, S[j, i] = norm of the kernel W[j, i, :, :], and how much of it groups keep (Sec. 3)."""

from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from strucspars.core.checks import FloatArray, as_float_array, checked_fraction
from strucspars.core.hierarchy import block_sums, max_group_level, num_groups

Norm = Literal["l1", "l2"]


def importance_matrix(weight: npt.ArrayLike, norm: Norm = "l1") -> FloatArray:
    """Importance of every connection: `S[j, i] = ||W[j, i, ...]||` over the kernel axes (Sec. 3.2).

    The paper does not say which norm; its code uses L1, the default here. A 2-d weight (linear layer) has a kernel of
    one entry, so both norms are its absolute value.

    Args:
        weight: `(C_out, C_in, *kernel)` with zero to three kernel axes.
        norm: `"l1"` or `"l2"`.

    Returns: float64 `(C_out, C_in)`.

    >>> importance_matrix([[[3.0, -4.0]], [[0.0, 1.0]]])
    array([[7.],
           [1.]])
    >>> importance_matrix([[[3.0, -4.0]], [[0.0, 1.0]]], norm="l2")
    array([[5.],
           [1.]])
    """
    values = as_float_array(weight, name="weight")
    if not 2 <= values.ndim <= 5 or values.size == 0:
        raise ValueError(f"weight must be non-empty, (out, in, *kernel) with 2 to 5 axes, got shape {values.shape}")
    if norm not in get_args(Norm):
        raise ValueError(f"norm must be 'l1' or 'l2', got {norm!r}")
    kernels = np.abs(values.reshape(*values.shape[:2], -1))
    largest = float(kernels.max())
    if not np.isfinite(largest * kernels.size):
        raise ValueError("weight holds NaN, infinite or overflowing values; check the training")
    if norm == "l1" or largest == 0:
        return np.asarray(kernels.sum(axis=2))
    # Squares of very small or large weights underflow or overflow; squares of their ratios to the largest do not.
    ratios: FloatArray = np.sqrt(np.square(kernels / largest).sum(axis=2))
    return largest * ratios


def checked_importance(importance: npt.ArrayLike, *, name: str = "importance") -> FloatArray:
    """The importance as a float64 matrix, or a `ValueError` that says what is wrong with it."""
    matrix = as_float_array(importance, name=name)
    if matrix.ndim != 2 or matrix.size == 0:
        raise ValueError(
            f"{name} must be a non-empty (out_channels, in_channels) matrix, got shape {matrix.shape}; "
            "importance_matrix(weight) makes one"
        )
    # One pass over good input: the sum is finite exactly when all entries are, and small enough to be added up.
    with np.errstate(over="ignore", invalid="ignore"):
        total = matrix.sum()
    if not np.isfinite(total):
        j, i = np.unravel_index(np.argmin(np.isfinite(matrix)), matrix.shape)
        raise ValueError(
            f"{name} must be finite and small enough to be added up, got {matrix[j, i]:g} at [{j}, {i}]; "
            "check the weights or scale them down"
        )
    if matrix.min() < 0:
        raise ValueError(f"{name} must not be negative, got {matrix.min():g}; take the norm of the weights first")
    return matrix


def kept_norm_by_level(permuted_importance: npt.ArrayLike) -> FloatArray:
    """Fraction of the norm that U_g keeps, `sum(S' * U_g) / sum(S)`, for the levels 1, 2, ... in one pass (Sec. 3.4).

    Never rising, 1.0 at level 1, and exactly 1.0 wherever everything outside the groups is zero; so also for a layer
    that is all zero.

    Args:
        permuted_importance: S' = `S[out_perm][:, in_perm]`, `(C_out, C_in)`.

    Returns: `(max_group_level,)`; entry `g - 1` belongs to level `g`.

    >>> kept_norm_by_level([[3.0, 1.0], [0.0, 4.0]])
    array([1.   , 0.875])
    """
    matrix = checked_importance(permuted_importance, name="permuted_importance")
    levels = max_group_level(*matrix.shape)
    total = float(matrix.sum())
    kept = np.ones(levels)
    # From fine to coarse: summing 2 x 2 blocks of groups halves the number of groups.
    sums = block_sums(matrix, num_groups(levels))
    for level in range(levels, 1, -1):
        # If everything outside the groups is zero, the fraction is exactly 1, despite rounding in the sums.
        if np.count_nonzero(sums) > np.count_nonzero(sums.diagonal()):
            kept[level - 1] = sums.trace() / total
        sums = block_sums(sums, num_groups(level - 1))
    return np.minimum.accumulate(kept)


def penalty_scale(importance: npt.ArrayLike) -> FloatArray:
    """Factor of each connection's penalty: the smaller, the more the connection matters; 1 on average.

    Beyond the paper, for importances that read data: `1 / (S + mean(S))` over its mean, the weights of reweighted L1
    minimisation (Candes, Wakin and Boyd, 2008). All factors lie above 0 and at most at 2.

    >>> penalty_scale([[1.0, 1.0], [0.0, 2.0]])
    array([[0.85714286, 0.85714286],
           [1.71428571, 0.57142857]])
    """
    matrix = checked_importance(importance, name="importance")
    mean = float(matrix.mean())
    if mean == 0:
        return np.ones_like(matrix)
    scale = 1 / (1 + matrix / mean)
    return np.asarray(scale / scale.mean())


def largest_group_level(
    permuted_importance: npt.ArrayLike, min_kept_norm: float = 0.9, *, min_channels_per_group: int = 1
) -> int:
    """Largest level that keeps at least the fraction `min_kept_norm` of the norm: `max {g : S' (x) U_g >= p sum(S)}`.

    The threshold p of Sec. 3.4, as a kept fraction. Level 1 keeps everything, so there is always an answer; the top
    level can be reached, unless its groups would be narrower than `min_channels_per_group` on either side.

    >>> largest_group_level([[3.0, 1.0], [0.0, 4.0]]), largest_group_level([[3.0, 1.0], [0.0, 4.0]], min_kept_norm=0.8)
    (1, 2)
    >>> largest_group_level(np.eye(64)), largest_group_level(np.eye(64), min_channels_per_group=16)
    (7, 3)
    """
    matrix = checked_importance(permuted_importance, name="permuted_importance")
    limit = max_group_level(*matrix.shape, min_channels_per_group=min_channels_per_group)
    return min(level_keeping(kept_norm_by_level(matrix), min_kept_norm), limit)


def level_keeping(kept_norm: npt.ArrayLike, min_kept_norm: float) -> int:
    """`largest_group_level` from the kept norms of the levels 1, 2, ..."""
    return int(np.count_nonzero(np.asarray(kept_norm) >= checked_fraction("min_kept_norm", min_kept_norm)))
