"""The graph pass: every layer in the orders chosen for its tensors; what remains is one `index_select` each."""

from collections.abc import Iterator

import torch
from torch import fx

from strucspars.convert.folding.channel_graph import ChannelGraph, channel_graph
from strucspars.convert.folding.layouts import stored_order
from strucspars.convert.folding.order_search import layer_placement
from strucspars.convert.folding.reordered_weights import reorder_channelwise_, reorder_dense_, reorder_grouped_
from strucspars.convert.folding.shared_calls import calls_by_origin, orders_for_shared
from strucspars.convert.folding.subsampling import subsample_first_
from strucspars.convert.folding.tracing import free_name, tensor_bytes, tensor_shape
from strucspars.core.arrays import IntArray
from strucspars.measure.gathers import RemainingGather, Side, contiguous_runs, shuffles_inside


def absorb_shuffles_(graph_module: fx.GraphModule) -> tuple[RemainingGather, ...]:
    """Choose the order of every tensor and move the shuffles into the weights, in place; returns what remains."""
    found, orders = orders_for_shared(channel_graph(graph_module), calls_by_origin(graph_module))
    _reorder_plain_layers_(graph_module, found, orders)
    remaining: list[RemainingGather] = []
    for node in list(graph_module.graph.nodes):
        if node in found.grouped:
            remaining += _place_(graph_module, node, found, orders)
        elif node in found.opaque:
            module = graph_module.get_submodule(str(node.target))
            in_bytes = tensor_bytes(node.all_input_nodes[0])
            remaining += shuffles_inside(str(node.target), module, in_bytes, tensor_bytes(node))
    return tuple(remaining)


def _reorder_plain_layers_(graph_module: fx.GraphModule, found: ChannelGraph, orders: dict[int, IntArray]) -> None:
    for node, (inputs, outputs) in found.dense.items():
        out_order = stored_order(outputs, found.classes, orders)
        in_order = stored_order(inputs, found.classes, orders)
        reorder_dense_(graph_module.get_submodule(str(node.target)), out_order, in_order)
    for node, layout in found.channelwise.items():
        reorder_channelwise_(graph_module.get_submodule(str(node.target)), stored_order(layout, found.classes, orders))


def _place_(
    graph_module: fx.GraphModule, node: fx.Node, found: ChannelGraph, orders: dict[int, IntArray]
) -> Iterator[RemainingGather]:
    """Reorder a grouped layer, and put a gather before it and after it where the orders do not suit it."""
    layer, name = found.grouped[node], str(node.target)
    placed = layer_placement(layer, found.classes, orders)
    # Axes count from the end, as the layers themselves do: with a batch or without.
    dimensions = len(tensor_shape(node) or ())
    reorder_grouped_(graph_module.get_submodule(name), placed)
    if placed.in_gather is not None:
        subsample_first_(graph_module, node)
        (source,) = node.all_input_nodes
        node.args = (_gathered(graph_module, node, source, node, layer.inputs.axis - dimensions, placed.in_gather),)
        yield _described(name, "input", placed.in_gather, layer.in_bytes)
    if placed.out_gather is not None:
        users = list(node.users)
        gathered = _gathered(graph_module, node, node, node.next, layer.outputs.axis - dimensions, placed.out_gather)
        # A layer that stays as it is tells how much it reads.
        gathered.meta["tensor_meta"] = node.meta["tensor_meta"]
        for user in users:
            user.replace_input_with(node, gathered)
        yield _described(name, "output", placed.out_gather, layer.out_bytes)


def _gathered(
    graph_module: fx.GraphModule, layer: fx.Node, source: fx.Node, before: fx.Node, axis: int, gather: IntArray
) -> fx.Node:
    """A call of `index_select` (indexing exports as three operations) that stands before a node of the graph."""
    name = free_name(graph_module, f"{source.name}_order")
    device = graph_module.get_submodule(str(layer.target)).get_parameter("weight").device
    graph_module.register_buffer(name, torch.from_numpy(gather).to(device))
    with graph_module.graph.inserting_before(before):
        order = graph_module.graph.get_attr(name)
        return graph_module.graph.call_function(torch.index_select, (source, axis, order))


def _described(layer: str, side: Side, gather: IntArray, nbytes: int) -> RemainingGather:
    runs = int(contiguous_runs(gather))
    return RemainingGather(layer=layer, side=side, channels=len(gather), runs=runs, nbytes=nbytes)
