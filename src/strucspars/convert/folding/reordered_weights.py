"""Weights for inputs and outputs that come in another order: tensors, then modules."""

from typing import cast

import torch
from torch import nn

from strucspars.convert.folding.group_matching import Placement
from strucspars.core.arrays import IntArray
from strucspars.core.permutation import inverse
from strucspars.nn.shuffled import (
    GROUPED_TYPES,
    GroupLinear,
    ShuffledGroupLinear,
    channel_orders,
    is_grouped,
    like_memory_format,
)

PLAIN_TYPES: dict[type[nn.Module], type[nn.Module]] = {
    grouped: GroupLinear if grouped is ShuffledGroupLinear else dense for dense, grouped in GROUPED_TYPES.items()
}


def reordered_dense_weight(weight: torch.Tensor, out_order: IntArray, in_order: IntArray) -> torch.Tensor:
    """The weight `(C_out, C_in, *kernel)` that reads `in_order` and puts out `out_order`."""
    rows = weight.index_select(0, _indices(out_order, weight))
    return like_memory_format(rows.index_select(1, _indices(in_order, weight)), weight)


def reordered_grouped_weight(
    weight: torch.Tensor, num_groups: int, out_order: IntArray, in_order: IntArray
) -> torch.Tensor:
    """The weight `(C_out, C_in / G, *kernel)` that reads `in_order` and puts out `out_order`.

    Both orders count channels as the weight has them, and bring the groups whole and in the same sequence.
    """
    in_width = weight.shape[1]
    columns = torch.from_numpy(in_order % in_width).to(weight.device)
    columns = columns.view(num_groups, 1, in_width).expand(-1, weight.shape[0] // num_groups, -1)
    columns = columns.reshape(weight.shape[0], in_width, *[1] * (weight.dim() - 2)).expand_as(weight)
    return like_memory_format(weight.index_select(0, _indices(out_order, weight)).gather(1, columns), weight)


def reorder_dense_(module: nn.Module, out_order: IntArray, in_order: IntArray) -> None:
    """Let a layer of one group read and put out other orders, in place."""
    weight = module.get_parameter("weight")
    weight.data = reordered_dense_weight(weight.data, out_order, in_order)
    _select_(module, ("bias",), out_order)


def reorder_channelwise_(module: nn.Module, order: IntArray) -> None:
    """Let a depthwise convolution or a batch norm see its channels in another order, in place."""
    _select_(module, ("weight", "bias", "running_mean", "running_var"), order)


def reorder_grouped_(module: nn.Module, placed: Placement) -> None:
    """Let a grouped layer compute as placed, in place; the shuffles that it had inside are gone."""
    out_order, in_order = placed.out_order, placed.in_order
    if is_grouped(module):
        # The weight's rows and columns are in grouped order: find the natural channels among them.
        out_order = channel_orders(module)["out_inverse"].cpu().numpy()[out_order]
        in_order = inverse(channel_orders(module)["in_perm"].cpu().numpy())[in_order]
        del module.in_perm, module.out_inverse
        module.__class__ = PLAIN_TYPES[type(module)]
    weight = module.get_parameter("weight")
    groups = cast(nn.Conv2d, module).groups
    weight.data = reordered_grouped_weight(weight.data, groups, out_order, in_order)
    _select_(module, ("bias",), out_order)


def _select_(module: nn.Module, names: tuple[str, ...], order: IntArray) -> None:
    for name in names:
        tensor = module._parameters.get(name, module._buffers.get(name))
        if tensor is not None:
            tensor.data = like_memory_format(tensor.data.index_select(0, _indices(order, tensor)), tensor)


def _indices(order: IntArray, like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(order).to(like.device)
