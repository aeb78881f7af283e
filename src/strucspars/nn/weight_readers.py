"""Layers whose weights another module reads past their own forward: known by the source of that module's forward."""

import ast
import inspect
import textwrap
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache

from torch import nn

from strucspars.nn.wrappers import unwrapped

# Who only asks a weight for these, or hands it over to them, calls the layer all the same.
_ASKED_FOR = {"device", "dim", "dtype", "is_cuda", "layout", "ndim", "numel", "requires_grad", "shape", "size"}
_ASKING = {"isinstance", "to", "type_as"}


def readers_of_weights(model: nn.Module) -> Mapping[nn.Module, str]:
    """The layers whose weights another module reads directly, with that module's type.

    Attentions do so, and PyTorch's transformers in inference. Such layers can neither change their shape nor hide what
    is pruned.
    """
    readers = {}
    for parent in model.modules():
        for path in _weights_read_by(type(parent)):
            # What the source names may be no module, or be missing in this one.
            with suppress(AttributeError):
                readers[unwrapped(parent.get_submodule(path))] = type(parent).__name__
    return readers


def _weights_read_by(parent_type: type[nn.Module]) -> tuple[str, ...]:
    """Paths of the layers whose weights a type's forward reads, or that of a type it is derived from.

    >>> _weights_read_by(nn.MultiheadAttention), _weights_read_by(nn.Conv2d)
    (('out_proj',), ())
    """
    forwards = [vars(base)["forward"] for base in parent_type.__mro__ if "forward" in vars(base)]
    return tuple(dict.fromkeys(path for forward in forwards for path in _weights_read_in(forward)))


@lru_cache(maxsize=1024)
def _weights_read_in(forward: Callable[..., object]) -> tuple[str, ...]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, SyntaxError, TypeError):
        # Made by a program, typed in, or a piece of a line.
        return ()
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    paths = [
        _path_from_self(node.value)
        for node in parents
        if isinstance(node, ast.Attribute) and node.attr == "weight" and not _is_asked_only(node, parents[node])
    ]
    return tuple(".".join(path) for path in paths if path)


def _is_asked_only(weight: ast.Attribute, parent: ast.AST) -> bool:
    match parent:
        case ast.Attribute(attr=name):
            return name in _ASKED_FOR
        case ast.Compare(ops=operators):
            return all(isinstance(operator, ast.Is | ast.IsNot) for operator in operators)
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=arguments):
            return weight in arguments and name in _ASKING
    return False


def _path_from_self(node: ast.expr) -> tuple[str, ...]:
    """The names that lead to a module, such as `self.layers[0].conv`; none if it is reached in another way."""
    match node:
        case ast.Attribute(value=ast.Name(id="self"), attr=name):
            return (name,)
        case ast.Attribute(value=inner, attr=name) if path := _path_from_self(inner):
            return (*path, name)
        case ast.Subscript(value=inner, slice=ast.Constant(value=int(index))) if path := _path_from_self(inner):
            return (*path, str(index))
    return ()
