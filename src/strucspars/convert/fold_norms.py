"""Batch norms of other kinds as PyTorch's modules: by function, as in timm's norms with an activation, or frozen."""

from typing import cast

import torch
from torch import fx, nn
from torch.nn import functional

from strucspars.channels.rules import BATCH_NORMS
from strucspars.channels.tracing import (
    argument,
    asks_for_shape,
    attribute,
    free_name,
    has_plain_forward,
    source_shape,
    tensor_shape,
)
from strucspars.nn.batch_norms import after_the_norm, is_frozen_batch_norm
from strucspars.nn.layers import (
    DENSE_AND_GROUPED_TYPES,
    flush_denormals_,
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


BATCH_NORM_OF_DIMENSIONS: dict[int, type[nn.Module]] = {
    2: nn.BatchNorm1d,
    3: nn.BatchNorm1d,
    4: nn.BatchNorm2d,
    5: nn.BatchNorm3d,
}
PARAMETER_NAMES = ("running_mean", "running_var", "weight", "bias")


def batch_norms_as_modules_(graph_module: fx.GraphModule) -> None:
    """Let modules compute what `functional.batch_norm` does with tensors of the network, in place."""
    for node in list(graph_module.graph.nodes):
        if node.target is not functional.batch_norm or argument(node, 5, "training", default=False) is not False:
            continue
        reads = [argument(node, place, name) for place, name in enumerate(PARAMETER_NAMES, start=1)]
        if all(_is_read(read) for read in reads[:2]) and all(read is None or _is_read(read) for read in reads):
            _replace_by_module_(graph_module, node, reads)


def frozen_batch_norms_as_modules_(graph_module: fx.GraphModule) -> None:
    """Let PyTorch's batch norms compute what the frozen ones of torchvision and timm do, in place."""
    for node in list(graph_module.graph.nodes):
        if node.op != "call_module":
            continue
        norm = graph_module.get_submodule(node.target)
        dimensions = len(source_shape(node))
        # The frozen one takes an image without a batch too, and gives it one.
        if is_frozen_batch_norm(norm) and has_plain_forward(norm) and dimensions == 4:
            tensors: list[torch.Tensor | None] = [norm.get_buffer(name) for name in PARAMETER_NAMES]
            # Under another name: what is in the frozen one may be called by itself.
            name = free_name(graph_module, f"{node.target}_norm")
            graph_module.add_submodule(name, _batch_norm(tensors, cast(nn.BatchNorm2d, norm).eps, dimensions))
            node.target = name
            _call_afterwards_(graph_module, node, after_the_norm(norm))


def _call_afterwards_(graph_module: fx.GraphModule, node: fx.Node, modules: dict[str, nn.Module]) -> None:
    """Let modules work, one after the other, on what a node gives."""
    readers, last = list(node.users), node
    for attribute_name, module in modules.items():
        name = free_name(graph_module, f"{node.target}_{attribute_name}")
        graph_module.add_submodule(name, module)
        with graph_module.graph.inserting_after(last):
            last = graph_module.graph.call_module(name, (last,))
        last.meta = dict(node.meta)
    for reader in readers:
        reader.replace_input_with(node, last)


def _is_read(value: object) -> bool:
    return isinstance(value, fx.Node) and value.op == "get_attr"


def _replace_by_module_(graph_module: fx.GraphModule, node: fx.Node, reads: list[fx.Node | None]) -> None:
    owner = str(reads[0].target).rpartition(".")[0] if reads[0] is not None else ""
    name = free_name(graph_module, f"{owner}.norm" if owner else "norm")
    tensors = [None if read is None else attribute(graph_module, str(read.target)) for read in reads]
    eps = argument(node, 7, "eps", default=1e-5)
    graph_module.add_submodule(name, _batch_norm(tensors, eps, len(tensor_shape(node) or ())))
    with graph_module.graph.inserting_before(node):
        call = graph_module.graph.call_module(name, (argument(node, 0, "input"),))
    call.meta = dict(node.meta)
    node.replace_all_uses_with(call)
    graph_module.graph.erase_node(node)
    for read in reads:
        if read is not None and not read.users:
            graph_module.graph.erase_node(read)


def _batch_norm(tensors: list[torch.Tensor | None], eps: float, dimensions: int) -> nn.Module:
    mean = tensors[0]
    assert mean is not None
    norm = BATCH_NORM_OF_DIMENSIONS[dimensions](len(mean), eps=eps, device=mean.device, dtype=mean.dtype).eval()
    for name, tensor in zip(PARAMETER_NAMES, tensors, strict=True):
        if tensor is not None:
            getattr(norm, name).data = tensor.detach().clone()
    return norm
