"""Which channels a network can lose together, in which of its modules, and why others have to stay."""

import operator
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import fx, nn

from strucspars.channels.graph import ChannelGraph
from strucspars.channels.orders import Layout
from strucspars.channels.sharing import joined_channel_graph
from strucspars.channels.tracing import called_module
from strucspars.core.narrowing import ModuleChannels
from strucspars.cost.counting import ExampleInputs
from strucspars.nn.groupable import WeightUses, is_plain, parameter_key
from strucspars.nn.layers import is_grouped

ADDITIONS = frozenset({operator.add, operator.iadd, torch.add, "add", "add_"})


@dataclass(frozen=True, kw_only=True)
class PrunableClass:
    """Channels that a network can only lose in all their layers and norms at once.

    Attributes:
        name: of the first layer that writes them; further classes of that layer are "NAME#2" and so on.
        width: number of channels.
        writers, readers: the convolutions and linear layers that do; not depthwise ones, which keep the channels.
        norms: norms and depthwise convolutions that the channels pass.
        is_stream: whether they are added to others, as in a residual stream.
        reason: why none of them can go; empty where some can.
    """

    name: str
    width: int
    writers: tuple[str, ...]
    readers: tuple[str, ...]
    norms: tuple[str, ...]
    is_stream: bool
    reason: str


@dataclass(frozen=True)
class PrunableChannels:
    """The classes of a network's channels, those that every module sees, and the groups that layers have already."""

    classes: Mapping[str, PrunableClass]
    modules: Mapping[str, ModuleChannels]
    own_groups: Mapping[str, int]

    def sides(self, narrower: Mapping[str, object]) -> dict[str, ModuleChannels]:
        """The modules that see some of these classes, with only the sides that do."""
        found = {}
        for name, sides in self.modules.items():
            outputs, inputs = (
                names if any(each in narrower for each in names) else () for names in (sides.outputs, sides.inputs)
            )
            if outputs or inputs:
                found[name] = replace(sides, outputs=outputs, inputs=inputs)
        return found


def prunable_channels(model: nn.Module, example_inputs: ExampleInputs) -> PrunableChannels:
    """Find the classes of channels of a dense network. The model does not change, in either mode.

    Args:
        model: the network before any layer is grouped. Wrappers are removed from the names, as in `select_layers`.
        example_inputs: a tensor, or a tuple of the positional arguments of `forward`.

    Raises:
        UntraceableNetwork: the network's code cannot be traced.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 5, 1))
    >>> channels = prunable_channels(model, torch.zeros(1, 3, 6, 6))
    >>> channels.classes["0"].norms, channels.classes["3"].reason
    (('1',), 'the network returns them')
    """
    graph, names = joined_channel_graph(model, example_inputs)
    meetings = list(_meetings(graph, names))
    for meeting in meetings:
        for layout in (meeting.outputs, meeting.inputs):
            if meeting.reason:
                graph.classes.hold(layout, meeting.reason)
    class_names = _names(graph, meetings)
    modules = {}
    for meeting in meetings:
        outputs, inputs = (
            () if layout is None else tuple(class_names[root] for root in graph.classes.roots(layout))
            for layout in (meeting.outputs, meeting.inputs)
        )
        repeat = 1 if meeting.inputs is None else meeting.inputs.repeat
        modules[meeting.module] = ModuleChannels(outputs=outputs, inputs=inputs, repeat=repeat)
    streams = set(_streams(graph))
    classes = {}
    for root, name in class_names.items():
        met = [(each, each.sees(root, graph)) for each in meetings]
        classes[name] = PrunableClass(
            name=name,
            width=graph.classes.width(root),
            writers=tuple(dict.fromkeys(each.module for each, (writes, _) in met if writes and each.is_layer)),
            readers=tuple(dict.fromkeys(each.module for each, (_, reads) in met if reads)),
            norms=tuple(dict.fromkeys(each.module for each, (writes, _) in met if writes and not each.is_layer)),
            is_stream=root in streams,
            reason=graph.classes.reason_to_keep_all(root),
        )
    own_groups = {each.module: each.groups for each in meetings if each.groups > 1}
    return PrunableChannels(classes, modules, own_groups)


@dataclass(frozen=True, kw_only=True)
class _Meeting:
    """A call of a module whose tensors follow the channels that it sees.

    `groups` are those that the network's own layer has; `inputs` is None where the outputs are the same channels.
    """

    module: str
    outputs: Layout
    inputs: Layout | None
    groups: int
    reason: str

    @property
    def is_layer(self) -> bool:
        """Whether the outputs are new channels."""
        return self.inputs is not None

    def sees(self, root: int, graph: ChannelGraph) -> tuple[bool, bool]:
        """Whether a class is among the (outputs, inputs)."""
        sides = (self.outputs, self.inputs)
        writes, reads = (layout is not None and root in graph.classes.roots(layout) for layout in sides)
        return writes, reads


def _meetings(graph: ChannelGraph, names: Mapping[nn.Module, str]) -> Iterator[_Meeting]:
    graph_module = graph.graph_module
    uses = WeightUses.of(next(module for module, name in names.items() if not name))
    read = {parameter_key(tensor) for tensor in _tensors_read(graph_module)}
    for node in graph_module.graph.nodes:
        sides = graph.sides(node)
        if not sides:
            continue
        module = called_module(node, graph_module)
        yield _Meeting(
            module=names[module],
            outputs=sides[-1],
            inputs=sides[0] if len(sides) > 1 else None,
            groups=graph.grouped[node].num_groups if node in graph.grouped else 1,
            reason=_reason_to_stay(names[module], module, uses, read),
        )


def _tensors_read(graph_module: fx.GraphModule) -> Iterator[torch.Tensor]:
    """The tensors that the network's code uses directly."""
    for node in graph_module.graph.nodes:
        if node.op == "get_attr":
            value = operator.attrgetter(str(node.target))(graph_module)
            if isinstance(value, torch.Tensor):
                yield value


def _reason_to_stay(name: str, module: nn.Module, uses: WeightUses, read: set[int]) -> str:
    """Why the tensors of a module cannot become smaller; empty where they can."""
    what = f"{type(module).__name__} {name!r}"
    if is_grouped(module):
        return f"{what} is grouped already: choose channels and groups in one plan"
    if module in uses.readers:
        return f"{uses.readers[module]} computes with the weight of {what} itself"
    for tensor in (*module.parameters(), *module.buffers()):
        if parameter_key(tensor) in read:
            return f"the network's code reads a tensor of {what} directly"
    for parameter in module.parameters():
        if not is_plain(parameter):
            return f"{what} has a {type(parameter).__name__}, not a plain tensor"
        others = [owner for owner in uses.owners[parameter_key(parameter)] if owner != name]
        if others:
            return f"{what} shares a parameter with {others[0]!r}"
    return ""


def _names(graph: ChannelGraph, meetings: list[_Meeting]) -> dict[int, str]:
    """The name of every class: the first layer that writes it, or the first module that sees it and ".input"."""
    writers: dict[int, list[str]] = defaultdict(list)
    seen: dict[int, str] = {}
    for meeting in meetings:
        for layout in filter(None, (meeting.inputs, meeting.outputs)):
            for root in graph.classes.roots(layout):
                seen.setdefault(root, f"{meeting.module}.input")
                if meeting.is_layer and layout is meeting.outputs:
                    writers[root].append(meeting.module)
    count, names = Counter[str](), {}
    for root, first_seen in seen.items():
        name = writers[root][0] if writers[root] else first_seen
        count[name] += 1
        names[root] = name if count[name] == 1 else f"{name}#{count[name]}"
    return names


def _streams(graph: ChannelGraph) -> Iterator[int]:
    """The classes that result from additions of several tensors with channels."""
    for node in graph.graph_module.graph.nodes:
        terms = [graph.layouts[source] for source in node.all_input_nodes if source in graph.layouts]
        if node.target in ADDITIONS and len(terms) > 1 and node in graph.layouts:
            yield from graph.classes.roots(graph.layouts[node])
