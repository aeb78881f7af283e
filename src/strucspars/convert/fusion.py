"""Bring a folded graph into fused convolutions: one call for each with the gathers, addition and ReLU around it.

Convolutions that are no plain `nn.Conv2d`, and everything else, stay as they are.
"""

import operator
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import cast, final

import torch
from torch import Tensor, fx, nn
from torch.fx.passes.shape_prop import TensorMetadata
from torch.nn import functional

from strucspars.channels.tracing import free_name, has_plain_forward, tensor_shape
from strucspars.kernels.fused_conv import FusedConv, MaxPool, Pair, reference
from strucspars.kernels.kernel import Run

RELU_CALLS = (functional.relu, torch.relu, "relu", "relu_")
SUM_CALLS = (operator.add, operator.iadd, torch.add, "add", "add_")
IN_PLACE_SUMS = (operator.iadd, "add_")
# In eval mode.
IDENTITIES = (nn.Identity, nn.Dropout, nn.Dropout2d)
# Channels of a batch of images, counted from either end.
CHANNEL_AXES = (1, -3)


@final
class ConvStep(nn.Module):
    """A fused convolution in a graph; `run` computes it, by plain operations until another implementation is set.

    `name` is that of the layer in the network.
    """

    def __init__(self, name: str, conv: FusedConv) -> None:
        super().__init__()
        self.name = name
        self.set_conv(conv)

    def set_conv(self, conv: FusedConv) -> None:
        """Compute this convolution from now on, by plain operations."""
        self.conv = conv
        self.run: Run = partial(reference, conv)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Compute the convolution with all that was fused into it."""
        return self.run(x, residual)

    def extra_repr(self) -> str:
        """What `print` shows."""
        conv = self.conv
        return f"{conv.in_channels}, {conv.out_channels}, kernel_size={conv.kernel_size}, groups={conv.groups}"


def fuse_convolutions_(graph_module: fx.GraphModule) -> dict[fx.Node, ConvStep]:
    """Replace plain convolutions, and what can be fused into each, by a `ConvStep`, in place; returns their calls."""
    _remove_identities_(graph_module)
    steps: dict[fx.Node, ConvStep] = {}
    for node in list(graph_module.graph.nodes):
        if _is_plain_convolution(node, graph_module):
            call, step = _fused(node, graph_module)
            steps[call] = step
    _move_biases_(steps)
    for node in list(graph_module.graph.nodes):
        if node.op == "get_attr" and not node.users:
            graph_module.graph.erase_node(node)
    graph_module.delete_all_unused_submodules()
    graph_module.graph.lint()
    graph_module.recompile()
    return steps


def _remove_identities_(graph_module: fx.GraphModule) -> None:
    """Remove the calls that return their input: networks keep places for other layers so."""
    for node in list(graph_module.graph.nodes):
        if node.op != "call_module" or len(node.args) != 1 or node.kwargs:
            continue
        module = graph_module.get_submodule(str(node.target))
        if type(module) in IDENTITIES and has_plain_forward(module):
            node.replace_all_uses_with(node.args[0])
            graph_module.graph.erase_node(node)


def _is_plain_convolution(node: fx.Node, graph_module: fx.GraphModule) -> bool:
    if node.op != "call_module" or len(node.args) != 1 or len(tensor_shape(node) or ()) != 4:
        return False
    module = graph_module.get_submodule(str(node.target))
    return (
        type(module) is nn.Conv2d
        and has_plain_forward(module)
        and module.padding_mode == "zeros"
        and not isinstance(module.padding, str)
        and module.weight.is_floating_point()
    )


def _fused(node: fx.Node, graph_module: fx.GraphModule) -> tuple[fx.Node, ConvStep]:
    """Put one call in the place of a convolution and of all calls before and after it that it can absorb."""
    module = cast(nn.Conv2d, graph_module.get_submodule(str(node.target)))
    weight = module.weight.detach()
    bias = weight.new_zeros(len(weight)) if module.bias is None else module.bias.detach()
    conv = FusedConv(
        weight=weight,
        bias=bias,
        groups=module.groups,
        stride=_pair(module.stride),
        padding=_pair(cast(Pair, module.padding)),
        dilation=_pair(module.dilation),
    )
    conv, source, before = _with_inputs(conv, node, graph_module)
    conv, residual, after = _with_outputs(conv, node, graph_module)
    step = ConvStep(str(node.target), conv)
    last = after[-1] if after else node
    name = free_name(graph_module, str(node.target))
    graph_module.add_submodule(name, step)
    with graph_module.graph.inserting_after(last):
        call = graph_module.graph.call_module(name, (source,) if residual is None else (source, residual))
    call.meta = dict(last.meta)
    last.replace_all_uses_with(call)
    for replaced in (*reversed(after), node, *before):
        # Others may read the gathered input too.
        if not replaced.users:
            graph_module.graph.erase_node(replaced)
    return call, step


def _pair(values: tuple[int, ...]) -> Pair:
    height, width = values
    return height, width


def _with_inputs(
    conv: FusedConv, node: fx.Node, graph_module: fx.GraphModule
) -> tuple[FusedConv, fx.Node, list[fx.Node]]:
    """Absorb gathers of the input, and the choice of positions that `fold` makes before them."""
    absorbed: list[fx.Node] = []
    source = cast(fx.Node, node.args[0])
    while True:
        order, steps = _gather_order(source, graph_module), _chosen_positions(source)
        if order is not None:
            conv = replace(conv, in_order=order if conv.in_order is None else order[conv.in_order])
        elif steps is not None and conv.is_pointwise:
            conv = replace(conv, stride=steps)
        else:
            return conv, source, absorbed
        absorbed.append(source)
        source = cast(fx.Node, source.args[0])


def _with_outputs(
    conv: FusedConv, node: fx.Node, graph_module: fx.GraphModule
) -> tuple[FusedConv, fx.Node | None, list[fx.Node]]:
    """Absorb gathers, the addition of a residual, ReLU and a pooling, while nothing else reads their inputs."""
    absorbed: list[fx.Node] = []
    residual: fx.Node | None = None
    last = node
    while len(last.users) == 1 and conv.pool is None:
        (user,) = last.users
        order = _gather_order(user, graph_module)
        if order is not None and residual is None:
            conv = replace(
                conv,
                bias=conv.bias[order],
                out_order=order if conv.out_order is None else conv.out_order[order],
            )
        elif residual is None and not conv.relu and (other := _other_summand(user, last)) is not None:
            residual = other
        elif _is_relu(user, graph_module) and not conv.relu:
            conv = replace(conv, relu=True)
        elif (pool := _max_pool(user, graph_module)) is not None and residual is None:
            conv = replace(conv, pool=pool)
        else:
            break
        absorbed.append(user)
        last = user
    return conv, residual, absorbed


def _gather_order(node: fx.Node, graph_module: fx.GraphModule) -> Tensor | None:
    """The order of a gather of channels; None for any other call."""
    if node.op != "call_function" or node.target is not torch.index_select or len(node.args) != 3:
        return None
    _, axis, order = node.args
    if axis not in CHANNEL_AXES or len(tensor_shape(node) or (0,) * 4) != 4 or not isinstance(order, fx.Node):
        return None
    return cast(Tensor, operator.attrgetter(str(order.target))(graph_module)) if order.op == "get_attr" else None


def _chosen_positions(node: fx.Node) -> Pair | None:
    """The strides of a pooling of single positions; None for any other call."""
    if node.op != "call_function" or node.target is not functional.max_pool2d or len(node.args) != 1:
        return None
    given = dict(node.kwargs)
    if given.keys() != {"kernel_size", "stride"} or given["kernel_size"] != 1:
        return None
    return _pair(cast(Pair, given["stride"]))


def _other_summand(node: fx.Node, last: fx.Node) -> fx.Node | None:
    """What a sum of two tensors of one shape adds to the given one; None for any other call."""
    if node.op not in ("call_function", "call_method") or node.target not in SUM_CALLS or node.kwargs:
        return None
    if len(node.args) != 2 or not all(isinstance(value, fx.Node) for value in node.args):
        return None
    one, two = cast(tuple[fx.Node, fx.Node], node.args)
    other = two if one is last else one
    is_read_later = node.target in IN_PLACE_SUMS and other is one and any(node < user for user in other.users)
    is_alike = _kind(one) is not None and _kind(one) == _kind(two)
    return other if is_alike and not is_read_later and other is not last else None


def _kind(node: fx.Node) -> tuple[object, ...] | None:
    meta = node.meta.get("tensor_meta")
    return (tuple(meta.shape), meta.dtype) if isinstance(meta, TensorMetadata) else None


def _is_relu(node: fx.Node, graph_module: fx.GraphModule) -> bool:
    if node.op == "call_module":
        module = graph_module.get_submodule(str(node.target))
        return type(module) is nn.ReLU and has_plain_forward(module)
    return node.op in ("call_function", "call_method") and node.target in RELU_CALLS


def _max_pool(node: fx.Node, graph_module: fx.GraphModule) -> MaxPool | None:
    """The window of a max pooling of images; None for any other call."""
    module = graph_module.get_submodule(str(node.target)) if node.op == "call_module" else None
    if not isinstance(module, nn.MaxPool2d) or type(module) is not nn.MaxPool2d or not has_plain_forward(module):
        return None
    if module.ceil_mode or module.return_indices or module.dilation not in (1, (1, 1)):
        return None
    window = (module.kernel_size, module.stride, module.padding)
    return MaxPool(*((size, size) if isinstance(size, int) else _pair(size) for size in window))


def gathers_between(steps: Mapping[fx.Node, ConvStep]) -> Iterator[tuple[ConvStep, ConvStep]]:
    """Convolutions (writer, reader) with a gather between them that either could absorb."""
    for call, reader in steps.items():
        source = call.args[0]
        if not isinstance(source, fx.Node) or source not in steps or len(source.users) > 1:
            continue
        writer = steps[source]
        is_added_to = len(source.args) > 1
        if not is_added_to and (writer.conv.out_order is not None or reader.conv.in_order is not None):
            yield writer, reader


def with_gather_read(writer: FusedConv, reader: FusedConv) -> tuple[FusedConv, FusedConv]:
    """The same two convolutions, the second directly after the first, with the gather between them in the second."""
    order = writer.out_order
    if order is None:
        return writer, reader
    bias = torch.empty_like(writer.bias).index_copy_(0, order, writer.bias)
    in_order = order if reader.in_order is None else order[reader.in_order]
    return replace(writer, bias=bias, out_order=None), replace(reader, in_order=in_order)


def with_gather_written(writer: FusedConv, reader: FusedConv) -> tuple[FusedConv, FusedConv]:
    """The same two convolutions with the gather between them in the first."""
    order = reader.in_order
    if order is None:
        return writer, reader
    out_order = order if writer.out_order is None else writer.out_order[order]
    return replace(writer, bias=writer.bias[order], out_order=out_order), replace(reader, in_order=None)


def _move_biases_(steps: dict[fx.Node, ConvStep]) -> None:
    """Let the convolution that adds another's result add its bias too: libraries compute a bias alone in a pass."""
    for call, step in steps.items():
        residual = call.args[-1]
        if len(call.args) == 1 or not isinstance(residual, fx.Node) or len(residual.users) > 1:
            continue
        source = steps.get(residual)
        if source is not None and not source.conv.relu and source.conv.pool is None:
            step.set_conv(replace(step.conv, bias=step.conv.bias + source.conv.bias))
            source.set_conv(replace(source.conv, bias=torch.zeros_like(source.conv.bias)))
