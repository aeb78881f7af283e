"""The graph of a network in which every call has a separate module, and the shapes of its tensors."""

import copy
import inspect
import operator
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import partialmethod
from typing import Any, cast

import torch
from torch import fx, nn
from torch.fx.node import Argument, map_aggregate
from torch.fx.passes.shape_prop import TensorMetadata, _extract_tensor_metadata

from strucspars.nn.batch_norms import modules_after_norm
from strucspars.nn.layers import is_grouped
from strucspars.nn.names import copied

# In the meta of calls: the name of the module that the called one is a copy of.
ORIGIN_KEY = "strucspars.origin"

# In the meta of calls of plain norms: the name of the module of another library that they stand for.
NORM_KEY = "strucspars.norm"

# Modules that stay single calls, with all that is inside them: those that channel rules are registered for.
LEAF_TYPES: set[type[nn.Module]] = set()

SPLIT_FUNCTIONS = frozenset({torch.chunk, torch.split})
SPLIT_METHODS = frozenset({"chunk", "split"})
# What does not depend on the order of channels. Not "type", which with an argument gives another tensor.
SHAPE_METHODS = frozenset({"size", "dim", "numel", "is_floating_point"})
SHAPE_ATTRIBUTES = frozenset({"shape", "ndim", "dtype", "device"})

# While PyTorch traces, the calls of all modules in the process go to the tracer.
_TRACING = threading.RLock()


class FoldedGraph(fx.GraphModule):
    """A graph whose `meta`, which holds the report, is kept when it is pickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (super().__reduce__(), type(self).__name__, self.meta)


def _restored(reduced: tuple[Any, ...], name: str, meta: dict[str, Any]) -> FoldedGraph:
    restore, arguments = reduced
    graph_module = restore(*arguments)
    folded = FoldedGraph(graph_module, graph_module.graph, name)
    folded.meta = meta
    return folded


def graph_of_one_call(model: nn.Module, num_inputs: int) -> FoldedGraph:
    """A graph that does nothing but call the model."""
    graph = fx.Graph()
    inputs = tuple(graph.placeholder(f"input_{place}") for place in range(1, num_inputs + 1))
    graph.output(graph.call_module("model", inputs))
    return FoldedGraph(nn.ModuleDict({"model": model}), graph, type(model).__name__)


def inference_copy(model: nn.Module) -> nn.Module:
    """A copy in eval mode that shares no tensors."""
    inference = copied(model)
    for module in inference.modules():
        module.training = False
    # Autocast keeps casts of trainable weights, which folding changes in place.
    return inference.requires_grad_(False)


def traced(model: nn.Module, arguments: tuple[Any, ...]) -> FoldedGraph:
    """Trace a network and note the shapes that the arguments give. The graph shares the modules of the network.

    The graph has an input for every argument. Tensors inside them are symbols; numbers, flags, texts and None, on which
    the code may branch, are fixed. Raises any error that stops the tracing, such as control flow that depends on data.
    """
    tracer = _Tracer()
    tracer.arguments = arguments
    # The root is always opened: a single layer would fall apart into functions.
    root = nn.Sequential(model) if tracer.is_leaf_module(model, "") else model
    with _TRACING:
        graph = tracer.trace(root)
    graph_module = FoldedGraph(root, graph, type(model).__name__)
    _separate_calls_(graph_module)
    _Shapes(graph_module).run(*arguments)
    return graph_module


class _InPlaceProxy(fx.Proxy):
    """A symbol for which `x += y` changes x, as it does for tensors; PyTorch's makes another tensor."""

    def _changed_by(self, function: Callable[[Any, Any], Any], other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    __iadd__ = partialmethod(_changed_by, operator.iadd)
    __isub__ = partialmethod(_changed_by, operator.isub)
    __imul__ = partialmethod(_changed_by, operator.imul)
    __itruediv__ = partialmethod(_changed_by, operator.itruediv)

    def __len__(self) -> int:
        # `list(...)` asks for it.
        num_parts = _num_channel_parts(self.node)
        return super().__len__() if num_parts is None else num_parts


class _Tracer(fx.Tracer):
    """Keeps grouped layers as single calls, like PyTorch's own modules without grouped layers inside."""

    # Without them when a pickled graph is loaded, which traces it again.
    arguments: tuple[Any, ...] | None = None

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """As in PyTorch, but the networks of other threads go on as if there were no tracer."""
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        # PyTorch's method would also turn defaults into inputs; and its code for fixed arguments, once loaded, makes
        # tracing of all later networks fail (pytorch#130701).
        if self.arguments is None:
            return super().create_args_for_root(root_fn, is_module, concrete_args)
        parameters = list(inspect.signature(root_fn).parameters.values())[1:]
        by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        names = [parameter.name for parameter in parameters if parameter.kind in by_position]
        names += [f"input_{place + 1}" for place in range(len(names), len(self.arguments))]
        annotations = getattr(root_fn, "__annotations__", {})
        given = []
        for name, value in zip(names, self.arguments, strict=False):
            symbol = self.create_proxy("placeholder", name, (), {}, type_expr=annotations.get(name))
            given.append(value if value is None or isinstance(value, bool | int | float | str) else symbol)
        return root_fn, [self.root, *given]

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _InPlaceProxy(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if is_grouped(m) or modules_after_norm(m) is not None or type(m) in LEAF_TYPES:
            return True
        return not any(map(is_grouped, m.modules())) and super().is_leaf_module(m, module_qualified_name)

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        """As in PyTorch, and over parts of the channels where the call tells their number: `list(x.chunk(2, 1))`."""
        num_parts = _num_channel_parts(obj.node)
        if num_parts is None:
            return super().iter(obj)
        places = range(num_parts)
        return iter([self.create_proxy("call_function", operator.getitem, (obj, place), {}) for place in places])

    def create_arg(self, a: Any) -> Argument:
        """As in PyTorch, but tensors from outside the network are copied into the graph."""
        if isinstance(a, torch.Tensor):
            own = (*self.root.parameters(), *self.root.buffers(), *self.tensor_attrs)
            if all(a is not tensor for tensor in own):
                a = a.detach().clone()
        return super().create_arg(a)


class _Shapes(fx.Interpreter):
    """Runs a graph and notes the shapes of its tensors. Not PyTorch's ShapeProp, which prints tracebacks of errors."""

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        n.meta["tensor_meta"] = map_aggregate(
            result, lambda value: _extract_tensor_metadata(value) if isinstance(value, torch.Tensor) else None
        )
        return result


def _separate_calls_(graph_module: fx.GraphModule) -> None:
    """Give every call a module that no other call, and no direct use of its parameters, shares."""
    nodes = list(graph_module.graph.nodes)
    calls = Counter(id(graph_module.get_submodule(node.target)) for node in nodes if node.op == "call_module")
    owners = Counter(
        id(tensor)
        for module in graph_module.modules()
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))
    )
    # A module may have several names.
    names: dict[int, str] = {}
    read = {id(operator.attrgetter(node.target)(graph_module)) for node in nodes if node.op == "get_attr"}
    for node in nodes:
        if node.op != "call_module":
            continue
        module = graph_module.get_submodule(node.target)
        tensors = [*module.parameters(), *module.buffers()]
        if calls[id(module)] > 1 or any(owners[id(tensor)] > 1 or id(tensor) in read for tensor in tensors):
            node.meta[ORIGIN_KEY] = names.setdefault(id(module), node.target)
            node.target = free_name(graph_module, node.target)
            graph_module.add_submodule(node.target, copy.deepcopy(module))


def called_module(node: fx.Node, graph_module: fx.GraphModule) -> nn.Module:
    """The module of the network itself that a node calls, or calls a copy of."""
    return graph_module.get_submodule(node.meta.get(ORIGIN_KEY) or node.meta.get(NORM_KEY) or str(node.target))


def calls_by_origin(graph_module: fx.GraphModule) -> dict[str, list[fx.Node]]:
    """The calls of copies, by the name of the module that they are copies of."""
    calls = defaultdict(list)
    for node in graph_module.graph.nodes:
        if ORIGIN_KEY in node.meta:
            calls[node.meta[ORIGIN_KEY]].append(node)
    return dict(calls)


def other_norms_as_modules_(graph_module: fx.GraphModule) -> None:
    """Let modules of PyTorch compute the batch norms of other libraries and what follows them there, in place."""
    for node in list(graph_module.graph.nodes):
        norm = graph_module.get_submodule(node.target) if node.op == "call_module" else nn.Identity()
        after = modules_after_norm(norm)
        # Some also take an image without a batch axis, and add one.
        if after is None or not has_plain_forward(norm) or len(source_shape(node)) != 4 or norm.running_mean is None:
            continue
        last, mean = node.args[0], cast(torch.Tensor, norm.running_mean)
        eps = cast(nn.BatchNorm2d, norm).eps
        plain = nn.BatchNorm2d(len(mean), eps=eps, device=mean.device, dtype=mean.dtype).eval()
        for name in ("running_mean", "running_var", "weight", "bias"):
            tensor = getattr(norm, name)
            # Without scales to copy, the plain norm starts with ones and zeros.
            if tensor is not None:
                getattr(plain, name).data = tensor.detach().clone()
        with graph_module.graph.inserting_before(node):
            for name, module in {"norm": plain, **after}.items():
                free = free_name(graph_module, f"{node.target}_{name}")
                graph_module.add_submodule(free, module)
                last = graph_module.graph.call_module(free, (last,))
                last.meta = {NORM_KEY: node.target} | node.meta
        node.replace_all_uses_with(last)
        graph_module.graph.erase_node(node)


def argument(node: fx.Node, place: int, *names: str, default: Any = None) -> Any:
    """An argument of a call, by its position or by one of its names."""
    if len(node.args) > place:
        return node.args[place]
    return next((node.kwargs[name] for name in names if name in node.kwargs), default)


def _num_channel_parts(node: fx.Node) -> int | None:
    """Number of parts that a call cuts axis 1 into; None where it does not tell, or does something else."""
    target = node.target
    is_cut = target in SPLIT_FUNCTIONS if node.op == "call_function" else target in SPLIT_METHODS
    if not is_cut or argument(node, 2, "dim", default=0) != 1:
        return None
    parts = argument(node, 1, "chunks", "split_size_or_sections", "split_size")
    if isinstance(parts, list | tuple):
        return len(parts)
    return parts if isinstance(parts, int) and target in (torch.chunk, "chunk") else None


def asks_for_shape(node: fx.Node) -> bool:
    """Whether a call reads only properties of a tensor that do not depend on its channel order."""
    if node.op == "call_method":
        return node.target in SHAPE_METHODS
    return node.target is getattr and str(node.args[1]) in SHAPE_ATTRIBUTES


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
    """Whether calling the module does what its type says: no hooks, no replaced forward."""
    return not (module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def free_name(graph_module: fx.GraphModule, name: str) -> str:
    """The name with the first number that no module, parameter or buffer has yet."""
    owner, _, last_name = name.rpartition(".")
    module = graph_module.get_submodule(owner)
    # Not dir() alone: it leaves out names that start with a digit, as those in a Sequential do.
    taken = {*dir(module), *module._modules}
    return next(f"{name}_{number}" for number in range(1, len(taken) + 2) if f"{last_name}_{number}" not in taken)
