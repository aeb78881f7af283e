"""The structured penalty lambda * sum(S' * R_g) of all layers: a loss term, a gradient or a shrinkage (Sec. 3.3).

All work on lists of tensors without waiting for the device, so they can be part of a captured graph: new values of
lambda and R_g are copied into the same tensors.
"""

from collections.abc import Sequence
from itertools import compress
from typing import Any

import numpy as np
import torch

from strucspars.core.checks import FloatArray
from strucspars.core.importance import Norm


class StructuredPenalty:
    """The penalty on a list of weights, with strengths that change from epoch to epoch.

    Every call takes the weights, since a module's weight may be replaced (`load_state_dict(assign=True)`).
    """

    def __init__(self, weights: Sequence[torch.Tensor], norm: Norm) -> None:
        self._norm = norm
        # The fused kernels want the memory format of the weights.
        self._strengths = [torch.zeros_like(weight, requires_grad=False) for weight in weights]

    def set_strength_(self, index: int, strength: FloatArray) -> None:
        """New lambda * R_g of one layer, `(C_out, C_in)` in the original channel order."""
        target = self._strengths[index]
        values = torch.from_numpy(np.ascontiguousarray(strength)).to(target)
        target.copy_(values.view(*values.shape, *[1] * (target.dim() - 2)).expand_as(target))

    @torch.no_grad()
    def mean_sizes(self, weights: Sequence[torch.Tensor]) -> list[float]:
        """Mean over each weight of what its norm shrinks: of the entries, or of the kernels' L2 norms."""
        sizes = [weight.abs() if self._norm == "l1" else _kernel_norms(weight) for weight in weights]
        return [float(size.double().mean()) for size in sizes]

    def value(self, weights: Sequence[torch.Tensor]) -> torch.Tensor:
        """The penalty on the weights, in the order of construction, as a differentiable scalar."""
        self._check_device(weights)
        if self._norm == "l1" and not torch.compiler.is_compiling():
            value: torch.Tensor = _WeightedL1.apply(self._strengths, *weights)
            return value
        # The compiler fuses plain formulas by itself.
        return _sum([self._term(*pair) for pair in zip(weights, self._strengths, strict=True)])

    def _term(self, weight: torch.Tensor, strength: torch.Tensor) -> torch.Tensor:
        if self._norm == "l1":
            return (weight.abs() * strength).sum()
        norms: torch.Tensor = torch.linalg.vector_norm(_kernels(weight), dim=2)
        return (norms * _kernels(strength)[..., 0]).sum()

    @torch.no_grad()
    def add_gradient_(self, weights: Sequence[torch.Tensor]) -> None:
        """Add the penalty's gradient to the weights' gradients; weights that are not trained are left alone."""
        self._check_device(weights)
        trained = [index for index, weight in enumerate(weights) if weight.requires_grad]
        for weight in (weights[index] for index in trained):
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
        self.add_gradient_of_(weights, trained)

    @torch.no_grad()
    def add_gradient_of_(
        self, weights: Sequence[torch.Tensor], chosen: Sequence[int], scale: torch.Tensor | float = 1.0
    ) -> None:
        """Add the gradient to those of the chosen weights, which have one, multiplied by the scale."""
        self._check_device(weights)
        if not chosen:
            return
        trained, strengths = [weights[index] for index in chosen], [self._strengths[index] for index in chosen]
        if self._norm == "l1":
            directions = list(torch._foreach_sign(trained))
        else:
            directions = [_unit_kernels(weight) for weight in trained]
        if not isinstance(scale, float) or scale != 1:
            torch._foreach_mul_(directions, scale)
        gradients = [weight.grad for weight in trained if weight.grad is not None]
        torch._foreach_addcmul_(gradients, directions, strengths)

    @torch.no_grad()
    def shrink_(self, weights: Sequence[torch.Tensor], chosen: Sequence[int], rate: torch.Tensor | float) -> None:
        """The proximal step of the penalty at this learning rate: shrink the chosen weights, at most to zero.

        The minimum over v of `(v - w)**2 / 2 + rate * penalty(v)`: a soft threshold of every weight for the L1 norm,
        of every kernel's norm for L2.
        """
        self._check_device(weights)
        if not chosen:
            return
        shrunk, strengths = [weights[index] for index in chosen], [self._strengths[index] for index in chosen]
        amounts = list(torch._foreach_mul(strengths, rate))
        if self._norm == "l1":
            removed = list(torch._foreach_minimum(shrunk, amounts))
            torch._foreach_neg_(amounts)
            torch._foreach_maximum_(removed, amounts)
            torch._foreach_sub_(shrunk, removed)
        else:
            for weight, amount in zip(shrunk, amounts, strict=True):
                weight.mul_((1 - amount / _kernel_norms(weight)).nan_to_num_(nan=0.0).clamp_(min=0))

    def _check_device(self, weights: Sequence[torch.Tensor]) -> None:
        here, there = weights[0].device, self._strengths[0].device
        if here != there:
            raise ValueError(f"the model moved from {there} to {here} after its Sparsifier was made; move it before")


class _WeightedL1(torch.autograd.Function):
    """`sum(strength * |weight|)` over lists of tensors; zero subgradient at zero.

    A few fused kernels whatever the number of weights: one formula per weight would take several for each of them. A
    weight or strength that changes between the forward and the backward pass raises an error.
    """

    @staticmethod
    def forward(ctx: Any, strengths: list[torch.Tensor], *weights: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*strengths, *weights)
        ctx.set_materialize_grads(False)
        return _sum(torch._foreach_norm(torch._foreach_mul(weights, strengths), 1))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        (gradient,), (_, *needed) = gradients, ctx.needs_input_grad
        if gradient is None:
            return (None,) * (1 + len(needed))
        strengths, weights = ctx.saved_tensors[: len(needed)], ctx.saved_tensors[len(needed) :]
        # Frozen weights get none. Without any other, autograd does not call this.
        directions = torch._foreach_sign(list(compress(weights, needed)))
        torch._foreach_mul_(directions, list(compress(strengths, needed)))
        torch._foreach_mul_(directions, gradient)
        remaining = iter(directions)
        return None, *(next(remaining) if need else None for need in needed)


def _sum(terms: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([term.to(terms[0]) for term in terms]).sum()


def _kernels(weight: torch.Tensor) -> torch.Tensor:
    return weight.reshape(*weight.shape[:2], -1)


def _kernel_norms(weight: torch.Tensor) -> torch.Tensor:
    """L2 norm of every kernel, of a shape that broadcasts to the weight's."""
    norms: torch.Tensor = torch.linalg.vector_norm(_kernels(weight), dim=2)
    return norms.view(*weight.shape[:2], *[1] * (weight.dim() - 2))


def _unit_kernels(weight: torch.Tensor) -> torch.Tensor:
    """Every kernel divided by its L2 norm; zero where it is zero."""
    norms = _kernel_norms(weight)
    return torch.where(norms > 0, weight / norms, torch.zeros_like(weight))
