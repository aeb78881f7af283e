"""The graph of a network in which every call has a module of its own, and the shapes of its tensors."""

import copy
import inspect
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Set
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import Argument, map_aggregate, map_arg
from torch.fx.passes.shape_prop import TensorMetadata, _extract_tensor_metadata

from strucspars.channels.rules import num_channel_parts
from strucspars.nn.batch_norms import is_frozen_batch_norm
from strucspars.nn.layers import is_grouped


class FoldedGraph(fx.GraphModule):
    """A graph whose `meta`, where the report is, survives pickling as it survives copying."""

    def __reduce__(self) -> tuple[Any, ...]:
        """What pickle stores: what it would store of any graph, and the meta, which PyTorch leaves out."""
        return _restored, (*super().__reduce__(), type(self).__name__, self.meta)


def _restored(
    restore: Callable[..., fx.GraphModule], arguments: tuple[Any, ...], name: str, meta: dict[str, Any]
) -> FoldedGraph:
    graph_module = restore(*arguments)
    folded = FoldedGraph(graph_module, graph_module.graph, name)
    folded.meta = meta
    return folded


def graph_of_one_call(model: nn.Module, num_inputs: int) -> FoldedGraph:
    """A graph that does nothing but call the model."""
    root = nn.Module()
    root.model = model
    graph = fx.Graph()
    inputs = tuple(graph.placeholder(f"input_{place}") for place in range(1, num_inputs + 1))
    graph.output(graph.call_module("model", inputs))
    return FoldedGraph(root, graph, type(model).__name__)


# In the meta of calls: the name of the module that the one called is a copy of.
ORIGIN_KEY = "strucspars.origin"


class _InPlaceProxy(fx.Proxy):
    """A stand-in for which `x += y` changes x, as it does for tensors; with the usual one it makes another tensor.

    Of parts of the channels it knows the number, so that they can be listed.
    """

    def __iadd__(self, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", operator.iadd, (self, other), {})

    def __isub__(self, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", operator.isub, (self, other), {})

    def __imul__(self, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", operator.imul, (self, other), {})

    def __itruediv__(self, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", operator.itruediv, (self, other), {})

    def __len__(self) -> int:
        # `list(...)` asks for it.
        num_parts = num_channel_parts(self.node)
        return super().__len__() if num_parts is None else num_parts


class _Tracer(fx.Tracer):
    """Takes our grouped layers for single calls, as it does modules of PyTorch that have none of ours inside."""

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _InPlaceProxy(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if is_grouped(m) or is_frozen_batch_norm(m):
            return True
        return not any(map(is_grouped, m.modules())) and super().is_leaf_module(m, module_qualified_name)

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        """As PyTorch does, and parts of the channels whose number the call tells, as in `list(x.chunk(2, 1))`.

        A chunk may give fewer parts: then the last ones are missing in the first run of the graph.
        """
        num_parts = num_channel_parts(obj.node)
        if num_parts is None:
            return super().iter(obj)
        places = range(num_parts)
        return iter([self.create_proxy("call_function", operator.getitem, (obj, place), {}) for place in places])

    def create_arg(self, a: Any) -> Argument:
        """As PyTorch does, but parameters of nobody here, such as an argument's default, are tensors like others."""
        is_foreign = isinstance(a, nn.Parameter) and all(a is not own for own in self.root.parameters())
        return super().create_arg(a.detach() if is_foreign else a)

    def trace(self, root: nn.Module | Callable[..., Any], concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        """As PyTorch does, and for graphs that are loaded too; none of them keeps later networks from being traced.

        The code of a graph registers functions that stay whole, those of PyTorch under names that no trace finds
        (pytorch#130701): after `wrap("torch.fx._symbolic_trace._assert_is_none")` every one fails, whatever the
        network. It knows them without that.
        """
        graph = super().trace(root, concrete_args)
        for node in graph.nodes:
            if str(getattr(node.target, "__module__", "")).startswith("torch."):
                node.meta.pop("is_wrapped", None)
        return graph


def traced(model: nn.Module, arguments: tuple[Any, ...]) -> FoldedGraph:
    """Trace a network and note the shapes that the arguments give. The graph shares the modules of the network.

    Raises whatever stops the tracing: control flow that depends on data, for one.
    """
    tracer = _Tracer()
    # The root is always opened: a single layer would fall apart into functions.
    root = nn.Sequential(model) if tracer.is_leaf_module(model, "") else model
    attributes = set(vars(root))
    graph = tracer.trace(root, _fixed_arguments(root, arguments))
    _copy_constants_(root, vars(root).keys() - attributes)
    num_by_position = _num_by_position(root)
    _settle_inputs_(graph, num_given=min(len(arguments), num_by_position), num_by_position=num_by_position)
    graph_module = FoldedGraph(root, graph, type(model).__name__)
    _separate_calls_(graph_module)
    _name_no_inputs_(graph_module)
    _Shapes(graph_module).run(*arguments)
    return graph_module


class _Shapes(fx.Interpreter):
    """Runs a graph and notes what its nodes give. Not PyTorch's ShapeProp, which prints the traceback of any error."""

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        n.meta["tensor_meta"] = map_aggregate(result, _shape_of_tensor)
        return result


def _shape_of_tensor(value: Any) -> Any:
    return _extract_tensor_metadata(value) if isinstance(value, torch.Tensor) else None


def _fixed_arguments(model: nn.Module, arguments: tuple[Any, ...]) -> dict[str, Any] | None:
    """Arguments of `forward` that are no tensors, or have their defaults: its code may branch on them."""
    fixed = {}
    for place, parameter in enumerate(inspect.signature(model.forward).parameters.values()):
        if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
            continue
        is_given = place < len(arguments) and parameter.kind is not inspect.Parameter.KEYWORD_ONLY
        value = arguments[place] if is_given else parameter.default
        if value is None or isinstance(value, bool | int | float | str):
            fixed[parameter.name] = value
    return fixed or None


def _copy_constants_(root: nn.Module, names: Set[str]) -> None:
    """Part the tensors that the tracer has found outside of the network, and kept in it, from where they were found."""
    for name in names:
        constant = getattr(root, name)
        if isinstance(constant, torch.Tensor):
            setattr(root, name, constant.clone())


def _num_by_position(model: nn.Module) -> int:
    """How many arguments `forward` takes by position, without those that it takes as `*args`."""
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(model.forward).parameters.values()
    return sum(parameter.kind in by_position for parameter in parameters)


def _settle_inputs_(graph: fx.Graph, *, num_given: int, num_by_position: int) -> None:
    """Leave the inputs that can be given by position as the network takes them; the others become constants.

    The code of a graph is text, which holds no tensors. So a default with tensors in it becomes a constant where the
    input was not given, and the input goes, with all that would take its place, `*args` too. One that was given has no
    default then, and neither have those before it. What the network takes by keyword only goes always: the code would
    take it by position, before `*args`. So does `**kwargs`, which would take the keywords of all that went.
    """
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    tensors = dict.fromkeys(tensor for node in inputs for tensor in node.all_input_nodes)
    places = [place for place, node in enumerate(inputs[:num_by_position]) if node.all_input_nodes]
    last_given = max((place for place in places if place < num_given), default=-1)
    first_left = min((place for place in places if place >= num_given), default=num_by_position)
    for node in inputs[: last_given + 1]:
        node.args = ()
    for node in inputs[first_left:]:
        if first_left < num_by_position or not _takes_the_rest_by_position(node):
            _replace_by_default_(node)
    for tensor in tensors:
        if not tensor.users:
            graph.erase_node(tensor)


def _takes_the_rest_by_position(node: fx.Node) -> bool:
    return str(node.target).startswith("*") and not str(node.target).startswith("**")


def _replace_by_default_(node: fx.Node) -> None:
    nothing: tuple[()] | dict[str, Any] = () if _takes_the_rest_by_position(node) else {}
    default = node.args[0] if node.args else nothing
    for user in list(node.users):
        # Not `replace_all_uses_with`, which takes a single tensor only.
        user.args, user.kwargs = map_arg((user.args, user.kwargs), lambda each: default if each is node else each)
    node.graph.erase_node(node)


def tensor_shape(node: fx.Node) -> tuple[int, ...] | None:
    """Shape of the tensor that a node gives for the example inputs; None if it gives anything else."""
    meta = node.meta.get("tensor_meta")
    return tuple(meta.shape) if isinstance(meta, TensorMetadata) else None


def tensor_shapes(node: fx.Node) -> tuple[tuple[int, ...], ...] | None:
    """Shapes of the tensors that a node gives as a list or tuple; None if it gives anything else."""
    parts = node.meta.get("tensor_meta")
    # The meta of a single tensor is a tuple too.
    if isinstance(parts, TensorMetadata) or not isinstance(parts, list | tuple):
        return None
    shapes = tuple(tuple(part.shape) for part in parts if isinstance(part, TensorMetadata))
    return shapes if len(shapes) == len(parts) else None


def source_shape(node: fx.Node) -> tuple[int, ...]:
    """Shape of the first argument of a call; empty if that is no tensor."""
    source = node.args[0] if node.args else None
    return tensor_shape(source) or () if isinstance(source, fx.Node) else ()


def tensor_bytes(node: fx.Node) -> int:
    """Size of the tensor that a node gives for the example inputs."""
    meta = node.meta["tensor_meta"]
    return int(meta.shape.numel() * meta.dtype.itemsize)


def has_plain_forward(module: nn.Module) -> bool:
    """Whether calling the module does what its type says: no hooks, no forward of its own."""
    return not (module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def _separate_calls_(graph_module: fx.GraphModule) -> None:
    """Give every call a module that no other call, and no direct use of its parameters, looks at."""
    nodes = list(graph_module.graph.nodes)
    calls = Counter(id(graph_module.get_submodule(node.target)) for node in nodes if node.op == "call_module")
    owners = Counter(
        id(tensor)
        for module in graph_module.modules()
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))
    )
    # A module may have several names.
    names: dict[int, str] = {}
    read = {id(attribute(graph_module, node.target)) for node in nodes if node.op == "get_attr"}
    for node in nodes:
        if node.op != "call_module":
            continue
        module = graph_module.get_submodule(node.target)
        tensors = [*module.parameters(), *module.buffers()]
        if calls[id(module)] > 1 or any(owners[id(tensor)] > 1 or id(tensor) in read for tensor in tensors):
            node.meta[ORIGIN_KEY] = names.setdefault(id(module), node.target)
            node.target = free_name(graph_module, node.target)
            graph_module.add_submodule(node.target, copy.deepcopy(module))


def _name_no_inputs_(graph_module: fx.GraphModule) -> None:
    """Write `layer(input=x)` as `layer(x)`, which is what everything else here looks for."""
    for node in graph_module.graph.nodes:
        if node.op != "call_module" or node.args or "input" not in node.kwargs:
            continue
        module = graph_module.get_submodule(node.target)
        if has_plain_forward(module) and next(iter(inspect.signature(module.forward).parameters)) == "input":
            node.args = (node.kwargs["input"],)
            node.kwargs = {name: value for name, value in node.kwargs.items() if name != "input"}


def attribute(graph_module: fx.GraphModule, name: str) -> Any:
    """What a node reads off the network, by its full name."""
    owner, _, last_name = name.rpartition(".")
    return getattr(graph_module.get_submodule(owner), last_name)


def without_unread_attributes(graph_module: FoldedGraph) -> FoldedGraph:
    """The same graph with no other modules, parameters and buffers than its nodes use.

    What is left of a layer that the graph only reads a tensor of is no layer, but a module that holds the tensor.
    """
    return FoldedGraph(graph_module, graph_module.graph, type(graph_module).__name__)


def free_name(graph_module: fx.GraphModule, name: str) -> str:
    """The name with the first number that no module, parameter or buffer has yet."""
    owner, _, attribute = name.rpartition(".")
    module = graph_module.get_submodule(owner)
    # Not dir() alone: it leaves out names that start with a digit, as those in a Sequential do.
    taken = {*dir(module), *module._modules}
    return next(f"{name}_{number}" for number in range(1, len(taken) + 2) if f"{attribute}_{number}" not in taken)
