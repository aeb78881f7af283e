"""What the arguments of a traced call say about axes."""

import operator
from typing import Any

import torch
from torch import fx

from strucspars.convert.folding.channel_rules import SHAPE_ATTRIBUTES, SHAPE_METHODS, SPLIT_FUNCTIONS, SPLIT_METHODS


def argument(node: fx.Node, place: int, *names: str, default: Any = None) -> Any:
    """An argument by its place, or by one of its names."""
    if len(node.args) > place:
        return node.args[place]
    return next((node.kwargs[name] for name in names if name in node.kwargs), default)


def named_axes(node: fx.Node, dimensions: int) -> set[int] | None:
    """The axes that a call works on, from the front; None for all of them, or where it cannot be said."""
    axes = argument(node, 1, "dim", "axis")
    axes = (axes,) if isinstance(axes, int) else axes
    if not isinstance(axes, list | tuple) or not axes or not all(isinstance(axis, int) for axis in axes):
        return None
    return {axis % dimensions for axis in axes} if dimensions else None


def pad_amounts(node: fx.Node, dimensions: int) -> dict[int, tuple[int, int]] | None:
    """By axis, what a call of `pad` puts before it and after it; None where it cannot be said."""
    amounts = argument(node, 1, "pad")
    if not isinstance(amounts, list | tuple) or not all(isinstance(amount, int) for amount in amounts):
        return None
    pairs = zip(amounts[::2], amounts[1::2], strict=True)
    return {dimensions - 1 - place: (before, after) for place, (before, after) in enumerate(pairs) if before or after}


def sliced_axes(node: fx.Node) -> set[int] | None:
    """The axes of which indexing takes a part; None if it does anything but slicing."""
    index = node.args[1]
    index = index if isinstance(index, tuple) else (index,)
    if not all(isinstance(entry, slice) for entry in index):
        return None
    return {axis for axis, entry in enumerate(index) if entry != slice(None)}


def num_channel_parts(node: fx.Node) -> int | None:
    """How many parts a call cuts the channels into; None where it does not tell, or does something else.

    Only of axis 1: the length of others, and so the number of their parts, may be another for the next input.
    """
    target = node.target
    is_cut = target in SPLIT_FUNCTIONS if node.op == "call_function" else target in SPLIT_METHODS
    if not is_cut or argument(node, 2, "dim", default=0) != 1:
        return None
    parts = argument(node, 1, "chunks", "split_size_or_sections", "split_size")
    if isinstance(parts, list | tuple):
        return len(parts)
    return parts if isinstance(parts, int) and target in (torch.chunk, "chunk") else None


def asks_for_shape(node: fx.Node) -> bool:
    """Whether a call asks a tensor only what its channel order does not change."""
    if node.op == "call_method":
        return node.target in SHAPE_METHODS
    return node.target is getattr and str(node.args[1]) in SHAPE_ATTRIBUTES


def flattens_by_view(node: fx.Node) -> bool:
    """Whether a call is `x.view(x.size(0), -1)` or `x.reshape(x.shape[0], -1)`."""
    sizes = node.args[1:]
    if len(sizes) == 1 and isinstance(sizes[0], tuple):
        sizes = sizes[0]
    match sizes:
        case (fx.Node() as first, -1):
            return _is_batch_size(first)
    return False


def _is_batch_size(node: fx.Node) -> bool:
    if node.op == "call_method" and node.target == "size":
        return bool(argument(node, 1, "dim") == 0)
    source = node.args[0] if node.target is operator.getitem else None
    return isinstance(source, fx.Node) and asks_for_shape(source) and bool(node.args[1] == 0)
