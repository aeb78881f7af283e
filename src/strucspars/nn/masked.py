"""The masked form of a grouped layer: still dense, with the pruned weights held at zero.

The same function as the grouped form, and on GPUs faster to finetune. Masking multiplies in the forward pass, so pruned
weights take no part and get no gradient, whatever scaler or wrapper is used. They start at zero and stay there, unless
an optimizer moves them by what it remembers from before: `mask_` clears that.
"""

from typing import cast

import torch
from torch import nn
from torch.nn import functional

from strucspars.core.plan import LayerPlan
from strucspars.nn.grouped_weights import kept_connections


class _MaskedConv(nn.modules.conv._ConvNd):
    mask: torch.Tensor

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        convolved: torch.Tensor = self._conv_forward(input, self.weight * self.mask, self.bias)
        return convolved


class MaskedConv1d(_MaskedConv, nn.Conv1d):
    """`nn.Conv1d` whose weight is multiplied by a mask."""


class MaskedConv2d(_MaskedConv, nn.Conv2d):
    """`nn.Conv2d` whose weight is multiplied by a mask."""


class MaskedConv3d(_MaskedConv, nn.Conv3d):
    """`nn.Conv3d` whose weight is multiplied by a mask."""


class MaskedLinear(nn.Linear):
    """`nn.Linear` whose weight is multiplied by a mask."""

    mask: torch.Tensor

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The dense layer with the pruned connections cut."""
        return functional.linear(input, self.weight * self.mask, self.bias)


MASKED_TYPES: dict[type[nn.Module], type[nn.Module]] = {
    nn.Conv1d: MaskedConv1d,
    nn.Conv2d: MaskedConv2d,
    nn.Conv3d: MaskedConv3d,
    nn.Linear: MaskedLinear,
}
DENSE_TYPES = {masked: dense for dense, masked in MASKED_TYPES.items()}


def dense_type(module: nn.Module) -> type[nn.Module]:
    """The type that a layer has, or had before it was masked."""
    return DENSE_TYPES.get(type(module), type(module))


def mask_module_(module: nn.Module, layer: LayerPlan) -> None:
    """Turn a dense layer into its masked form, in place, and zero what the plan prunes."""
    dense = cast(nn.Conv2d, module)
    kept = kept_connections(layer).to(dense.weight.device)
    mask = kept.view(*kept.shape, *[1] * (dense.weight.dim() - 2)).to(dense.weight.dtype)
    with torch.no_grad():
        dense.weight.mul_(mask)
        if dense.weight.grad is not None:
            dense.weight.grad.mul_(mask)
    dense.__class__ = cast(type[nn.Conv2d], MASKED_TYPES[type(module)])
    # Not persistent: the plan knows it, and the model's keys do not change.
    dense.register_buffer("mask", mask, persistent=False)


def unmask_module_(module: nn.Module) -> None:
    """Turn a masked layer back into the dense one it was, pruned weights at zero."""
    masked = cast(MaskedConv2d, module)
    with torch.no_grad():
        masked.weight.mul_(masked.mask)
    del masked.mask
    masked.__class__ = cast(type[MaskedConv2d], DENSE_TYPES[type(module)])
