"""The channel layout of every tensor in a graph, and the layers whose weights follow it."""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from torch import fx, nn

from strucspars.channels.orders import GroupedLayer, Layout, OrderClasses
from strucspars.channels.tracing import LEAF_TYPES, has_plain_forward, tensor_shape
from strucspars.nn.layers import is_grouped


@dataclass(frozen=True, eq=False)
class ChannelGraph:
    """The channels of a graph's tensors, and the classes of them that share an order.

    Attributes:
        layouts, parts: by node, the layout of its tensor, or those of its list of tensors; others are in natural order.
        grouped: by call, the grouped layers, which an order may or may not suit.
        dense: by call, the layouts (inputs, outputs) of layers of one group, which any order suits.
        channelwise: by call, the layout of norms, depthwise convolutions and others with an entry per channel.
        opaque: calls of our grouped layers that keep their shuffles.
    """

    graph_module: fx.GraphModule
    classes: OrderClasses = field(default_factory=OrderClasses)
    layouts: dict[fx.Node, Layout] = field(default_factory=dict)
    parts: dict[fx.Node, tuple[Layout, ...]] = field(default_factory=dict)
    grouped: dict[fx.Node, GroupedLayer] = field(default_factory=dict)
    dense: dict[fx.Node, tuple[Layout, Layout]] = field(default_factory=dict)
    channelwise: dict[fx.Node, Layout] = field(default_factory=dict)
    opaque: list[fx.Node] = field(default_factory=list)

    def module(self, node: fx.Node) -> nn.Module:
        """The module that a node calls."""
        return self.graph_module.get_submodule(str(node.target))

    def source(self, node: fx.Node) -> Layout | None:
        """Layout of the first argument of a call."""
        source = node.args[0] if node.args else None
        return self.layouts.get(source) if isinstance(source, fx.Node) else None

    def pin_inputs(self, node: fx.Node) -> None:
        """Keep the channels of all tensors that a call reads in natural order."""
        for source in node.all_input_nodes:
            for layout in (self.layouts.get(source), *self.parts.get(source, ())):
                self.classes.pin(layout, self._needs_all(node))

    def hold_where_tensors_follow(self, node: fx.Node) -> None:
        """Keep all channels of a module whose tensors may have an entry for each, unless it is known which."""
        if node.op != "call_module" or self.sides(node):
            return
        module = self.module(node)
        if any(tensor.numel() > 1 for tensor in (*module.parameters(), *module.buffers())):
            reason = f"{type(module).__name__} {str(node.target)!r} has tensors whose shapes may follow their number"
            for layout in (self.source(node), self.layouts[node]):
                self.classes.hold(layout, reason)

    def _needs_all(self, node: fx.Node) -> str:
        """Why the channels that a call reads stay as they are."""
        if node.op == "output":
            return "the network returns them"
        if node.op == "call_module":
            return f"{type(self.module(node)).__name__} {str(node.target)!r} needs all of them in their order"
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", node.target)
        return f"the operation {name} needs all of them in their order"

    def sides(self, node: fx.Node) -> tuple[Layout, ...]:
        """The layouts that the weights of a call follow: (inputs, outputs), or one for both."""
        if node in self.grouped:
            return self.grouped[node].inputs, self.grouped[node].outputs
        return self.dense.get(node, (self.channelwise[node],) if node in self.channelwise else ())


# The layout of the result, the layouts of several results, or None where a call may need the natural order.
Rule = Callable[[fx.Node, ChannelGraph], Layout | tuple[Layout, ...] | None]

_RULES: dict[object, Rule] = {}


def register_channel_rule(rule: Rule, *operations: object) -> None:
    """Register what operations do to channels. Operations without a rule need and return the natural order.

    Args:
        rule: `rule(node, graph)` returns the layout of the result, from those of the inputs in `graph.layouts`; a tuple
            of layouts for several results, empty for none that hold channels; or None where the inputs have to be in
            natural order.
        operations: module types, functions, and names: of tensor methods, or of functions by their full dotted name.
            Modules of a registered type are single calls of the graph. They reach the rule only with one argument and
            without hooks.

    >>> class Swish(nn.Module):
    ...     def forward(self, features):
    ...         return features * features.sigmoid()
    >>> from strucspars.channels import elementwise
    >>> register_channel_rule(elementwise, Swish)
    """
    for operation in operations:
        _RULES[operation] = rule
        if isinstance(operation, type) and issubclass(operation, nn.Module):
            LEAF_TYPES.add(operation)


def channel_graph(graph_module: fx.GraphModule) -> ChannelGraph:
    """Follow the channels through a graph whose shapes are known, as `traced` makes it."""
    graph = ChannelGraph(graph_module)
    for node in graph_module.graph.nodes:
        rule = _rule(node, graph)
        found = None if rule is None else rule(node, graph)
        if found is None:
            graph.pin_inputs(node)
        elif isinstance(found, tuple):
            graph.parts.update({node: found} if found else {})
        elif tensor_shape(node) is None:
            graph.classes.pin(found, f"the shape of the outcome of {node.name} is not known")
        else:
            graph.layouts[node] = found
            graph.hold_where_tensors_follow(node)
    return graph


def with_joined_calls(graph: ChannelGraph, calls: Iterable[Sequence[fx.Node]]) -> ChannelGraph:
    """The same graph where the calls of each of these modules see their channels in one order."""
    joined = replace(graph, classes=copy.deepcopy(graph.classes))
    for nodes in calls:
        first, *others = [sides for node in nodes if (sides := graph.sides(node))] or [()]
        for other in others:
            for one_side, other_side in zip(first, other, strict=True):
                joined.classes.join(one_side, other_side)
    return joined


def _rule(node: fx.Node, graph: ChannelGraph) -> Rule | None:
    if node.op == "call_method":
        return _RULES.get(str(node.target))
    if node.op == "call_function":
        name = f"{getattr(node.target, '__module__', '')}.{getattr(node.target, '__qualname__', '')}"
        return _RULES.get(node.target) or _RULES.get(name)
    if node.op != "call_module":
        return None
    module = graph.module(node)
    if has_plain_forward(module) and len(node.args) == 1 and not node.kwargs and type(module) in _RULES:
        return _RULES[type(module)]
    if is_grouped(module):
        graph.opaque.append(node)
    return None
