"""Modules that a network calls several times.

Tracing gives each call a separate copy. The copies take one channel order where that costs nothing, and become one
module again where they are still equal after folding.
"""

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import fx, nn

from strucspars.channels.graph import ChannelGraph
from strucspars.channels.orders import chosen_orders, gather_cost
from strucspars.channels.tracing import ORIGIN_KEY
from strucspars.core.checks import IntArray

ClassOrders = dict[int, IntArray]


def calls_by_origin(graph_module: fx.GraphModule) -> dict[str, list[fx.Node]]:
    """The calls of copies, by the name of the module that they are copies of."""
    calls = defaultdict(list)
    for node in graph_module.graph.nodes:
        if ORIGIN_KEY in node.meta:
            calls[node.meta[ORIGIN_KEY]].append(node)
    return dict(calls)


def orders_for_shared(found: ChannelGraph, calls: Mapping[str, Sequence[fx.Node]]) -> tuple[ChannelGraph, ClassOrders]:
    """The channel graph and its orders, the same for all calls of a module where that copies no more bytes.

    Then the classes of these calls are joined in the returned graph.
    """
    joined = replace(found, classes=copy.deepcopy(found.classes))
    for nodes in calls.values():
        first, *others = [sides for node in nodes if (sides := found.sides(node))] or [()]
        for other in others:
            for one_side, other_side in zip(first, other, strict=True):
                joined.classes.join(one_side, other_side)
    layers = tuple(found.grouped.values())
    orders = chosen_orders(layers, found.classes)
    if joined.classes == found.classes:
        return found, orders
    joined_orders = chosen_orders(layers, joined.classes)
    copied, joined_copied = (
        gather_cost(layers, graph.classes, chosen)[:2] for graph, chosen in ((found, orders), (joined, joined_orders))
    )
    return (joined, joined_orders) if joined_copied <= copied else (found, orders)


def merge_calls_(graph_module: fx.GraphModule) -> dict[str, str]:
    """Let calls of one module share equal tensors again, and call one module where all is equal, in place.

    Returns: by the name of every copy, that of the module which is called now.
    """
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
