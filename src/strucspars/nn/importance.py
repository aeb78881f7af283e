"""Importance of PyTorch weights (Sec. 3.2)."""

from typing import get_args

import torch

from strucspars.core import importance
from strucspars.core.checks import FloatArray


def importance_matrix(weight: torch.Tensor, norm: importance.Norm = "l1") -> FloatArray:
    """`core.importance_matrix` of a tensor of any device and precision, with or without gradient.

    >>> importance_matrix(torch.nn.Conv2d(8, 16, 3).weight).shape
    (16, 8)
    """
    if weight.is_meta or weight.is_sparse or weight.is_complex():
        kind = f"{weight.layout}, {weight.dtype}, {weight.device}"
        raise ValueError(f"weight must hold real, dense values, got a tensor of {kind}")
    if weight.device.type == "mps":
        # MPS has no double precision.
        weight = weight.cpu()
    if weight.dim() > 2 and weight.numel() > 0 and norm in get_args(importance.Norm):
        # On the tensor's device: for 3 x 3 kernels, only a ninth of the data is copied to the CPU.
        kernels = weight.detach().reshape(*weight.shape[:2], -1)
        weight = torch.linalg.vector_norm(kernels, ord=int(norm[1]), dim=2, dtype=torch.float64)
    # numpy has no bfloat16, so convert to double first. The core makes the remaining checks.
    return importance.importance_matrix(weight.detach().to("cpu", torch.float64).numpy(), norm)
