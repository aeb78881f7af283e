"""Weights to importance: S[j, i] = norm of the kernel W[j, i, :, :] (Sec. 3.2)."""

from typing import Literal

import numpy as np
import numpy.typing as npt

from strucspars.core.arrays import FloatArray

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
    values = np.asarray(weight, dtype=np.float64)
    if not 2 <= values.ndim <= 5 or values.size == 0:
        raise ValueError(
            f"weight must be a non-empty (out, in, *kernel) array with 2 to 5 axes, got shape {values.shape}"
        )
    if not np.isfinite(values).all():
        raise ValueError(f"weight of shape {values.shape} holds NaN or infinite values; check the training run")
    kernel_axes = tuple(range(2, values.ndim))
    matrix: FloatArray
    if norm == "l1":
        matrix = np.abs(values).sum(axis=kernel_axes)
    elif norm == "l2":
        matrix = np.sqrt(np.square(values).sum(axis=kernel_axes))
    else:
        raise ValueError(f"norm must be 'l1' or 'l2', got {norm!r}")
    return matrix


def checked_importance(importance: npt.ArrayLike, *, name: str = "importance") -> FloatArray:
    """The importance as a float64 matrix, or a `ValueError` that says what is wrong with it."""
    matrix = np.asarray(importance, dtype=np.float64)
    if matrix.ndim != 2 or matrix.size == 0:
        raise ValueError(
            f"{name} must be a non-empty (out_channels, in_channels) matrix, got shape {matrix.shape}; "
            "importance_matrix(weight) makes one"
        )
    # One pass: the sum is finite exactly when all entries are, and small enough to be added up.
    with np.errstate(over="ignore", invalid="ignore"):
        total = matrix.sum()
    if not np.isfinite(total):
        raise ValueError(f"{name} holds NaN, infinite or overflowing values; check the weights or scale them down")
    if matrix.min() < 0:
        raise ValueError(f"{name} must not be negative, got {matrix.min():g}; take the norm of the weights first")
    return matrix
