"""Layers whose tensors another module reads past their own forward: known by the source of that module's forward."""

import ast
import inspect
import textwrap
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache

from torch import nn

from strucspars.nn.wrappers import unwrapped

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
    for parent in model.modules():
        for path, tensor in _tensors_read_by(type(parent)):
            # What the source names may be no module, or be missing in this one.
            with suppress(AttributeError):
                layer = unwrapped(parent.get_submodule(path))
                if not _is_left_out(layer, tensor):
                    readers.setdefault(layer, f"{type(parent).__name__} reads its {tensor}")
    return readers


def _is_left_out(layer: nn.Module, tensor: str) -> bool:
    """Whether a layer was made without this tensor: its place is there, and empty."""
    return tensor in layer._parameters and layer._parameters[tensor] is None


def _tensors_read_by(parent_type: type[nn.Module]) -> tuple[tuple[str, str], ...]:
    """Paths of the layers whose tensors a type's forward reads, or that of a type it is derived from, and which tensor.

    >>> _tensors_read_by(nn.MultiheadAttention), _tensors_read_by(nn.Conv2d)
    ((('out_proj', 'weight'), ('out_proj', 'bias')), ())
    """
    forwards = [vars(base)["forward"] for base in parent_type.__mro__ if "forward" in vars(base)]
    return tuple(dict.fromkeys(read for forward in forwards for read in _tensors_read_in(forward)))


@lru_cache(maxsize=1024)
def _tensors_read_in(forward: Callable[..., object]) -> tuple[tuple[str, str], ...]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, SyntaxError, TypeError):
        # Made by a program, typed in, or a piece of a line.
        return ()
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    own_name = _first_argument(tree)
    reads = [
        (_path_from(own_name, node.value), node.attr)
        for node in parents
        if isinstance(node, ast.Attribute) and node.attr in _TENSORS and not _is_asked_only(node, parents[node])
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


def _first_argument(tree: ast.Module) -> str:
    """What a method calls the object itself, usually self."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and (arguments := [*node.args.posonlyargs, *node.args.args]):
            return arguments[0].arg
    return "self"


def _path_from(own_name: str, node: ast.expr) -> tuple[str, ...]:
    """The names that lead to a module, such as `self.layers[0].conv`; none if it is reached in another way."""
    match node:
        case ast.Attribute(value=ast.Name(id=start), attr=name) if start == own_name:
            return (name,)
        case ast.Attribute(value=inner, attr=name) if path := _path_from(own_name, inner):
            return (*path, name)
        case ast.Subscript(value=inner, slice=ast.Constant(value=int(index))) if path := _path_from(own_name, inner):
            return (*path, str(index))
    return ()
