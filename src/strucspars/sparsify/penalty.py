"""The structured penalty lambda * sum(S' * R_g) of all layers, as a loss term and as a gradient (Sec. 3.3).

Both work on lists of tensors at once, without waiting for the device, so that they cost little and can be part of a
captured graph: new values of lambda and R_g are copied into the same tensors.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from strucspars.core.arrays import FloatArray
from strucspars.core.importance import Norm


class StructuredPenalty:
    """The penalty on a fixed list of weights, with strengths that change from epoch to epoch."""

    def __init__(self, weights: Sequence[torch.nn.Parameter], norm: Norm) -> None:
        self._weights: list[torch.Tensor] = list(weights)
        self._norm = norm
        # In the shape and memory format of the weights: the fused kernels want it so.
        self._strengths = [torch.zeros_like(weight, requires_grad=False) for weight in self._weights]

    def set_strength_(self, index: int, strength: FloatArray) -> None:
        """New lambda * R_g of one layer, `(C_out, C_in)` in the original channel order."""
        target = self._strengths[index]
        values = torch.from_numpy(np.ascontiguousarray(strength)).to(target)
        target.copy_(values.view(*values.shape, *[1] * (target.dim() - 2)).expand_as(target))

    def value(self) -> torch.Tensor:
        """The penalty as a differentiable scalar."""
        self._check_device()
        if self._norm == "l1":
            value: torch.Tensor = _WeightedL1.apply(*self._weights, *self._strengths)
            return value
        terms = [
            (torch.linalg.vector_norm(_kernels(weight), dim=2) * _kernels(strength)[..., 0]).sum()
            for weight, strength in zip(self._weights, self._strengths, strict=True)
        ]
        return torch.stack(terms).sum()

    @torch.no_grad()
    def add_gradient_(self) -> None:
        """Add the penalty's gradient to the weights' gradients; weights that are not trained are left alone."""
        self._check_device()
        weights, gradients, strengths = [], [], []
        for weight, strength in zip(self._weights, self._strengths, strict=True):
            if weight.requires_grad:
                if weight.grad is None:
                    weight.grad = torch.zeros_like(weight)
                weights.append(weight)
                gradients.append(weight.grad)
                strengths.append(strength)
        if not weights:
            return
        if self._norm == "l1":
            directions = list(torch._foreach_sign(weights))
        else:
            directions = [_unit_kernels(weight) for weight in weights]
        torch._foreach_addcmul_(gradients, directions, strengths)

    def _check_device(self) -> None:
        here, there = self._weights[0].device, self._strengths[0].device
        if here != there:
            raise ValueError(f"the model moved from {there} to {here} after its Sparsifier was made; move it before")


class _WeightedL1(torch.autograd.Function):
    """`sum(strength * |weight|)` over a list of weights, followed by their strengths; zero subgradient at zero."""

    @staticmethod
    def forward(ctx: Any, *weights_and_strengths: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*weights_and_strengths)
        weights, strengths = _halves(weights_and_strengths)
        return torch.stack(torch._foreach_norm(torch._foreach_mul(weights, strengths), 1)).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        weights, strengths = _halves(ctx.saved_tensors)
        directions = torch._foreach_sign(weights)
        torch._foreach_mul_(directions, strengths)
        torch._foreach_mul_(directions, gradients[0])
        return *directions, *[None] * len(strengths)


def _halves(tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    middle = len(tensors) // 2
    return list(tensors[:middle]), list(tensors[middle:])


def _kernels(weight: torch.Tensor) -> torch.Tensor:
    return weight.reshape(*weight.shape[:2], -1)


def _unit_kernels(weight: torch.Tensor) -> torch.Tensor:
    """Every kernel divided by its L2 norm; zero where it is zero."""
    norms = torch.linalg.vector_norm(_kernels(weight), dim=2).view(*weight.shape[:2], *[1] * (weight.dim() - 2))
    return torch.where(norms > 0, weight / norms, torch.zeros_like(weight))
