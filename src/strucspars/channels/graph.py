"""The channel layout of every tensor in a graph, and the layers whose weights follow it."""

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from torch import fx, nn
from torch.nn import functional

from strucspars.channels import axes as axis_rules
from strucspars.channels import rules
from strucspars.channels.classes import Layout, OrderClasses
from strucspars.channels.orders import GroupedLayer, Grouping
from strucspars.channels.tracing import (
    has_plain_forward,
    source_shape,
    tensor_bytes,
    tensor_shape,
    tensor_shapes,
)
from strucspars.core.permutation import inverse
from strucspars.nn.layers import (
    DENSE_AND_GROUPED_TYPES,
    channel_orders,
    channels,
    groups_of_weight,
    is_grouped,
)

POOLING: dict[int, Callable[..., torch.Tensor]] = {
    1: functional.max_pool1d,
    2: functional.max_pool2d,
    3: functional.max_pool3d,
}


def skipped_positions(module: nn.Module) -> tuple[int, ...]:
    """The strides of a convolution that looks at every so many positions alone; empty if it looks at all of them."""
    if not isinstance(module, nn.modules.conv._ConvNd):
        return ()
    # Which of the two paddings counts depends on the padding mode.
    is_padded = (module.padding != "valid" and any(module.padding)) or any(module._reversed_padding_repeated_twice)
    looks_at_one = all(size == 1 for size in module.kernel_size) and not is_padded
    return tuple(module.stride) if looks_at_one and any(step > 1 for step in module.stride) else ()


def read_bytes(node: fx.Node, module: nn.Module) -> int:
    """Size of what a gather before the layer has to copy."""
    (source,) = node.all_input_nodes
    steps, shape = skipped_positions(module), tensor_shape(source)
    assert shape is not None
    size = tensor_bytes(source)
    for step, positions in zip(steps, shape[len(shape) - len(steps) :], strict=True):
        size = size // positions * -(-positions // step)
    return size


def subsample_first_(graph_module: fx.GraphModule, node: fx.Node) -> None:
    """Let pooling take the positions that a strided convolution looks at, and the convolution all that is left."""
    module = graph_module.get_submodule(str(node.target))
    steps = skipped_positions(module)
    if not steps:
        return
    (source,) = node.all_input_nodes
    # Pooling single positions, not a slice: runtimes pool in the layout that their convolutions use.
    pool = POOLING[len(steps)]
    with graph_module.graph.inserting_before(node):
        node.args = (graph_module.graph.call_function(pool, (source,), {"kernel_size": 1, "stride": steps}),)
    cast(nn.Conv2d, module).stride = (1,) * len(steps)


@dataclass(frozen=True)
class ChannelGraph:
    """What the orders of a graph's tensors are bound by.

    Attributes:
        classes: the order classes.
        grouped: by call, the grouped layers, which an order may or may not suit.
        dense: by call, the layouts (inputs, outputs) of layers of one group, which any order suits.
        channelwise: by call, the layout of norms, depthwise convolutions and others with an entry per channel.
        opaque: calls of our grouped layers that must stay as they are.
    """

    classes: OrderClasses = field(default_factory=OrderClasses)
    grouped: dict[fx.Node, GroupedLayer] = field(default_factory=dict)
    dense: dict[fx.Node, tuple[Layout, Layout]] = field(default_factory=dict)
    channelwise: dict[fx.Node, Layout] = field(default_factory=dict)
    opaque: list[fx.Node] = field(default_factory=list)


def channel_graph(graph_module: fx.GraphModule) -> ChannelGraph:
    """Follow the channels through a graph whose shapes are known."""
    return _Walk(graph_module).result()


class _Walk:
    """One pass over the nodes; every rule gives the layout of its node, or None for the natural order."""

    def __init__(self, graph_module: fx.GraphModule) -> None:
        self.graph_module = graph_module
        self.found = ChannelGraph()
        self.classes = self.found.classes
        self.layouts: dict[fx.Node, Layout] = {}
        self.parts: dict[fx.Node, tuple[Layout, ...]] = {}

    def result(self) -> ChannelGraph:
        for node in self.graph_module.graph.nodes:
            layout = self._layout(node)
            if layout is not None and tensor_shape(node) is None:
                self.classes.pin(layout)
            elif layout is not None:
                self.layouts[node] = layout
        return self.found

    def _layout(self, node: fx.Node) -> Layout | None:
        if node.op == "call_module":
            return self._module(node, self.graph_module.get_submodule(str(node.target)))
        if node.op == "call_function":
            return self._function(node, node.target)
        if node.op == "call_method":
            return self._method(node, str(node.target))
        return self._unknown(node)

    def _module(self, node: fx.Node, module: nn.Module) -> Layout | None:
        is_understood = has_plain_forward(module) and len(node.args) == 1 and not node.kwargs
        if is_understood and type(module) in DENSE_AND_GROUPED_TYPES:
            return self._layer(node, module)
        if is_understood and rules.has_entry_per_channel(module):
            return self._channelwise(node)
        if is_understood and rules.is_elementwise_module(module):
            return self._elementwise(node)
        rule = axis_rules.module_rule(module)
        if is_understood and rule is not None:
            return self._by_axes(node, rule)
        if is_grouped(module):
            self.found.opaque.append(node)
        return self._unknown(node)

    def _function(self, node: fx.Node, function: Any) -> Layout | None:
        source = node.args[0] if node.args else None
        if isinstance(source, fx.Node) and source in self.parts:
            return self._part(node, self.parts[source])
        if rules.is_elementwise(function):
            return self._elementwise(node)
        if function in axis_rules.FUNCTION_RULES:
            return self._by_axes(node, axis_rules.FUNCTION_RULES[function])
        if function in rules.CONCATENATIONS:
            return self._concatenation(node)
        if function in rules.SPLIT_FUNCTIONS:
            return self._split(node)
        if function in rules.PAD_FUNCTIONS:
            return self._by_axes(node, self._padded)
        return None if rules.asks_for_shape(node) else self._unknown(node)

    def _method(self, node: fx.Node, name: str) -> Layout | None:
        if name in rules.ELEMENTWISE_METHODS:
            return self._elementwise(node)
        if name in axis_rules.METHOD_RULES:
            return self._by_axes(node, axis_rules.METHOD_RULES[name])
        if name in rules.SPLIT_METHODS:
            return self._split(node)
        return None if rules.asks_for_shape(node) else self._unknown(node)

    def _unknown(self, node: fx.Node) -> Layout | None:
        """Natural order on both sides."""
        for source in node.all_input_nodes:
            for layout in (self.layouts.get(source), *self.parts.get(source, ())):
                self.classes.pin(layout)
        return None

    def _source(self, node: fx.Node) -> Layout | None:
        """Layout of the first argument."""
        source = node.args[0] if node.args else None
        return self.layouts.get(source) if isinstance(source, fx.Node) else None

    def _by_axes(self, node: fx.Node, rule: axis_rules.AxisRule) -> Layout | None:
        source = self._source(node)
        layout = None if source is None else rule(node, source)
        return self._unknown(node) if layout is None else layout

    def _layer(self, node: fx.Node, module: nn.Module) -> Layout:
        out_channels, in_channels = channels(module)
        kernel_axes = 0 if isinstance(module, nn.Linear) else module.get_parameter("weight").dim() - 2
        axis = len(source_shape(node)) - 1 - kernel_axes
        inputs = self._source(node)
        if inputs is None or inputs.axis != axis:
            self._unknown(node)
            inputs = self.classes.new(in_channels, axis, pinned=True)
        groups = groups_of_weight(module)
        if not is_grouped(module) and groups == in_channels == out_channels > 1:
            self.found.channelwise[node] = inputs
            return inputs
        outputs = self.classes.new(out_channels, axis)
        if groups == 1 and not is_grouped(module):
            self.found.dense[node] = inputs, outputs
        else:
            self.found.grouped[node] = GroupedLayer(
                grouping=_grouping(module, groups),
                inputs=inputs,
                outputs=outputs,
                in_bytes=read_bytes(node, module),
                out_bytes=tensor_bytes(node),
            )
        return outputs

    def _channelwise(self, node: fx.Node) -> Layout | None:
        layout = self._source(node)
        if layout is None or layout.axis != 1:
            return self._unknown(node)
        self.found.channelwise[node] = layout
        return layout

    def _elementwise(self, node: fx.Node) -> Layout | None:
        return self._joined(node, len(tensor_shape(node) or ()))

    def _joined(self, node: fx.Node, dimensions: int) -> Layout | None:
        """All operands in one order; those that have one entry for all channels, or none, do not matter."""
        axes = set()
        for source in node.all_input_nodes:
            layout = self.layouts.get(source)
            if layout is not None and self.classes.channels(layout) > 1:
                axes.add(layout.axis + dimensions - len(tensor_shape(source) or ()))
        if len(axes) != 1:
            return self._unknown(node)
        (axis,) = axes
        joined: Layout | None = None
        for source in node.all_input_nodes:
            shape = tensor_shape(source) or ()
            own_axis = axis - (dimensions - len(shape))
            if own_axis < 0 or shape[own_axis] == 1:
                continue
            layout = self.layouts.get(source)
            if layout is None:
                return self._unknown(node)
            joined = joined or layout
            self.classes.join(joined, layout)
        return None if joined is None else joined.at(axis)

    def _concatenation(self, node: fx.Node) -> Layout | None:
        parts = rules.argument(node, 0, "tensors")
        axis = rules.argument(node, 1, "dim", "axis", default=0)
        dimensions = len(tensor_shape(node) or ())
        if not isinstance(parts, list | tuple) or not isinstance(axis, int) or not dimensions:
            return self._unknown(node)
        axis %= dimensions
        known = [self.layouts[part] for part in parts if part in self.layouts]
        if all(layout.axis != axis for layout in known):
            return self._joined(node, dimensions)
        if any(layout.axis != axis or layout.repeat != 1 for layout in known):
            return self._unknown(node)
        layouts = [self.layouts.get(part) or self._natural(part, axis) for part in parts]
        return Layout(tuple(name for layout in layouts for name in layout.classes), axis)

    def _natural(self, node: fx.Node, axis: int) -> Layout:
        shape = tensor_shape(node)
        assert shape is not None
        return self.classes.new(shape[axis], axis, pinned=True)

    def _padded(self, node: fx.Node, layout: Layout) -> Layout | None:
        """Constants before the channels and after them are channels too, in any order: they are all the same."""
        amounts = rules.pad_amounts(node, len(source_shape(node)))
        if amounts is None or layout.axis not in amounts:
            return axis_rules.beside_channels(node, layout, None if amounts is None else set(amounts))
        is_constant = rules.argument(node, 2, "mode", default="constant") == "constant"
        if not is_constant or min(amounts[layout.axis]) < 0 or layout.repeat != 1 or len(node.all_input_nodes) > 1:
            return None
        before, after = (self.classes.new(width, 0).classes if width else () for width in amounts[layout.axis])
        return Layout((*before, *layout.classes, *after), layout.axis)

    def _split(self, node: fx.Node) -> Layout | None:
        """Parts of the channels keep to themselves; parts along another axis have all the channels."""
        layout, shapes, dimensions = self._source(node), tensor_shapes(node), len(source_shape(node))
        axis = rules.argument(node, 2, "dim", default=0)
        if layout is None or not shapes or not isinstance(axis, int) or len(node.all_input_nodes) > 1:
            return self._unknown(node)
        widths = [shape[axis] for shape in shapes]
        if axis % dimensions != layout.axis:
            self.parts[node] = (layout,) * len(shapes)
        elif layout.repeat == 1 and min(widths) > 0:
            self.parts[node] = self.classes.divide(layout, widths)
        else:
            return self._unknown(node)
        return None

    def _part(self, node: fx.Node, parts: tuple[Layout, ...]) -> Layout | None:
        """One of the parts that a tensor was split into."""
        index = node.args[1] if node.target is operator.getitem else None
        return parts[index] if isinstance(index, int) else self._unknown(node)


def _grouping(module: nn.Module, groups: int) -> Grouping:
    out_channels, in_channels = channels(module)
    in_places, out_places = np.arange(in_channels), np.arange(out_channels)
    if is_grouped(module):
        in_places = inverse(channel_orders(module)["in_perm"].cpu().numpy())
        out_places = channel_orders(module)["out_inverse"].cpu().numpy()
    return Grouping(
        in_groups=in_places // (in_channels // groups),
        out_groups=out_places // (out_channels // groups),
        num_groups=groups,
    )
