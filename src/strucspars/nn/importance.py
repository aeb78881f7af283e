"""Importance of PyTorch weights (Sec. 3.2)."""

import numpy.typing as npt
import torch

from strucspars.core import importance
from strucspars.core.arrays import FloatArray


def importance_matrix(weight: torch.Tensor | npt.ArrayLike, norm: importance.Norm = "l1") -> FloatArray:
    """Importance of every connection: `S[j, i] = ||W[j, i, ...]||` over the kernel axes (Sec. 3.2).

    Takes a tensor of any device and precision, with or without gradient, or anything that numpy takes.

    Args:
        weight: `(C_out, C_in, *kernel)` with zero to three kernel axes.
        norm: `"l1"`, as in the paper's code, or `"l2"`.

    Returns: float64 `(C_out, C_in)`.

    >>> importance_matrix(torch.nn.Conv2d(8, 16, 3).weight).shape
    (16, 8)
    """
    if isinstance(weight, torch.Tensor):
        weight = _as_array(weight)
    return importance.importance_matrix(weight, norm)


def _as_array(weight: torch.Tensor) -> FloatArray:
    if weight.is_meta or weight.is_sparse or weight.is_complex():
        kind = f"{weight.layout}, {weight.dtype}, {weight.device}"
        raise ValueError(f"weight must hold real, dense values, got a tensor of {kind}")
    # Double before numpy: it has no bfloat16.
    array: FloatArray = weight.detach().to("cpu", torch.float64).numpy()
    return array
