"""Which layers of a dense network see the same channels, and which of those channels get one order for all of them."""

import traceback
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torch import nn

from strucspars.channels.graph import ChannelGraph, channel_graph, with_joined_calls
from strucspars.channels.orders import Layout
from strucspars.channels.tracing import (
    called_module,
    calls_by_origin,
    inference_copy,
    other_norms_as_modules_,
    tensor_bytes,
    traced,
)
from strucspars.cost.counting import ExampleInputs, arguments_of, fresh_arguments, undisturbed
from strucspars.nn.layers import LAYERS_WITH_CHANNELS
from strucspars.nn.names import bare_modules, unwrap_children_, unwrapped


class UntraceableNetwork(ValueError):
    """The code of a network cannot be followed, so that it is unknown which layers see the same channels."""


@dataclass(frozen=True, kw_only=True)
class ChannelClass:
    """Channels that several layers write or read, which can be stored in one order for all of them.

    Attributes:
        name: of the first layer that writes them; further classes of that layer are "NAME#2" and so on. Channels that
            no layer writes have the name of the first one that reads them, with ".input".
        width: number of channels.
        writers, readers: all convolutions and linear layers that do, also those that nothing will group. Depthwise
            convolutions and norms keep an order: their outputs are the same channels.
        num_bytes: the largest tensor of these channels that a layer reads or writes; for a part, its share.
        is_part: whether a layer reads or writes them as one of several classes, after or before a concatenation or cut.
        is_fixed: whether only the natural order suits: an operation needs it, or a layer that has groups already.
    """

    name: str
    width: int
    writers: tuple[str, ...]
    readers: tuple[str, ...]
    num_bytes: int
    is_part: bool
    is_fixed: bool


@dataclass(frozen=True)
class LayerSides:
    """The classes of a layer's channels on both sides, in order along the channels.

    A side is empty where it can only have an order of its own: all its channels are fixed, or an entry is not a
    channel, as after flattening. Beside others, fixed classes are listed, in their natural order.
    """

    outputs: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()


@dataclass(frozen=True)
class NetworkChannels:
    """The classes of a network's channels, and the sides of all its convolutions and linear layers, in its order."""

    classes: Mapping[str, ChannelClass]
    sides: Mapping[str, LayerSides]


@dataclass(frozen=True)
class OrderSharing:
    """The classes of channels whose layers all use one order; on the others, every layer has an order of its own.

    Attributes:
        pieces: for classes that are not shared: between the orders of its layers, whole pieces of so many neighbouring
            channels move.
    """

    shared: frozenset[str]
    pieces: Mapping[str, int] = field(default_factory=dict, hash=False)


# Policies: which classes of a network are shared.


def share_streams(channels: NetworkChannels) -> OrderSharing:
    """One order for all channels that several layers write, or several read, such as those of a residual stream.

    Parts of a concatenation share one too. What is left are tensors between two layers, with an order for each.
    """
    several = (name for name, each in channels.classes.items() if max(len(each.writers), len(each.readers)) > 1)
    parts = (name for name, each in channels.classes.items() if each.is_part)
    return OrderSharing(frozenset(name for name in (*several, *parts) if not channels.classes[name].is_fixed))


def one_shuffle(channels: NetworkChannels) -> OrderSharing:
    """As `share_streams`, and one order for all but one of the classes in a row between two shared ones.

    The smallest keeps two orders, the last of equals. A layer's two sides have one sequence of groups; with one order
    everywhere, all layers of a row would connect the same groups of channels.
    """
    shared = share_streams(channels).shared
    more: set[str] = set()
    for between in _between_shared(channels, shared):
        smallest = min(reversed(between), key=lambda name: channels.classes[name].num_bytes)
        more.update(name for name in between if name != smallest)
    return OrderSharing(shared | more)


def _between_shared(channels: NetworkChannels, shared: frozenset[str]) -> Iterator[list[str]]:
    """The unshared classes in a row between two sides that are shared; each has one writer and one reader."""
    for sides in channels.sides.values():
        between: list[str] = []
        outputs = sides.outputs
        if not sides.inputs or not shared.issuperset(sides.inputs):
            continue
        while len(outputs) == 1 and not shared.issuperset(outputs):
            (name,) = outputs
            between.append(name)
            after = [channels.sides[reader] for reader in channels.classes[name].readers]
            outputs = after[0].outputs if after and after[0].inputs == (name,) else ()
        if between and outputs and shared.issuperset(outputs):
            yield between


# What a network's graph says.


def network_channels(model: nn.Module, example_inputs: ExampleInputs) -> NetworkChannels:
    """Find the channels of a dense network that several layers see. The model does not change, in either mode.

    Args:
        model: the network before any layer is grouped. Wrappers are removed from the names, as in `select_layers`.
        example_inputs: a tensor, or a tuple of the positional arguments of `forward`.

    Raises:
        UntraceableNetwork: the network's code cannot be traced, because it depends on data, for instance.

    >>> import torch
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 5, 1))
    >>> channels = network_channels(model, torch.zeros(1, 3, 6, 6))
    >>> channels.classes["0"].readers, channels.sides["3"].inputs, channels.classes["3"].is_fixed
    (('3',), ('0',), True)
    """
    graph, names = joined_channel_graph(model, example_inputs)
    for layer in graph.grouped.values():
        # Its own groups are of natural channels.
        for layout in (layer.inputs, layer.outputs):
            graph.classes.pin(layout, "a layer has groups of its own")
    meetings = list(_meetings(graph, names))
    classes = _classes(graph, meetings)
    sides = {name: LayerSides() for module, name in names.items() if isinstance(module, LAYERS_WITH_CHANNELS)}
    for meeting in meetings:
        # Calls of one module have the same classes, or none.
        found = tuple(classes[root].name for root in meeting.roots) if _can_share(meeting.layout, graph) else ()
        side = {"outputs": found} if meeting.is_writer else {"inputs": found}
        sides[meeting.layer] = replace(sides[meeting.layer], **side)
    return NetworkChannels({each.name: each for each in classes.values()}, sides)


def joined_channel_graph(model: nn.Module, example_inputs: ExampleInputs) -> tuple[ChannelGraph, dict[nn.Module, str]]:
    """The channel graph of a copy of a network, and the names of its modules by the modules of the copy.

    All calls of a module see their channels in one order.

    Raises:
        UntraceableNetwork: the network's code cannot be traced.
    """
    inference = _bare_copy(model)
    arguments = arguments_of(inference, example_inputs)
    with undisturbed(inference):
        try:
            graph_module = traced(inference, fresh_arguments(arguments))
        # Tracing runs the network's own code on symbols, which can raise any error.
        except Exception as error:
            # Wrong inputs raise the network's own error.
            _bare_copy(model)(*fresh_arguments(arguments))
            raise UntraceableNetwork(_untraceable(error, inference)) from error
    other_norms_as_modules_(graph_module)
    graph = with_joined_calls(channel_graph(graph_module), calls_by_origin(graph_module).values())
    return graph, {module: name for name, module in bare_modules(inference)}


def _bare_copy(model: nn.Module) -> nn.Module:
    inference = inference_copy(unwrapped(model))
    unwrap_children_(inference)
    return inference


class _Meeting(NamedTuple):
    """A layer reads or writes a tensor."""

    layer: str
    is_writer: bool
    layout: Layout
    roots: tuple[int, ...]
    num_bytes: int


def _meetings(graph: ChannelGraph, names: Mapping[nn.Module, str]) -> Iterator[_Meeting]:
    """Both sides of all calls of dense and grouped layers."""
    for node in graph.graph_module.graph.nodes:
        if node not in graph.dense and node not in graph.grouped:
            continue
        layer = names[called_module(node, graph.graph_module)]
        inputs, outputs = graph.sides(node)
        (source,) = node.all_input_nodes
        yield _Meeting(layer, False, inputs, graph.classes.roots(inputs), tensor_bytes(source))
        yield _Meeting(layer, True, outputs, graph.classes.roots(outputs), tensor_bytes(node))


def _classes(graph: ChannelGraph, meetings: Sequence[_Meeting]) -> dict[int, ChannelClass]:
    """The classes that layers meet, in the order of the calls."""
    by_root: dict[int, list[_Meeting]] = defaultdict(list)
    for meeting in meetings:
        for root in dict.fromkeys(meeting.roots):
            by_root[root].append(meeting)
    found, num_named = {}, Counter[str]()
    for root, met in by_root.items():
        writers = tuple(dict.fromkeys(meeting.layer for meeting in met if meeting.is_writer))
        readers = tuple(dict.fromkeys(meeting.layer for meeting in met if not meeting.is_writer))
        name, width = writers[0] if writers else f"{readers[0]}.input", graph.classes.width(root)
        num_named[name] += 1
        found[root] = ChannelClass(
            name=name if num_named[name] == 1 else f"{name}#{num_named[name]}",
            width=width,
            writers=writers,
            readers=readers,
            num_bytes=max(each.num_bytes * width // sum(graph.classes.widths(each.layout)) for each in met),
            is_part=any(len(meeting.roots) > 1 for meeting in met),
            is_fixed=graph.classes.is_pinned(root),
        )
    return found


def _can_share(layout: Layout, graph: ChannelGraph) -> bool:
    """Whether some channels of a side can be in an order that other layers use too."""
    return layout.repeat == 1 and not all(graph.classes.is_pinned(root) for root in graph.classes.roots(layout))


def _untraceable(error: Exception, model: nn.Module) -> str:
    names, place = {module: name for name, module in bare_modules(model)}, "the network"
    for frame, line in traceback.walk_tb(error.__traceback__):
        module = frame.f_locals.get("self")
        if frame.f_code.co_name == "forward" and isinstance(module, nn.Module) and module in names:
            place = f"{names[module] or '(model)'} ({type(module).__name__}), {frame.f_code.co_filename}:{line}"
    reason = f"{type(error).__name__}: {error}".splitlines()[0]
    return (
        f"tracing stopped in {place} ({reason}); change the code there so that it does not branch on tensors, or "
        "register what the module does to channels with strucspars.channels.register_channel_rule"
    )
