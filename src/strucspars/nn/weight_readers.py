"""Layers whose tensors another module reads past their own forward: known by the source of that module's methods."""

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from types import MethodType

from torch import nn

from strucspars.nn.names import unwrapped
from strucspars.nn.source_paths import ANY, SourcePaths, first_argument

# A bias read past its layer would come in the order of the groups.
_TENSORS = ("weight", "bias")
# Who only asks a tensor for these, or hands it over to them, calls the layer all the same.
_ASKED_FOR = {"device", "dim", "dtype", "is_cuda", "layout", "ndim", "numel", "requires_grad", "shape", "size"}
_ASKING = {"isinstance", "to", "type_as"}


def readers_of_weights(model: nn.Module) -> Mapping[nn.Module, str]:
    """The layers whose weight or bias another module reads directly, with words for who reads which.

    Attentions do so, and PyTorch's transformers in inference; partial convolutions read the bias alone. Such layers can
    neither change their shape and order nor hide what is pruned.
    """
    readers: dict[nn.Module, str] = {}
    reads_of_kinds: dict[tuple[type[nn.Module], Callable[..., object] | None], tuple[tuple[str, str], ...]] = {}
    for parent in model.modules():
        kind = type(parent), _forward_of_its_own(parent)
        if kind not in reads_of_kinds:
            reads_of_kinds[kind] = _tensors_read_by(*kind)
        # The weight is told of before the bias, and the module nearest to the layer, which comes last, before others.
        for path, tensor in reversed(reads_of_kinds[kind]):
            for layer in _modules_at(parent, path):
                if _may_have(layer, tensor):
                    readers[layer] = f"{type(parent).__name__} reads its {tensor}"
    return readers


def _modules_at(parent: nn.Module, path: str) -> list[nn.Module]:
    """The modules that a path leads to; none if what the source names is no module, or missing in this one."""
    found = [parent]
    for part in path.split("."):
        inside = (module.children() if part == ANY else [_attribute(module, part)] for module in found)
        found = [unwrapped(child) for children in inside for child in children if isinstance(child, nn.Module)]
    return found


def _attribute(module: nn.Module, name: str) -> object:
    try:
        return getattr(module, name, None)
    # It may be a property, which fails as it likes where nobody has called the network.
    except Exception:
        return None


def _may_have(layer: nn.Module, tensor: str) -> bool:
    """Whether there is such a tensor to read: a layer that was made without it has its place, and that is empty."""
    return layer._parameters.get(tensor, tensor) is not None


def _forward_of_its_own(module: nn.Module) -> Callable[..., object] | None:
    """The function that was made the `forward` of this very object; None if that is its type's."""
    forward = vars(module).get("forward")
    return forward.__func__ if isinstance(forward, MethodType) and forward.__self__ is module else None


def _tensors_read_by(
    parent_type: type[nn.Module], own_forward: Callable[..., object] | None = None
) -> tuple[tuple[str, str], ...]:
    """Paths of the layers whose tensors a type's forward reads, or an object's own, or a method used, and which tensor.

    >>> _tensors_read_by(nn.MultiheadAttention), _tensors_read_by(nn.Conv2d)
    ((('out_proj', 'weight'), ('out_proj', 'bias')), ())
    """
    methods = _methods_of_a_call(parent_type, own_forward)
    return tuple(dict.fromkeys(read for method in methods for read in _tensors_read_in(method)))


def _methods_of_a_call(
    parent_type: type[nn.Module], own_forward: Callable[..., object] | None
) -> Iterator[Callable[..., object]]:
    """`forward`, and all methods and properties that it uses by their names, with those that they override."""
    names = ["forward"]
    if own_forward is not None:
        yield own_forward
        names += [used for used in _own_names_in(own_forward) if used not in names]
    # Grows as it is gone through.
    for name in names:
        for base in parent_type.__mro__:
            method = None if base is nn.Module else _function(vars(base).get(name))
            if method is not None:
                yield method
                names += [used for used in _own_names_in(method) if used not in names]


def _function(attribute: object) -> Callable[..., object] | None:
    """The function that an attribute of a class is made of; None if it is none."""
    if isinstance(attribute, property):
        return attribute.fget
    if isinstance(attribute, functools.cached_property):
        return attribute.func
    return attribute if inspect.isroutine(attribute) else None


@lru_cache(maxsize=4096)
def _source(method: Callable[..., object]) -> ast.Module | None:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(method)))
    except (OSError, SyntaxError, TypeError):
        # Made by a program, typed in, or a piece of a line.
        return None


@lru_cache(maxsize=4096)
def _own_names_in(method: Callable[..., object]) -> tuple[str, ...]:
    """What a method uses of the object itself, or of the class it is derived from."""
    tree = _source(method)
    if tree is None:
        return ()
    own_name = first_argument(tree)
    used = []
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id=start), attr=name) if start == own_name:
                used.append(name)
            case ast.Attribute(value=ast.Call(func=ast.Name(id="super")), attr=name):
                used.append(name)
    return tuple(dict.fromkeys(used))


@lru_cache(maxsize=4096)
def _tensors_read_in(method: Callable[..., object]) -> tuple[tuple[str, str], ...]:
    tree = _source(method)
    if tree is None:
        return ()
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    paths = SourcePaths(tree)
    reads = [
        (path, node.attr)
        for node in parents
        if isinstance(node, ast.Attribute) and node.attr in _TENSORS and not _is_asked_only(node, parents[node])
        for path in sorted(paths.of(node.value))
    ]
    return tuple((".".join(path), tensor) for path, tensor in reads if path)


def _is_asked_only(tensor: ast.Attribute, parent: ast.AST) -> bool:
    match parent:
        case ast.Attribute(attr=name):
            return name in _ASKED_FOR
        case ast.Compare(ops=operators):
            return all(isinstance(operator, ast.Is | ast.IsNot) for operator in operators)
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=arguments):
            return tensor in arguments and name in _ASKING
    return False
