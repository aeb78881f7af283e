"""Weights to importance: S[j, i] = norm of the kernel W[j, i, :, :] (Sec. 3.2)."""

from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from strucspars.core.checks import FloatArray, as_float_array

Norm = Literal["l1", "l2"]


def importance_matrix(weight: npt.ArrayLike, norm: Norm = "l1") -> FloatArray:
    """Importance of every connection: `S[j, i] = ||W[j, i, ...]||` over the kernel axes (Sec. 3.2).

    The paper says "norm" and leaves it open which; its code uses L1, and so do we. A 2-d weight (linear layer) has a
    kernel of one entry, so both norms are its absolute value.

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
        raise ValueError(
            f"weight must be a non-empty (out, in, *kernel) array with 2 to 5 axes, got shape {values.shape}"
        )
    if norm not in get_args(Norm):
        raise ValueError(f"norm must be 'l1' or 'l2', got {norm!r}")
    kernels = np.abs(values.reshape(*values.shape[:2], -1))
    largest = float(kernels.max())
    if not np.isfinite(largest * kernels.size):
        raise ValueError("weight holds NaN, infinite or overflowing values; check the training")
    if norm == "l1" or largest == 0:
        return np.asarray(kernels.sum(axis=2))
    # Squares of tiny or huge weights would leave the range of numbers; those of ratios to the largest do not.
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
