"""The structured penalty lambda * sum(S' * R_g) of all layers, as a loss term and as a gradient (Sec. 3.3).

Both work on lists of tensors at once, without waiting for the device, so that they cost little and can be part of a
captured graph: new values of lambda and R_g are copied into the same tensors.
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import compress
from typing import Any

import numpy as np
import torch

from strucspars.core.checks import FloatArray
from strucspars.core.importance import Norm


class StructuredPenalty:
    """The penalty on a list of weights, with strengths that change from epoch to epoch.

    It holds two tensors of the weights' size, the strengths and a buffer, but not the weights: every call takes them,
    since a module's weight may be replaced (`load_state_dict(assign=True)`).
    """

    def __init__(self, weights: Sequence[torch.Tensor], norm: Norm) -> None:
        self._norm = norm
        kinds: dict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
        for index, weight in enumerate(weights):
            kinds[weight.device, weight.dtype].append(index)
        self._buckets = [_Bucket(weights, indices) for indices in kinds.values()]
        self._strengths = self._strengths_by_index()

    def __getstate__(self) -> dict[str, Any]:
        return {"_norm": self._norm, "_buckets": self._buckets}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._strengths = self._strengths_by_index()

    def _strengths_by_index(self) -> list[torch.Tensor]:
        strengths = {
            index: strength
            for bucket in self._buckets
            for index, strength in zip(bucket.indices, bucket.strengths, strict=True)
        }
        return [strengths[index] for index in range(len(strengths))]

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


# Shape, strides and beginning of a view.
_Layout = tuple[torch.Size, tuple[int, ...], int]


class _Bucket:
    """Strengths of the weights of one device and precision, and a buffer for their copy: each contiguous in one tensor.

    The value then takes one fused copy and two plain kernels, however many weights there are. Most of the cost of the
    loss term is work on the host: creating small tensors and passing them to autograd.
    """

    def __init__(self, weights: Sequence[torch.Tensor], indices: list[int]) -> None:
        self.indices = indices
        chosen = [weights[index] for index in indices]
        self._layouts = _side_by_side(chosen)
        size = sum(weight.numel() for weight in chosen)
        self.all_strengths = torch.zeros(size, dtype=chosen[0].dtype, device=chosen[0].device)
        self._make_views()

    def __getstate__(self) -> dict[str, Any]:
        # Without the views: pickled one by one, they would be restored as separate tensors.
        return {"indices": self.indices, "_layouts": self._layouts, "all_strengths": self.all_strengths}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._make_views()

    def _make_views(self) -> None:
        self.all_copies = torch.zeros_like(self.all_strengths)
        self.strengths = [self.all_strengths.as_strided(*layout) for layout in self._layouts]
        self.copies = [self.all_copies.as_strided(*layout) for layout in self._layouts]


class _WeightedL1(torch.autograd.Function):
    """`sum(strength * |weight|)` over the weights of a bucket; zero subgradient at zero.

    The strengths do not pass through autograd, which would look at each of them. They are saved as one tensor: like a
    weight that changes between the forward and the backward pass, strengths that do raise an error.
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


def _side_by_side(weights: Sequence[torch.Tensor]) -> list[_Layout]:
    """Where the weights lie in one flat tensor, each in its shape and memory format."""
    layouts, begin = [], 0
    for weight in weights:
        # The fused kernels want the memory format of the weights; like an empty one, since a weight may have gaps.
        layouts.append((weight.shape, torch.empty_like(weight, device="meta").stride(), begin))
        begin += weight.numel()
    return layouts


def _kernels(weight: torch.Tensor) -> torch.Tensor:
    return weight.reshape(*weight.shape[:2], -1)


def _unit_kernels(weight: torch.Tensor) -> torch.Tensor:
    """Every kernel divided by its L2 norm; zero where it is zero."""
    norms = torch.linalg.vector_norm(_kernels(weight), dim=2).view(*weight.shape[:2], *[1] * (weight.dim() - 2))
    return torch.where(norms > 0, weight / norms, torch.zeros_like(weight))
