"""The structured penalty lambda * sum(S' * R_g) of all layers, as a loss term and as a gradient (Sec. 3.3).

Both work on lists of tensors without waiting for the device, so they can be part of a captured graph: new values of
lambda and R_g are copied into the same tensors.
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import compress
from operator import itemgetter
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
        kinds: dict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
        for index, weight in enumerate(weights):
            kinds[weight.device, weight.dtype].append(index)
        self._buckets = [_Bucket(weights, indices) for indices in kinds.values()]
        pairs = (pair for bucket in self._buckets for pair in zip(bucket.indices, bucket.strengths, strict=True))
        self._strengths = [strength for _, strength in sorted(pairs, key=itemgetter(0))]

    def __reduce__(self) -> tuple[Any, ...]:
        # Views that are pickled one by one become separate tensors.
        return _restored, (self._strengths, self._norm)

    def set_strength_(self, index: int, strength: FloatArray) -> None:
        """New lambda * R_g of one layer, `(C_out, C_in)` in the original channel order."""
        target = self._strengths[index]
        values = torch.from_numpy(np.ascontiguousarray(strength)).to(target)
        target.copy_(values.view(*values.shape, *[1] * (target.dim() - 2)).expand_as(target))

    def value(self, weights: Sequence[torch.Tensor]) -> torch.Tensor:
        """The penalty on the weights, in the order of construction, as a differentiable scalar."""
        self._check_device(weights)
        if self._norm == "l1" and not torch.compiler.is_compiling():
            sums: list[torch.Tensor] = [
                _WeightedL1.apply(bucket, *[weights[index] for index in bucket.indices]) for bucket in self._buckets
            ]
        else:
            # The compiler fuses plain formulas by itself.
            sums = [self._term(*pair) for pair in zip(weights, self._strengths, strict=True)]
        return sums[0] if len(sums) == 1 else torch.stack([term.to(sums[0]) for term in sums]).sum()

    def _term(self, weight: torch.Tensor, strength: torch.Tensor) -> torch.Tensor:
        if self._norm == "l1":
            return (weight.abs() * strength).sum()
        norms: torch.Tensor = torch.linalg.vector_norm(_kernels(weight), dim=2)
        return (norms * _kernels(strength)[..., 0]).sum()

    @torch.no_grad()
    def add_gradient_(self, weights: Sequence[torch.Tensor]) -> None:
        """Add the penalty's gradient to the weights' gradients; weights that are not trained are left alone."""
        self._check_device(weights)
        trained, gradients, strengths = [], [], []
        for weight, strength in zip(weights, self._strengths, strict=True):
            if weight.requires_grad:
                if weight.grad is None:
                    weight.grad = torch.zeros_like(weight)
                trained.append(weight)
                gradients.append(weight.grad)
                strengths.append(strength)
        if not trained:
            return
        if self._norm == "l1":
            directions = list(torch._foreach_sign(trained))
        else:
            directions = [_unit_kernels(weight) for weight in trained]
        torch._foreach_addcmul_(gradients, directions, strengths)

    def _check_device(self, weights: Sequence[torch.Tensor]) -> None:
        here, there = weights[0].device, self._strengths[0].device
        if here != there:
            raise ValueError(f"the model moved from {there} to {here} after its Sparsifier was made; move it before")


def _restored(strengths: list[torch.Tensor], norm: Norm) -> StructuredPenalty:
    penalty = StructuredPenalty(strengths, norm)
    torch._foreach_copy_(penalty._strengths, strengths)
    return penalty


class _Bucket:
    """Strengths of the weights of one device and precision, and a buffer for their copy: each contiguous in one tensor.

    The value then takes one fused copy and two kernels, however many weights there are: creating small tensors and
    passing them to autograd is most of the cost of the loss term.
    """

    def __init__(self, weights: Sequence[torch.Tensor], indices: list[int]) -> None:
        self.indices = indices
        chosen = [weights[index] for index in indices]
        size = sum(weight.numel() for weight in chosen)
        self.all_strengths = torch.zeros(size, dtype=chosen[0].dtype, device=chosen[0].device)
        self.all_copies = torch.zeros_like(self.all_strengths)
        self.strengths = _views(self.all_strengths, chosen)
        self.copies = _views(self.all_copies, chosen)


class _WeightedL1(torch.autograd.Function):
    """`sum(strength * |weight|)` over the weights of a bucket; zero subgradient at zero.

    The strengths are saved as one tensor instead of passing through autograd one by one. A weight or strength that
    changes between the forward and the backward pass raises an error.
    """

    @staticmethod
    def forward(ctx: Any, bucket: _Bucket, *weights: torch.Tensor) -> torch.Tensor:
        ctx.strengths = bucket.strengths
        ctx.save_for_backward(bucket.all_strengths, *weights)
        ctx.set_materialize_grads(False)
        torch._foreach_copy_(bucket.copies, weights)
        value: torch.Tensor = torch.linalg.vector_norm(bucket.all_copies.mul_(bucket.all_strengths), 1)
        return value

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        (gradient,), (_, *weights), (_, *needed) = gradients, ctx.saved_tensors, ctx.needs_input_grad
        if gradient is None:
            return (None,) * (1 + len(weights))
        # Frozen weights are left out. Those that come through got one: without any, autograd does not call this.
        directions = torch._foreach_sign(list(compress(weights, needed)))
        torch._foreach_mul_(directions, list(compress(ctx.strengths, needed)))
        torch._foreach_mul_(directions, gradient)
        remaining = iter(directions)
        return None, *(next(remaining) if need else None for need in needed)


def _views(flat: torch.Tensor, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Consecutive parts of a flat tensor, each in the shape and memory format of a weight."""
    views, begin = [], 0
    for weight in weights:
        # The fused kernels want the memory format of the weights; that of an empty one, since a weight may have gaps.
        strides = torch.empty_like(weight, device="meta").stride()
        views.append(flat.as_strided(weight.shape, strides, begin))
        begin += weight.numel()
    return views


def _kernels(weight: torch.Tensor) -> torch.Tensor:
    return weight.reshape(*weight.shape[:2], -1)


def _unit_kernels(weight: torch.Tensor) -> torch.Tensor:
    """Every kernel divided by its L2 norm; zero where it is zero."""
    norms = torch.linalg.vector_norm(_kernels(weight), dim=2).view(*weight.shape[:2], *[1] * (weight.dim() - 2))
    return torch.where(norms > 0, weight / norms, torch.zeros_like(weight))
