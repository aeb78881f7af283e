"""Batch norm as part of the layer before it: tensors, then modules, then the graph."""

from typing import cast

import torch
from torch import fx, nn

from strucspars.convert.folding.call_arguments import asks_for_shape
from strucspars.convert.folding.channel_rules import BATCH_NORMS
from strucspars.convert.folding.tracing import has_plain_forward, tensor_shape
from strucspars.nn.shuffled import (
    DENSE_AND_GROUPED_TYPES,
    channel_orders,
    flush_denormals_,
    is_grouped,
    like_memory_format,
)


def batch_norm_as_scale_and_shift(norm: nn.BatchNorm2d) -> tuple[torch.Tensor, torch.Tensor]:
    """What the norm multiplies and adds in eval mode, in double precision."""
    mean, variance = cast(torch.Tensor, norm.running_mean).double(), cast(torch.Tensor, norm.running_var).double()
    scale = (variance + norm.eps).rsqrt()
    if norm.weight is not None:
        scale = scale * norm.weight.data.double()
    shift = -mean * scale
    return scale, shift if norm.bias is None else shift + norm.bias.data.double()


def fold_into_layer_(layer: nn.Module, norm: nn.BatchNorm2d) -> None:
    """Let a convolution or linear layer compute the batch norm after it too, in place. Denormals become zero."""
    weight = layer.get_parameter("weight")
    scale, shift = batch_norm_as_scale_and_shift(norm)
    if is_grouped(layer):
        # The norm knows the natural order, the rows of the weight are in grouped order.
        out_perm = torch.argsort(channel_orders(layer)["out_inverse"])
        scale, shift = scale[out_perm], shift[out_perm]
    scaled = weight.data.double() * scale.view(-1, *[1] * (weight.dim() - 1))
    if layer.bias is not None:
        shift = shift + layer.get_parameter("bias").data.double() * scale
    weight.data = like_memory_format(scaled.to(weight.dtype), weight.data)
    layer.bias = nn.Parameter(shift.to(weight.dtype))
    flush_denormals_(weight.data)
    flush_denormals_(layer.bias.data)


def fold_batch_norms_(graph_module: fx.GraphModule) -> None:
    """Fold every batch norm that directly follows a layer which nothing else looks at, in place."""
    for node in list(graph_module.graph.nodes):
        source = node.args[0] if node.op == "call_module" and node.args else None
        if not isinstance(source, fx.Node) or source.op != "call_module":
            continue
        if any(user is not node and not asks_for_shape(user) for user in source.users):
            continue
        norm, layer = graph_module.get_submodule(node.target), graph_module.get_submodule(str(source.target))
        if _is_foldable_norm(norm) and _takes_a_norm(layer, source):
            fold_into_layer_(layer, cast(nn.BatchNorm2d, norm))
            node.replace_all_uses_with(source)
            graph_module.graph.erase_node(node)


def _is_foldable_norm(norm: nn.Module) -> bool:
    # Without running statistics it normalises by the batch, in eval mode too.
    return type(norm) in BATCH_NORMS and has_plain_forward(norm) and norm.running_mean is not None


def _takes_a_norm(layer: nn.Module, call: fx.Node) -> bool:
    if type(layer) not in DENSE_AND_GROUPED_TYPES or not has_plain_forward(layer):
        return False
    # Batch norm looks at axis 1, a linear layer puts its outputs on the last.
    return not isinstance(layer, nn.Linear) or len(tensor_shape(call) or ()) == 2
