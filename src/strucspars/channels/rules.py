"""What operations do to channels. Whatever is not listed here keeps the natural order on both sides."""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

# In eval mode the synchronised one is like the others.
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)

# Entry by entry: any order will do, as long as all operands have the same.
ELEMENTWISE_MODULES: tuple[type[nn.Module], ...] = (
    nn.Identity,
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.ReLU,
    nn.ReLU6,
    nn.LeakyReLU,
    nn.ELU,
    nn.CELU,
    nn.SELU,
    nn.GELU,
    nn.SiLU,
    nn.Mish,
    nn.Sigmoid,
    nn.Tanh,
    nn.Softplus,
    nn.Softsign,
    nn.Hardtanh,
    nn.Hardsigmoid,
    nn.Hardswish,
)
ELEMENTWISE_FUNCTIONS: frozenset[Callable[..., Any]] = frozenset(
    {
        *(operator.add, operator.sub, operator.mul, operator.truediv, operator.neg),
        *(operator.iadd, operator.isub, operator.imul, operator.itruediv),
        *(torch.add, torch.sub, torch.mul, torch.div, torch.neg, torch.abs, torch.exp, torch.clamp, torch.clone),
        *(torch.relu, torch.relu_, torch.sigmoid, torch.tanh, torch.maximum, torch.minimum),
        *(functional.relu, functional.relu_, functional.relu6, functional.leaky_relu, functional.elu, functional.celu),
        *(functional.selu, functional.gelu, functional.silu, functional.mish, functional.sigmoid, functional.tanh),
        *(functional.softplus, functional.softsign, functional.hardtanh, functional.hardsigmoid),
        *(functional.hardswish, functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d),
    }
)
ELEMENTWISE_METHODS = frozenset(
    name + suffix
    for name in ("add", "sub", "mul", "div", "neg", "abs", "exp", "clamp", "relu", "sigmoid", "tanh")
    for suffix in ("", "_")
) | {"clone", "contiguous", "detach"}
# By name, so that folding does not import torchvision.
ELEMENTWISE_NAMES = frozenset({"torchvision.ops.stochastic_depth.stochastic_depth"})

# Position by position or over neighbouring ones; by the number of trailing axes they work on.
SPATIAL_MODULES: dict[type[nn.Module], int] = {
    **dict.fromkeys((nn.MaxPool1d, nn.AvgPool1d, nn.AdaptiveAvgPool1d, nn.AdaptiveMaxPool1d), 1),
    **dict.fromkeys((nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d), 2),
    **dict.fromkeys((nn.ConstantPad1d, nn.ReflectionPad1d, nn.ReplicationPad1d), 1),
    **dict.fromkeys((nn.ConstantPad2d, nn.ZeroPad2d, nn.ReflectionPad2d, nn.ReplicationPad2d), 2),
    **dict.fromkeys((nn.MaxPool3d, nn.AvgPool3d, nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool3d), 3),
    **dict.fromkeys((nn.ConstantPad3d, nn.ReplicationPad3d), 3),
}
SPATIAL_FUNCTIONS: dict[Callable[..., Any], int] = {
    **dict.fromkeys((functional.max_pool1d, torch.max_pool1d, functional.avg_pool1d, torch.avg_pool1d), 1),
    **dict.fromkeys((functional.adaptive_avg_pool1d, functional.adaptive_max_pool1d), 1),
    **dict.fromkeys((functional.max_pool2d, torch.max_pool2d, functional.avg_pool2d), 2),
    **dict.fromkeys((functional.adaptive_avg_pool2d, functional.adaptive_max_pool2d), 2),
    **dict.fromkeys((functional.max_pool3d, torch.max_pool3d, functional.avg_pool3d), 3),
    **dict.fromkeys((functional.adaptive_avg_pool3d, functional.adaptive_max_pool3d), 3),
}
# These work on every axis after the second.
RESIZING_MODULES = (nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d)

# Over the axes that they are told.
REDUCING_FUNCTIONS = frozenset({torch.mean, torch.sum, torch.amax, torch.amin})
REDUCING_METHODS = frozenset({"mean", "sum", "amax", "amin"})

CONCATENATIONS = frozenset({torch.cat, torch.concat, torch.concatenate})
SPLIT_FUNCTIONS = frozenset({torch.chunk, torch.split})
SPLIT_METHODS = frozenset({"chunk", "split"})
PAD_FUNCTIONS = frozenset({functional.pad})

# Questions about a tensor that its order does not answer. Not "type", which with an argument gives another tensor.
SHAPE_METHODS = frozenset({"size", "dim", "numel", "is_floating_point"})
SHAPE_ATTRIBUTES = frozenset({"shape", "ndim", "dtype", "device"})


def has_entry_per_channel(module: nn.Module) -> bool:
    """Whether a module does the same to every channel but for the entries of its tensors, one per channel."""
    if type(module) is nn.PReLU:
        return module.num_parameters > 1
    # One group over all channels has no order in it.
    return type(module) in BATCH_NORMS or (type(module) is nn.GroupNorm and module.num_groups == 1)


def is_elementwise_module(module: nn.Module) -> bool:
    """Whether a module works entry by entry, on all of them alike."""
    return type(module) in ELEMENTWISE_MODULES or (type(module) is nn.PReLU and module.num_parameters == 1)


def is_elementwise(function: Any) -> bool:
    """Whether a function works entry by entry."""
    name = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', '')}"
    return function in ELEMENTWISE_FUNCTIONS or name in ELEMENTWISE_NAMES


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
