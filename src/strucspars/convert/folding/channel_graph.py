"""The channel layout of every tensor in a graph, and the layers whose weights follow it."""

import math
import operator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import fx, nn

from strucspars.convert.folding import call_arguments, channel_rules
from strucspars.convert.folding.fold_batch_norm import BATCH_NORMS
from strucspars.convert.folding.group_matching import Grouping
from strucspars.convert.folding.layouts import Layout, OrderClasses
from strucspars.convert.folding.order_search import GroupedLayer
from strucspars.convert.folding.subsampling import read_bytes
from strucspars.convert.folding.tracing import has_plain_forward, tensor_bytes, tensor_shape
from strucspars.core.permutation import inverse
from strucspars.nn.shuffled import GROUPED_TYPES, channels, is_grouped

LAYERS = (*GROUPED_TYPES, *GROUPED_TYPES.values())


@dataclass(frozen=True)
class ChannelGraph:
    """What the orders of a graph's tensors are bound by.

    Attributes:
        classes: the order classes.
        grouped: by call, the grouped layers, which an order may or may not suit.
        dense: by call, the layouts (inputs, outputs) of layers of one group, which any order suits.
        channelwise: by call, the layout of batch norms and depthwise convolutions.
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
        kind = type(module)
        if not has_plain_forward(module) or len(node.args) != 1 or node.kwargs:
            kind = nn.Module
        if kind in LAYERS:
            return self._layer(node, module)
        if kind in BATCH_NORMS:
            return self._batch_norm(node)
        if kind in channel_rules.ELEMENTWISE_MODULES:
            return self._elementwise(node)
        if kind in channel_rules.SPATIAL_MODULES:
            return self._spatial(node, channel_rules.SPATIAL_MODULES[kind])
        if kind in channel_rules.RESIZING_MODULES:
            return self._resizing(node)
        if kind is nn.Flatten and isinstance(module, nn.Flatten):
            return self._flatten(node, module.start_dim, module.end_dim)
        if is_grouped(module):
            self.found.opaque.append(node)
        return self._unknown(node)

    def _function(self, node: fx.Node, function: Any) -> Layout | None:
        if channel_rules.is_elementwise(function):
            return self._elementwise(node)
        if function in channel_rules.SPATIAL_FUNCTIONS:
            return self._spatial(node, channel_rules.SPATIAL_FUNCTIONS[function])
        if function in channel_rules.RESIZING_FUNCTIONS:
            return self._resizing(node)
        if function in channel_rules.REDUCING_FUNCTIONS:
            return self._reduction(node)
        if function in channel_rules.CONCATENATIONS:
            return self._concatenation(node)
        if function in channel_rules.FLATTEN_FUNCTIONS:
            return self._flatten_call(node)
        if function in channel_rules.PAD_FUNCTIONS:
            return self._beside_channels(node, call_arguments.padded_axes(node, self._dimensions(node)))
        if function is operator.getitem:
            return self._beside_channels(node, call_arguments.sliced_axes(node))
        return None if call_arguments.asks_for_shape(node) else self._unknown(node)

    def _method(self, node: fx.Node, name: str) -> Layout | None:
        if name in channel_rules.ELEMENTWISE_METHODS:
            return self._elementwise(node)
        if name in channel_rules.REDUCING_METHODS:
            return self._reduction(node)
        if name == "flatten":
            return self._flatten_call(node)
        if name in channel_rules.VIEW_METHODS and call_arguments.flattens_by_view(node):
            return self._flatten(node, 1, -1)
        return None if call_arguments.asks_for_shape(node) else self._unknown(node)

    def _unknown(self, node: fx.Node) -> Layout | None:
        """Natural order on both sides."""
        for source in node.all_input_nodes:
            self.classes.pin(self.layouts.get(source))
        return None

    def _source(self, node: fx.Node) -> Layout | None:
        """Layout of the first argument."""
        source = node.args[0] if node.args else None
        return self.layouts.get(source) if isinstance(source, fx.Node) else None

    def _dimensions(self, node: fx.Node) -> int:
        """Axes of the first argument."""
        source = node.args[0] if node.args else None
        return len(tensor_shape(source) or ()) if isinstance(source, fx.Node) else 0

    def _layer(self, node: fx.Node, module: nn.Module) -> Layout:
        out_channels, in_channels = channels(module)
        kernel_axes = 0 if isinstance(module, nn.Linear) else module.get_parameter("weight").dim() - 2
        axis = self._dimensions(node) - 1 - kernel_axes
        inputs = self._source(node)
        if inputs is None or inputs.axis != axis:
            self._unknown(node)
            inputs = self.classes.new(in_channels, axis, pinned=True)
        groups = in_channels // module.get_parameter("weight").shape[1]
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

    def _batch_norm(self, node: fx.Node) -> Layout | None:
        layout = self._source(node)
        if layout is None or layout.axis != 1 or layout.repeat != 1:
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

    def _spatial(self, node: fx.Node, spatial_axes: int) -> Layout | None:
        layout = self._source(node)
        if layout is None or layout.axis >= self._dimensions(node) - spatial_axes:
            return self._unknown(node)
        return layout

    def _resizing(self, node: fx.Node) -> Layout | None:
        layout = self._source(node)
        return layout if layout is not None and layout.axis <= 1 else self._unknown(node)

    def _beside_channels(self, node: fx.Node, axes: set[int] | None) -> Layout | None:
        """Changes of other axes than that of the channels."""
        layout = self._source(node)
        if layout is None or axes is None or layout.axis in axes or len(node.all_input_nodes) > 1:
            return self._unknown(node)
        return layout

    def _reduction(self, node: fx.Node) -> Layout | None:
        before, shape = self._dimensions(node), tensor_shape(node) or ()
        axes = call_arguments.reduced_axes(node, before) if before else None
        layout = self._beside_channels(node, axes)
        if layout is None or axes is None or len(shape) == before:
            return layout
        return layout.at(layout.axis - sum(axis < layout.axis for axis in axes))

    def _concatenation(self, node: fx.Node) -> Layout | None:
        parts = call_arguments.argument(node, 0, "tensors")
        axis = call_arguments.argument(node, 1, "dim", "axis", default=0)
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

    def _flatten_call(self, node: fx.Node) -> Layout | None:
        start = call_arguments.argument(node, 1, "start_dim", default=0)
        end = call_arguments.argument(node, 2, "end_dim", default=-1)
        return self._flatten(node, start, end)

    def _flatten(self, node: fx.Node, start: int, end: int) -> Layout | None:
        """All that follows the batch as one axis: every channel becomes a run of entries."""
        layout, dimensions = self._source(node), self._dimensions(node)
        is_all = dimensions > 1 and (start % dimensions, end % dimensions) == (1, dimensions - 1)
        if layout is None or not is_all or layout.axis != 1:
            return self._unknown(node)
        shape = tensor_shape(node.all_input_nodes[0]) or ()
        return Layout(layout.classes, 1, layout.repeat * math.prod(shape[2:]))


def _grouping(module: nn.Module, groups: int) -> Grouping:
    out_channels, in_channels = channels(module)
    in_places, out_places = np.arange(in_channels), np.arange(out_channels)
    if is_grouped(module):
        in_places = inverse(module.get_buffer("in_perm").cpu().numpy())
        out_places = module.get_buffer("out_inverse").cpu().numpy()
    return Grouping(
        in_groups=in_places // (in_channels // groups),
        out_groups=out_places // (out_channels // groups),
        num_groups=groups,
    )
