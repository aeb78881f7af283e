"""What operations do to channels. Whatever is not listed here keeps the natural order on both sides."""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
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
