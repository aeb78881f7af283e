"""Batch norms folded into the layers before them: those of PyTorch, and others that compute the same in eval mode."""

from typing import cast

import torch
from torch import fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

from strucspars.channels.rules import BATCH_NORMS
from strucspars.channels.tracing import (
    asks_for_shape,
    free_name,
    has_plain_forward,
    source_shape,
    tensor_shape,
)
from strucspars.nn.batch_norms import modules_after_norm
from strucspars.nn.layers import DENSE_AND_GROUPED_TYPES, flush_denormals_, like_memory_format


def fold_into_layer_(layer: nn.Module, norm: nn.BatchNorm2d) -> None:
    """Let a convolution or linear layer compute the batch norm after it too, in place. Denormals become zero."""
    weight, bias = layer.get_parameter("weight"), layer._parameters["bias"]

    def doubled(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.detach().double()

    mean, variance = cast(torch.Tensor, norm.running_mean), cast(torch.Tensor, norm.running_var)
    scale, shift = doubled(norm.weight), doubled(norm.bias)
    # The same for a linear layer, whose weight has no kernel axes.
    fused, fused_bias = fuse_conv_bn_weights(
        weight.detach().double(), doubled(bias), mean.double(), variance.double(), norm.eps, scale, shift
    )
    weight.data = like_memory_format(fused.detach().to(weight.dtype), weight.data)
    layer.bias = nn.Parameter(fused_bias.detach().to(weight.dtype))
    flush_denormals_(weight.data)
    flush_denormals_(layer.bias.data)


def fold_batch_norms_(graph_module: fx.GraphModule) -> None:
    """Fold every batch norm that directly follows a layer with no other readers, in place."""
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


def other_norms_as_modules_(graph_module: fx.GraphModule) -> None:
    """Let modules of PyTorch compute the batch norms of other libraries and what follows them there, in place."""
    for node in list(graph_module.graph.nodes):
        norm = graph_module.get_submodule(node.target) if node.op == "call_module" else nn.Identity()
        after = modules_after_norm(norm)
        # Some take an image without a batch too, and give it one.
        if after is None or not has_plain_forward(norm) or len(source_shape(node)) != 4 or norm.running_mean is None:
            continue
        last = node.args[0]
        with graph_module.graph.inserting_before(node):
            for name, module in {"norm": _plain_batch_norm(norm), **after}.items():
                free = free_name(graph_module, f"{node.target}_{name}")
                graph_module.add_submodule(free, module)
                last = graph_module.graph.call_module(free, (last,))
                last.meta = dict(node.meta)
        node.replace_all_uses_with(last)
        graph_module.graph.erase_node(node)


def _plain_batch_norm(norm: nn.Module) -> nn.BatchNorm2d:
    mean = cast(torch.Tensor, norm.running_mean)
    plain = nn.BatchNorm2d(len(mean), eps=cast(nn.BatchNorm2d, norm).eps, device=mean.device, dtype=mean.dtype).eval()
    for name in ("running_mean", "running_var", "weight", "bias"):
        tensor = getattr(norm, name)
        # Without scales to copy, the plain norm starts with ones and zeros.
        if tensor is not None:
            getattr(plain, name).data = tensor.detach().clone()
    return plain
