"""Batch norms folded into the layers before them: those of PyTorch, and others that compute the same in eval mode."""

import operator
from typing import cast

import torch
from torch import fx, nn
from torch.fx.node import Argument
from torch.nn import functional
from torch.nn.utils.fusion import fuse_conv_bn_weights

from strucspars.channels.rules import BATCH_NORMS
from strucspars.channels.tracing import (
    argument,
    asks_for_shape,
    free_name,
    has_plain_forward,
    source_shape,
    tensor_shape,
)
from strucspars.nn.batch_norms import after_the_norm, is_frozen_batch_norm
from strucspars.nn.layers import DENSE_AND_GROUPED_TYPES, flush_denormals_, like_memory_format

NORM_OF_DIMENSIONS: dict[int, type[nn.Module]] = {
    2: nn.BatchNorm1d,
    3: nn.BatchNorm1d,
    4: nn.BatchNorm2d,
    5: nn.BatchNorm3d,
}
TENSOR_NAMES = ("running_mean", "running_var", "weight", "bias")


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
    """Let modules of PyTorch compute batch norms by function, as in timm, and frozen ones of torchvision, in place."""
    for node in list(graph_module.graph.nodes):
        if node.target is functional.batch_norm and argument(node, 5, "training", default=False) is False:
            _replace_function_(graph_module, node)
        elif node.op == "call_module":
            norm = graph_module.get_submodule(node.target)
            # The frozen one takes an image without a batch too, and gives it one.
            if is_frozen_batch_norm(norm) and has_plain_forward(norm) and len(source_shape(node)) == 4:
                tensors = [norm.get_buffer(name) for name in TENSOR_NAMES]
                chain = {f"{node.target}_norm": _batch_norm(tensors, cast(nn.BatchNorm2d, norm).eps, 4)}
                chain |= {f"{node.target}_{name}": module for name, module in after_the_norm(norm).items()}
                _replace_(graph_module, node, node.args[0], chain)


def _replace_function_(graph_module: fx.GraphModule, node: fx.Node) -> None:
    reads = [argument(node, place, name) for place, name in enumerate(TENSOR_NAMES, start=1)]
    known = [isinstance(read, fx.Node) and read.op == "get_attr" for read in reads]
    if not all(known[:2]) or not all(known[place] or reads[place] is None for place in (2, 3)):
        return
    tensors = [None if read is None else operator.attrgetter(str(read.target))(graph_module) for read in reads]
    norm = _batch_norm(tensors, argument(node, 7, "eps", default=1e-5), len(tensor_shape(node) or ()))
    owner = str(reads[0].target).rpartition(".")[0]
    _replace_(graph_module, node, argument(node, 0, "input"), {f"{owner}.norm" if owner else "norm": norm})
    for read in reads:
        if read is not None and not read.users:
            graph_module.graph.erase_node(read)


def _replace_(graph_module: fx.GraphModule, node: fx.Node, source: Argument, chain: dict[str, nn.Module]) -> None:
    """Let modules, one after the other, compute what a node computes."""
    last = source
    with graph_module.graph.inserting_before(node):
        for wanted_name, module in chain.items():
            name = free_name(graph_module, wanted_name)
            graph_module.add_submodule(name, module)
            last = graph_module.graph.call_module(name, (last,))
            last.meta = dict(node.meta)
    node.replace_all_uses_with(cast(fx.Node, last))
    graph_module.graph.erase_node(node)


def _batch_norm(tensors: list[torch.Tensor | None] | list[torch.Tensor], eps: float, dimensions: int) -> nn.Module:
    mean = cast(torch.Tensor, tensors[0])
    norm = NORM_OF_DIMENSIONS[dimensions](len(mean), eps=eps, device=mean.device, dtype=mean.dtype).eval()
    for name, tensor in zip(TENSOR_NAMES, tensors, strict=True):
        if tensor is not None:
            getattr(norm, name).data = tensor.detach().clone()
    return norm
