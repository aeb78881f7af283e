"""Calls of one module, which has a copy for each of them while the graph is changed: one order, one module again."""

import copy
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from strucspars.channels.classes import Layout
from strucspars.channels.graph import ChannelGraph
from strucspars.channels.orders import chosen_orders, gather_cost
from strucspars.channels.tracing import ORIGIN_KEY
from strucspars.core.checks import IntArray

Orders = dict[int, IntArray]


def calls_by_origin(graph_module: fx.GraphModule) -> dict[str, list[fx.Node]]:
    """The calls of copies, by the name of the module that they are copies of."""
    calls = defaultdict(list)
    for node in graph_module.graph.nodes:
        if ORIGIN_KEY in node.meta:
            calls[node.meta[ORIGIN_KEY]].append(node)
    return dict(calls)


def orders_for_shared(found: ChannelGraph, calls: Mapping[str, Sequence[fx.Node]]) -> tuple[ChannelGraph, Orders]:
    """Orders that are the same for all calls of a module, if they copy no more bytes than the best ones do; else these.

    Returns the channels with their classes joined accordingly, and the orders of these classes. Without joining most
    calls find the same orders too.
    """
    orders = _orders(found)
    sides_of_calls = ([sides for node in nodes if (sides := found.sides(node))] for nodes in calls.values())
    shared = [sides for sides in sides_of_calls if len(sides) > 1]
    if not shared:
        return found, orders
    joined = _joined(found, shared)
    joined_orders = _orders(joined)
    if _copied_bytes(joined, joined_orders) <= _copied_bytes(found, orders):
        return joined, joined_orders
    return found, orders


def _orders(found: ChannelGraph) -> Orders:
    return chosen_orders(tuple(found.grouped.values()), found.classes)


def _copied_bytes(found: ChannelGraph, orders: Orders) -> tuple[int, int]:
    copied, copied_after, _ = gather_cost(tuple(found.grouped.values()), found.classes, orders)
    return int(copied), int(copied_after)


def _joined(found: ChannelGraph, shared: Iterable[list[tuple[Layout, ...]]]) -> ChannelGraph:
    classes = copy.deepcopy(found.classes)
    for first, *others in shared:
        for other in others:
            for one_side, other_side in zip(first, other, strict=True):
                classes.join(one_side, other_side)
    return replace(found, classes=classes)


@dataclass(frozen=True)
class MergedCalls:
    """What became of the copies.

    Attributes:
        names: by the name of a copy, that of the module which is called instead.
        forms: for every tensor that calls shared, the forms that it came out in.
    """

    names: Mapping[str, str]
    forms: Sequence[Sequence[torch.Tensor]]

    def repeated_bytes(self, graph_module: fx.GraphModule) -> int:
        """How much a graph holds in further forms of a tensor that was one in the network."""
        held = {id(tensor) for tensor in (*graph_module.parameters(), *graph_module.buffers())}
        repeated = ([form for form in forms if id(form) in held][1:] for forms in self.forms)
        return sum(form.nbytes for forms in repeated for form in forms)


def merge_calls_(graph_module: fx.GraphModule) -> MergedCalls:
    """Let calls of one module share their tensors again, and be calls of one module, where these came out the same."""
    calls = calls_by_origin(graph_module)
    forms: dict[object, list[torch.Tensor]] = {}
    names: dict[str, str] = {}
    for origin, nodes in calls.items():
        for node in nodes:
            _share_tensors_(graph_module.get_submodule(str(node.target)), graph_module.get_submodule(origin), forms)
    for origin, nodes in calls.items():
        names |= _merge_modules_(graph_module, origin, nodes)
    return MergedCalls(names, tuple(forms.values()))


def _share_tensors_(module: nn.Module, original: nn.Module, forms: dict[object, list[torch.Tensor]]) -> None:
    sources = _tensors(original)
    for name, tensor in _tensors(module).items():
        source = sources.get(name)
        # A bias that came with a batch norm has none. Of modules that are tied by a tensor, the tensor counts.
        key: object = (id(original), name) if source is None else id(source)
        known = forms.setdefault(key, [] if source is None else [source])
        same = next((form for form in known if _is_same_tensor(form, tensor)), None)
        if same is None:
            known.append(tensor)
        else:
            owner, _, last_name = name.rpartition(".")
            setattr(module.get_submodule(owner), last_name, same)


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    tensors = (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    return {name: tensor for named in tensors for name, tensor in named}


def _is_same_tensor(one: torch.Tensor, other: torch.Tensor) -> bool:
    def form(tensor: torch.Tensor) -> tuple[Any, ...]:
        return type(tensor), tensor.dtype, tensor.device, tensor.shape, tensor.stride()

    return form(one) == form(other) and torch.equal(one, other)


def _merge_modules_(graph_module: fx.GraphModule, origin: str, nodes: Sequence[fx.Node]) -> dict[str, str]:
    """Call as few modules as there are different ones; a single one gets the name that it has in the network."""
    names: dict[str, str] = {}
    kept = [origin]
    for node in nodes:
        module = graph_module.get_submodule(str(node.target))
        same = (name for name in kept if _is_same_module(graph_module.get_submodule(name), module))
        names[str(node.target)] = next(same, str(node.target))
        if names[str(node.target)] not in kept:
            kept.append(str(node.target))
    if len(kept) == 2 and origin not in names.values() and not _is_looked_into(graph_module, origin):
        graph_module.add_submodule(origin, graph_module.get_submodule(kept[1]))
        names = dict.fromkeys(names, origin)
    for node in nodes:
        node.target = names[str(node.target)]
    return names


def _is_same_module(one: nn.Module, other: nn.Module) -> bool:
    """Whether copies of one module are still the same: what folding may change is the type, settings and tensors."""
    held = [{name: id(tensor) for name, tensor in _tensors(module).items()} for module in (one, other)]
    return type(one) is type(other) and repr(one) == repr(other) and held[0] == held[1]


def _is_looked_into(graph_module: fx.GraphModule, name: str) -> bool:
    """Whether the graph calls or reads anything of a module that is not called itself."""
    targets = (node.target for node in graph_module.graph.nodes if node.op in ("call_module", "get_attr"))
    return any(str(target).startswith(f"{name}.") for target in targets)
