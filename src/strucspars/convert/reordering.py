"""Write the chosen channel orders into the weights, with an `index_select` for each shuffle that no weight absorbs.

Tracing gives each call of a module that is called several times a separate copy. The copies take one channel order
where that costs nothing, and become one module again where they are still equal after folding.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import torch
from torch import fx, nn
from torch.nn import functional

from strucspars.channels.graph import ChannelGraph, channel_graph, with_joined_calls
from strucspars.channels.orders import (
    GroupedLayer,
    OrderClasses,
    Placement,
    chosen_orders,
    gather_cost,
    placement,
    stored_order,
)
from strucspars.channels.rules import skipped_positions
from strucspars.channels.tracing import calls_by_origin, free_name, tensor_bytes, tensor_shape
from strucspars.core.checks import IntArray
from strucspars.core.permutation import inverse
from strucspars.cost.gathers import RemainingGather, remaining_gather, shuffles_of_layer
from strucspars.nn.layers import channel_orders, forms_of, is_grouped, like_memory_format

ClassOrders = dict[int, IntArray]


def reordered_grouped_weight(
    weight: torch.Tensor, num_groups: int, out_order: IntArray, in_order: IntArray
) -> torch.Tensor:
    """The weight `(C_out, C_in / G, *kernel)` from channels in `in_order` to channels in `out_order`.

    Both orders keep each group together and bring the groups in the same sequence.
    """
    in_width = weight.shape[1]
    columns = torch.from_numpy(in_order % in_width).to(weight.device)
    columns = columns.view(num_groups, 1, in_width).expand(-1, weight.shape[0] // num_groups, -1)
    columns = columns.reshape(weight.shape[0], in_width, *[1] * (weight.dim() - 2)).expand_as(weight)
    return like_memory_format(weight.index_select(0, _indices(out_order, weight)).gather(1, columns), weight)


def reorder_dense_(module: nn.Module, out_order: IntArray, in_order: IntArray) -> None:
    """Let a layer of one group read and return channels in other orders, in place."""
    weight = module.get_parameter("weight").data
    rows = weight.index_select(0, _indices(out_order, weight))
    module.get_parameter("weight").data = like_memory_format(rows.index_select(1, _indices(in_order, weight)), weight)
    _select_(module, ("bias",), out_order)


def reorder_channelwise_(module: nn.Module, order: IntArray) -> None:
    """Let a depthwise convolution or a batch norm see its channels in another order, in place."""
    _select_(module, ("weight", "bias", "running_mean", "running_var"), order)


def reorder_grouped_(module: nn.Module, placed: Placement) -> None:
    """Let a grouped layer compute as placed, in place; the shuffles that it had inside are gone."""
    in_order = placed.in_order
    if is_grouped(module):
        # The weight's columns are in grouped order: find the natural channels among them.
        in_order = inverse(channel_orders(module)["in_perm"].cpu().numpy())[in_order]
        del module.in_perm, module.out_inverse
        forms = forms_of(module)
        assert forms is not None
        module.__class__ = forms.unshuffled
    weight = module.get_parameter("weight")
    groups = cast(nn.Conv2d, module).groups
    weight.data = reordered_grouped_weight(weight.data, groups, placed.out_order, in_order)
    _select_(module, ("bias",), placed.out_order)


def _select_(module: nn.Module, names: tuple[str, ...], order: IntArray) -> None:
    for name in names:
        tensor = module._parameters.get(name, module._buffers.get(name))
        if tensor is not None:
            tensor.data = like_memory_format(tensor.data.index_select(0, _indices(order, tensor)), tensor)


def _indices(order: IntArray, like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(order).to(like.device)


def absorb_shuffles_(graph_module: fx.GraphModule) -> tuple[RemainingGather, ...]:
    """Choose the order of every tensor and move the shuffles into the weights, in place; returns what remains."""
    found, orders = orders_for_shared(channel_graph(graph_module), calls_by_origin(graph_module))
    for node, (inputs, outputs) in found.dense.items():
        out_order, in_order = (stored_order(side, found.classes, orders) for side in (outputs, inputs))
        reorder_dense_(found.module(node), out_order, in_order)
    for node, layout in found.channelwise.items():
        reorder_channelwise_(found.module(node), stored_order(layout, found.classes, orders))
    remaining: list[RemainingGather] = []
    for node in list(graph_module.graph.nodes):
        if node in found.grouped:
            remaining += _place_(graph_module, node, found.grouped[node], found.classes, orders)
        elif node in found.opaque:
            in_bytes, out_bytes = tensor_bytes(node.all_input_nodes[0]), tensor_bytes(node)
            remaining += shuffles_of_layer(str(node.target), channel_orders(found.module(node)), in_bytes, out_bytes)
    return tuple(remaining)


def _place_(
    graph_module: fx.GraphModule, node: fx.Node, layer: GroupedLayer, classes: OrderClasses, orders: ClassOrders
) -> Iterator[RemainingGather]:
    """Reorder a grouped layer, and put a gather before it and after it where the orders do not suit it."""
    name = str(node.target)
    placed = placement(layer, *(stored_order(side, classes, orders) for side in (layer.inputs, layer.outputs)))
    # Axes count from the end, as in the layers themselves: with a batch or without.
    dimensions = len(tensor_shape(node) or ())
    reorder_grouped_(graph_module.get_submodule(name), placed)
    if placed.in_gather is not None:
        _subsample_first_(graph_module, node)
        (source,) = node.all_input_nodes
        node.args = (_gathered(graph_module, node, source, node, layer.inputs.axis - dimensions, placed.in_gather),)
        yield remaining_gather(name, "input", placed.in_gather, layer.in_bytes)
    if placed.out_gather is not None:
        users = list(node.users)
        gathered = _gathered(graph_module, node, node, node.next, layer.outputs.axis - dimensions, placed.out_gather)
        # An opaque layer after it reports the bytes of its input.
        gathered.meta["tensor_meta"] = node.meta["tensor_meta"]
        for user in users:
            user.replace_input_with(node, gathered)
        yield remaining_gather(name, "output", placed.out_gather, layer.out_bytes)


def _gathered(
    graph_module: fx.GraphModule, layer: fx.Node, source: fx.Node, before: fx.Node, axis: int, gather: IntArray
) -> fx.Node:
    """A call of `index_select` (indexing exports as three operations) before a node of the graph."""
    name = free_name(graph_module, f"{source.name}_order")
    device = graph_module.get_submodule(str(layer.target)).get_parameter("weight").device
    graph_module.register_buffer(name, torch.from_numpy(gather).to(device))
    with graph_module.graph.inserting_before(before):
        order = graph_module.graph.get_attr(name)
        return graph_module.graph.call_function(torch.index_select, (source, axis, order))


def _subsample_first_(graph_module: fx.GraphModule, node: fx.Node) -> None:
    """Let pooling take the positions that a strided 1x1 convolution reads, so that a gather copies only those."""
    module = graph_module.get_submodule(str(node.target))
    steps = skipped_positions(module)
    if not steps:
        return
    (source,) = node.all_input_nodes
    # Pooling of single positions, not a slice: runtimes pool in the layout that their convolutions use.
    pool = {1: functional.max_pool1d, 2: functional.max_pool2d, 3: functional.max_pool3d}[len(steps)]
    with graph_module.graph.inserting_before(node):
        node.args = (graph_module.graph.call_function(pool, (source,), {"kernel_size": 1, "stride": steps}),)
    cast(nn.Conv2d, module).stride = (1,) * len(steps)


def orders_for_shared(found: ChannelGraph, calls: Mapping[str, Sequence[fx.Node]]) -> tuple[ChannelGraph, ClassOrders]:
    """The channel graph and its orders, the same for all calls of a module where that copies no more bytes."""
    joined = with_joined_calls(found, calls.values())
    layers = tuple(found.grouped.values())
    orders = chosen_orders(layers, found.classes)
    if joined.classes == found.classes:
        return found, orders
    joined_orders = chosen_orders(layers, joined.classes)
    copied = gather_cost(layers, found.classes, orders)[:2]
    joined_copied = gather_cost(layers, joined.classes, joined_orders)[:2]
    return (joined, joined_orders) if joined_copied <= copied else (found, orders)


def merge_calls_(graph_module: fx.GraphModule) -> dict[str, str]:
    """Let calls of one module share equal tensors again, in place; returns the name that every copy is called by."""
    calls = calls_by_origin(graph_module)
    forms: dict[object, list[torch.Tensor]] = defaultdict(list)
    for origin, nodes in calls.items():
        for node in nodes:
            _share_tensors_(graph_module.get_submodule(str(node.target)), graph_module.get_submodule(origin), forms)
    names: dict[str, str] = {}
    for origin, nodes in calls.items():
        names |= _merge_modules_(graph_module, origin, nodes)
    return names


def _share_tensors_(module: nn.Module, original: nn.Module, forms: dict[object, list[torch.Tensor]]) -> None:
    """Replace the tensors of a copy by equal ones among the forms that those of the original have taken so far."""
    sources = _tensors(original)
    for name, tensor in _tensors(module).items():
        source = sources.get(name)
        # A bias that came with a batch norm has none. Modules tied by a tensor share the forms of that tensor.
        known = forms[(id(original), name) if source is None else id(source)]
        if source is not None and not known:
            known.append(source)
        same = next((form for form in known if _is_same_tensor(form, tensor)), None)
        if same is None:
            known.append(tensor)
        else:
            owner, _, last_name = name.rpartition(".")
            setattr(module.get_submodule(owner), last_name, same)


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return dict([*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)])


def _is_same_tensor(one: torch.Tensor, other: torch.Tensor) -> bool:
    settings = [(type(each), each.dtype, each.device, each.shape, each.stride()) for each in (one, other)]
    return settings[0] == settings[1] and torch.equal(one, other)


def _merge_modules_(graph_module: fx.GraphModule, origin: str, nodes: Sequence[fx.Node]) -> dict[str, str]:
    """Call as few modules as there are different ones; a single one gets the name that it has in the network."""
    names: dict[str, str] = {}
    kept = [origin]
    for node in nodes:
        module, target = graph_module.get_submodule(str(node.target)), str(node.target)
        same = (name for name in kept if _is_same_module(graph_module.get_submodule(name), module))
        names[target] = next(same, target)
        if names[target] not in kept:
            kept.append(target)
    inside = (str(node.target) for node in graph_module.graph.nodes if node.op in ("call_module", "get_attr"))
    if len(kept) == 2 and origin not in names.values() and not any(name.startswith(f"{origin}.") for name in inside):
        graph_module.add_submodule(origin, graph_module.get_submodule(kept[1]))
        names = dict.fromkeys(names, origin)
    for node in nodes:
        node.target = names[str(node.target)]
    return names


def _is_same_module(one: nn.Module, other: nn.Module) -> bool:
    """Whether copies of one module are still the same: folding may change the type, the settings and the tensors."""
    held = [{name: id(tensor) for name, tensor in _tensors(module).items()} for module in (one, other)]
    return type(one) is type(other) and repr(one) == repr(other) and held[0] == held[1]
