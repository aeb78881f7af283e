"""What operations do to channels: one table of rules. Operations that are not in it get and give the natural order."""

import math
import operator
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import fx, nn
from torch.nn import functional

from strucspars.channels.graph import ChannelGraph, Rule, register_channel_rule
from strucspars.channels.orders import GroupedLayer, Layout
from strucspars.channels.tracing import (
    SHAPE_METHODS,
    SPLIT_FUNCTIONS,
    SPLIT_METHODS,
    argument,
    asks_for_shape,
    source_shape,
    tensor_bytes,
    tensor_shape,
    tensor_shapes,
)
from strucspars.core.permutation import inverse
from strucspars.nn.layers import DENSE_AND_GROUPED_TYPES, channel_orders, channels, groups_of_weight, is_grouped

# In eval mode the synchronised one is like the others.
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)

# Why channels that can be in any order still have to be there, all of them.
FROM_OUTSIDE = "they are inputs of the network, or come from an operation that is not known"
IN_THE_CODE = "the network's code has their number in it"


# Layers and norms, whose weights follow the layouts.


def _layer(node: fx.Node, graph: ChannelGraph) -> Layout:
    """A convolution or linear layer: depthwise, dense or grouped."""
    module = graph.module(node)
    out_channels, in_channels = channels(module)
    kernel_axes = 0 if isinstance(module, nn.Linear) else module.get_parameter("weight").dim() - 2
    axis = len(source_shape(node)) - 1 - kernel_axes
    inputs = graph.source(node)
    if inputs is None or inputs.axis != axis:
        graph.pin_inputs(node)
        inputs = graph.classes.new(in_channels, axis, pinned=FROM_OUTSIDE)
    groups = groups_of_weight(module)
    if not is_grouped(module) and groups == in_channels == out_channels > 1:
        graph.channelwise[node] = inputs
        return inputs
    outputs = graph.classes.new(out_channels, axis)
    if groups == 1 and not is_grouped(module):
        graph.dense[node] = inputs, outputs
        return outputs
    in_places, out_places = np.arange(in_channels), np.arange(out_channels)
    if is_grouped(module):
        in_places = inverse(channel_orders(module)["in_perm"].cpu().numpy())
        out_places = channel_orders(module)["out_inverse"].cpu().numpy()
    (source,) = node.all_input_nodes
    steps, shape, in_bytes = skipped_positions(module), source_shape(node), tensor_bytes(source)
    for step, positions in zip(steps, shape[len(shape) - len(steps) :], strict=True):
        in_bytes = in_bytes // positions * -(-positions // step)
    graph.grouped[node] = GroupedLayer(
        num_groups=groups,
        in_places=in_places,
        out_places=out_places,
        inputs=inputs,
        outputs=outputs,
        in_bytes=in_bytes,
        out_bytes=tensor_bytes(node),
    )
    return outputs


def skipped_positions(module: nn.Module) -> tuple[int, ...]:
    """The strides of a 1x1 convolution that reads only some of the positions; empty if a layer reads all of them."""
    if not isinstance(module, nn.modules.conv._ConvNd):
        return ()
    is_padded = module.padding != "valid" and any(module.padding)
    reads_one = all(size == 1 for size in module.kernel_size) and not is_padded
    return tuple(module.stride) if reads_one and any(step > 1 for step in module.stride) else ()


def _channelwise(node: fx.Node, graph: ChannelGraph) -> Layout | None:
    """Every channel is computed alike, with its own entry in the module's tensors."""
    layout, module = graph.source(node), graph.module(node)
    if isinstance(module, nn.PReLU) and module.num_parameters == 1:
        return elementwise(node, graph)
    # One group over all channels has no order in it.
    is_over_some = isinstance(module, nn.GroupNorm) and module.num_groups > 1
    if layout is None or layout.axis != 1 or is_over_some:
        return None
    if isinstance(module, nn.GroupNorm):
        graph.classes.hold(layout, f"GroupNorm {str(node.target)!r} takes the mean over all of them")
    graph.channelwise[node] = layout
    return layout


# Operations entry by entry, on one tensor or several.


def elementwise(node: fx.Node, graph: ChannelGraph) -> Layout | None:
    """Entry by entry: any order is allowed, but all operands must have the same one."""
    return _joined(node, graph, len(tensor_shape(node) or ()))


def _divided(node: fx.Node, graph: ChannelGraph) -> Layout | None:
    """As any operation entry by entry, but channels that are zero divide zero by zero."""
    divisor = argument(node, 1, "other")
    if isinstance(divisor, fx.Node):
        graph.classes.hold(graph.layouts.get(divisor), "something is divided by them")
    return elementwise(node, graph)


def _joined(node: fx.Node, graph: ChannelGraph, dimensions: int) -> Layout | None:
    """All operands in one order; those that have one entry for all channels, or none, do not matter."""
    axes = set()
    for source in node.all_input_nodes:
        layout = graph.layouts.get(source)
        if layout is not None and graph.classes.channels(layout) > 1:
            axes.add(layout.axis + dimensions - len(tensor_shape(source) or ()))
    if len(axes) != 1:
        return None
    (axis,) = axes
    joined: Layout | None = None
    for source in node.all_input_nodes:
        shape = tensor_shape(source) or ()
        own_axis = axis - (dimensions - len(shape))
        if own_axis < 0 or shape[own_axis] == 1:
            continue
        layout = graph.layouts.get(source)
        if layout is None:
            return None
        joined = joined or layout
        graph.classes.join(joined, layout)
    return None if joined is None else replace(joined, axis=axis)


def _concatenation(node: fx.Node, graph: ChannelGraph) -> Layout | None:
    parts = argument(node, 0, "tensors")
    axis = argument(node, 1, "dim", "axis", default=0)
    dimensions = len(tensor_shape(node) or ())
    if not isinstance(parts, list | tuple) or not isinstance(axis, int) or not dimensions:
        return None
    axis %= dimensions
    known = [graph.layouts[part] for part in parts if part in graph.layouts]
    if all(layout.axis != axis for layout in known):
        return _joined(node, graph, dimensions)
    if any(layout.axis != axis or layout.repeat != 1 for layout in known):
        return None
    classes: list[int] = []
    for part in parts:
        layout = graph.layouts.get(part)
        if layout is None:
            shape = tensor_shape(part)
            assert shape is not None
            layout = graph.classes.new(shape[axis], axis, pinned=FROM_OUTSIDE)
        classes += layout.classes
    return Layout(tuple(classes), axis)


# Operations that change the axes of one tensor, or work along some of them.


def _of_source(rule: Callable[[fx.Node, Layout], Layout | None]) -> Rule:
    """The rule of an operation on one tensor, from one that takes its layout."""

    def of_source(node: fx.Node, graph: ChannelGraph) -> Layout | None:
        layout = graph.source(node)
        return None if layout is None else rule(node, layout)

    return of_source


def unordered_positions(num_axes: int) -> Rule:
    """Pooling, padding and other operations on the last `num_axes` axes."""
    return _of_source(lambda node, layout: layout if layout.axis < len(source_shape(node)) - num_axes else None)


def _beside_channels(node: fx.Node, layout: Layout, axes: set[int] | None) -> Layout | None:
    """Changes of these axes, none of which may be that of the channels; None where the axes are not known."""
    return None if axes is None or layout.axis in axes or len(node.all_input_nodes) > 1 else layout


@_of_source
def _resized(node: fx.Node, layout: Layout) -> Layout | None:
    # These work on every axis after the second.
    return layout if layout.axis <= 1 else None


def _softmax(node: fx.Node, graph: ChannelGraph) -> Layout | None:
    layout = graph.source(node)
    axes = _from_front(vars(graph.module(node))["dim"] if node.op == "call_module" else argument(node, 1, "dim"), node)
    return None if layout is None else _beside_channels(node, layout, axes)


def _flattened(node: fx.Node, graph: ChannelGraph) -> Layout | None:
    settings = vars(graph.module(node)) if node.op == "call_module" else {}
    start = settings.get("start_dim", argument(node, 1, "start_dim", default=0))
    return _as_runs(node, graph, start, settings.get("end_dim", argument(node, 2, "end_dim", default=-1)))


def _viewed(node: fx.Node, graph: ChannelGraph) -> Layout | None:
    """`x.view(x.size(0), -1)` and `x.reshape(x.shape[0], -1)`."""
    sizes = node.args[1:]
    if len(sizes) == 1 and isinstance(sizes[0], tuple):
        sizes = sizes[0]
    if len(sizes) != 2 or not isinstance(sizes[0], fx.Node) or sizes[1] != -1:
        return None
    size = sizes[0]
    if size.op == "call_method" and size.target == "size":
        return _as_runs(node, graph, 1, -1) if argument(size, 1, "dim") == 0 else None
    source, index = size.args if size.target is operator.getitem else (None, None)
    is_batch_size = isinstance(source, fx.Node) and asks_for_shape(source) and index == 0
    return _as_runs(node, graph, 1, -1) if is_batch_size else None


def _as_runs(node: fx.Node, graph: ChannelGraph, start: int, end: int) -> Layout | None:
    """All axes after the batch as one: every channel becomes a run of entries."""
    layout, shape = graph.source(node), source_shape(node)
    is_all = len(shape) > 1 and (start % len(shape), end % len(shape)) == (1, len(shape) - 1)
    if layout is None or not is_all or layout.axis != 1:
        return None
    return Layout(layout.classes, 1, layout.repeat * math.prod(shape[2:]))


def _from_front(given: object, node: fx.Node) -> set[int] | None:
    """The axes that a call works on, from the front; None for all of them, or where they are unknown."""
    axes, dimensions = (given,) if isinstance(given, int) else given, len(source_shape(node))
    if not isinstance(axes, list | tuple) or not axes or not all(isinstance(axis, int) for axis in axes):
        return None
    return {axis % dimensions for axis in axes} if dimensions else None


@_of_source
def _reduced(node: fx.Node, layout: Layout) -> Layout | None:
    axes = _from_front(argument(node, 1, "dim", "axis"), node)
    if axes is None or _beside_channels(node, layout, axes) is None:
        return None
    if len(tensor_shape(node) or ()) == len(source_shape(node)):
        return layout
    return replace(layout, axis=layout.axis - sum(axis < layout.axis for axis in axes))


@_of_source
def _squeezed(node: fx.Node, layout: Layout) -> Layout | None:
    axes = _from_front(argument(node, 1, "dim", "axis"), node)
    # Whether an axis before the channels is removed depends on its size, which may differ in the next batch.
    return layout if axes is not None and min(axes) > layout.axis else None


@_of_source
def _unsqueezed(node: fx.Node, layout: Layout) -> Layout | None:
    axis = argument(node, 1, "dim")
    if not isinstance(axis, int):
        return None
    return replace(layout, axis=layout.axis + (axis % (len(source_shape(node)) + 1) <= layout.axis))


def _padded(node: fx.Node, graph: ChannelGraph) -> Layout | None:
    """Constants added before and after the channels are channels too; their order does not matter."""
    layout, amounts = graph.source(node), argument(node, 1, "pad")
    if layout is None or not isinstance(amounts, list | tuple) or not all(isinstance(each, int) for each in amounts):
        return None
    last = len(source_shape(node)) - 1
    pairs = enumerate(zip(amounts[::2], amounts[1::2], strict=True))
    by_axis = {last - place: pair for place, pair in pairs if any(pair)}
    if layout.axis not in by_axis:
        return _beside_channels(node, layout, set(by_axis))
    is_constant = argument(node, 2, "mode", default="constant") == "constant"
    widths = by_axis[layout.axis]
    if not is_constant or min(widths) < 0 or layout.repeat != 1 or len(node.all_input_nodes) > 1:
        return None
    held = IN_THE_CODE
    before, after = (graph.classes.new(width, 0, held=held).classes if width else () for width in widths)
    return Layout((*before, *layout.classes, *after), layout.axis)


def _split(node: fx.Node, graph: ChannelGraph) -> tuple[Layout, ...] | None:
    """Parts of the channels have separate orders; parts along another axis have all channels."""
    layout, shapes, dimensions = graph.source(node), tensor_shapes(node), len(source_shape(node))
    axis = argument(node, 2, "dim", default=0)
    if layout is None or not shapes or not isinstance(axis, int) or len(node.all_input_nodes) > 1:
        return None
    if axis % dimensions != layout.axis:
        return (layout,) * len(shapes)
    widths = [shape[axis] for shape in shapes]
    graph.classes.hold(layout, IN_THE_CODE)
    return graph.classes.divide(layout, widths) if layout.repeat == 1 and min(widths) > 0 else None


def _item(node: fx.Node, graph: ChannelGraph) -> Layout | None:
    """One of the parts that a tensor was split into, or a slice."""
    source, index = node.args
    if isinstance(source, fx.Node) and source in graph.parts:
        return graph.parts[source][index] if isinstance(index, int) else None
    given = index if isinstance(index, tuple) else (index,)
    entries = [entry for entry in given if isinstance(entry, slice)]
    layout = graph.source(node)
    if layout is None or len(entries) < len(given):
        return None
    cut_axes = {axis for axis, entry in enumerate(entries) if entry != slice(None)}
    if layout.axis in cut_axes and len(node.all_input_nodes) == 1:
        return _cut(layout, entries[layout.axis], graph)
    return _beside_channels(node, layout, cut_axes)


def _cut(layout: Layout, entry: slice, graph: ChannelGraph) -> Layout | None:
    """Some neighbouring channels, which have an order of their own."""
    if layout.repeat != 1 or entry.step not in (None, 1):
        return None
    width = graph.classes.channels(layout)
    start, stop, _ = entry.indices(width)
    if start >= stop:
        return None
    graph.classes.hold(layout, IN_THE_CODE)
    parts = graph.classes.divide(layout, [size for size in (start, stop - start, width - stop) if size])
    return parts[1 if start else 0]


def _shape(node: fx.Node, graph: ChannelGraph) -> tuple[Layout, ...] | None:
    """A property of a tensor that does not depend on the order of its channels, perhaps on their number."""
    if not asks_for_shape(node):
        return None
    layout = graph.source(node)
    if layout is not None and _may_read_width(node, layout.axis, len(source_shape(node))):
        graph.classes.hold(layout, "the network's code reads their number")
    return ()


def _may_read_width(node: fx.Node, axis: int, dimensions: int) -> bool:
    """Whether a call that asks for a shape may use the length of an axis."""
    what = str(node.args[1]) if node.target is getattr else str(node.target)
    if what not in ("shape", "size", "numel") or (what != "numel" and not node.users):
        return False
    if what == "size" and isinstance(asked := argument(node, 1, "dim"), int):
        return asked % dimensions == axis
    asked_for = [user.args[1] if user.target is operator.getitem else None for user in node.users if user.users]
    return what == "numel" or any(axis in _axes_of(index, dimensions) for index in asked_for)


def _axes_of(index: object, dimensions: int) -> set[int]:
    """The axes whose lengths are read by an index into a shape; all of them where it is not known."""
    if isinstance(index, int):
        return {index % dimensions}
    known = isinstance(index, slice) and all(
        each is None or isinstance(each, int) for each in (index.start, index.stop, index.step)
    )
    return set(range(dimensions)[index] if known and isinstance(index, slice) else range(dimensions))


register_channel_rule(_layer, *DENSE_AND_GROUPED_TYPES)
register_channel_rule(_channelwise, *BATCH_NORMS, nn.GroupNorm, nn.PReLU)
register_channel_rule(
    elementwise,
    *(nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout),
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish),
    *(nn.Sigmoid, nn.Tanh, nn.Softplus, nn.Softsign, nn.Hardtanh, nn.Hardsigmoid, nn.Hardswish),
    *(operator.add, operator.sub, operator.mul, operator.neg, operator.iadd, operator.isub, operator.imul),
    *(torch.add, torch.sub, torch.mul, torch.neg, torch.abs, torch.exp, torch.clamp, torch.clone),
    *(torch.relu, torch.relu_, torch.sigmoid, torch.tanh, torch.maximum, torch.minimum),
    *(functional.relu, functional.relu_, functional.relu6, functional.leaky_relu, functional.elu, functional.celu),
    *(functional.selu, functional.gelu, functional.silu, functional.mish, functional.sigmoid, functional.tanh),
    *(functional.softplus, functional.softsign, functional.hardtanh, functional.hardsigmoid),
    *(functional.hardswish, functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d),
    *(f"{name}{end}" for name in ("add", "sub", "mul", "neg", "abs", "exp", "clamp") for end in ("", "_")),
    *(f"{name}{end}" for name in ("relu", "sigmoid", "tanh") for end in ("", "_")),
    *("clone", "contiguous", "detach"),
    # By name: folding does not import torchvision.
    "torchvision.ops.stochastic_depth.stochastic_depth",
)
register_channel_rule(_divided, operator.truediv, operator.itruediv, torch.div, "div", "div_")
_POSITIONAL = ("MaxPool", "AvgPool", "AdaptiveAvgPool", "AdaptiveMaxPool", "ConstantPad", "ZeroPad", "ReplicationPad")
_POOLS = ("max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool")
for _axes in (1, 2, 3):
    register_channel_rule(
        unordered_positions(_axes),
        *(getattr(nn, f"{name}{_axes}d") for name in (*_POSITIONAL, "ReflectionPad")),
        *(getattr(functional, f"{name}{_axes}d") for name in _POOLS),
        getattr(torch, f"max_pool{_axes}d"),
    )
register_channel_rule(_resized, nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d, functional.interpolate)
register_channel_rule(
    _softmax,
    *(nn.Softmax, nn.LogSoftmax, functional.softmax, functional.log_softmax, torch.softmax, torch.log_softmax),
    *("softmax", "log_softmax"),
)
register_channel_rule(_reduced, torch.mean, torch.sum, torch.amax, torch.amin, "mean", "sum", "amax", "amin")
register_channel_rule(_flattened, nn.Flatten, torch.flatten, "flatten")
register_channel_rule(_viewed, "view", "reshape")
register_channel_rule(_squeezed, torch.squeeze, "squeeze")
register_channel_rule(_unsqueezed, torch.unsqueeze, "unsqueeze")
register_channel_rule(_padded, functional.pad)
register_channel_rule(_concatenation, torch.cat, torch.concat, torch.concatenate)
register_channel_rule(_split, *SPLIT_FUNCTIONS, *SPLIT_METHODS)
register_channel_rule(_item, operator.getitem)
register_channel_rule(_shape, getattr, *SHAPE_METHODS)
