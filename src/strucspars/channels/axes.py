"""Operations that change the axes of one tensor: where its channels are afterwards.

A rule takes a call and the layout of its first argument. It gives the layout of the result, or None where the order of
the channels matters or nothing can be said.
"""

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

from strucspars.channels import rules
from strucspars.channels.classes import Layout
from strucspars.channels.rules import argument
from strucspars.channels.tracing import source_shape, tensor_shape

AxisRule = Callable[[fx.Node, Layout], Layout | None]


def over_last_axes(num_axes: int) -> AxisRule:
    """Pooling, padding: whatever works on the last so many axes."""

    def rule(node: fx.Node, layout: Layout) -> Layout | None:
        return layout if layout.axis < len(source_shape(node)) - num_axes else None

    return rule


def along_axis(axis: int | None) -> AxisRule:
    """Whatever compares the entries along one axis: it must be another than that of the channels."""

    def rule(node: fx.Node, layout: Layout) -> Layout | None:
        return beside_channels(node, layout, None if axis is None else {axis % len(source_shape(node))})

    return rule


def flattened_between(start: int, end: int) -> AxisRule:
    """All that follows the batch as one axis: every channel becomes a run of entries."""

    def rule(node: fx.Node, layout: Layout) -> Layout | None:
        shape = source_shape(node)
        is_all = len(shape) > 1 and (start % len(shape), end % len(shape)) == (1, len(shape) - 1)
        if not is_all or layout.axis != 1:
            return None
        return Layout(layout.classes, 1, layout.repeat * math.prod(shape[2:]))

    return rule


def beside_channels(node: fx.Node, layout: Layout, axes: set[int] | None) -> Layout | None:
    """Changes of these axes, none of which may be that of the channels."""
    if axes is None or layout.axis in axes or len(node.all_input_nodes) > 1:
        return None
    return layout


def _resized(node: fx.Node, layout: Layout) -> Layout | None:
    return layout if layout.axis <= 1 else None


def _sliced(node: fx.Node, layout: Layout) -> Layout | None:
    return beside_channels(node, layout, rules.sliced_axes(node))


def _softmax(node: fx.Node, layout: Layout) -> Layout | None:
    axis = argument(node, 1, "dim")
    return along_axis(axis if isinstance(axis, int) else None)(node, layout)


def _flattened(node: fx.Node, layout: Layout) -> Layout | None:
    start, end = argument(node, 1, "start_dim", default=0), argument(node, 2, "end_dim", default=-1)
    return flattened_between(start, end)(node, layout)


def _viewed(node: fx.Node, layout: Layout) -> Layout | None:
    return flattened_between(1, -1)(node, layout) if rules.flattens_by_view(node) else None


def _reduced(node: fx.Node, layout: Layout) -> Layout | None:
    before, shape = len(source_shape(node)), tensor_shape(node) or ()
    axes = rules.named_axes(node, before)
    if axes is None or beside_channels(node, layout, axes) is None:
        return None
    return layout if len(shape) == before else layout.at(layout.axis - sum(axis < layout.axis for axis in axes))


def _squeezed(node: fx.Node, layout: Layout) -> Layout | None:
    axes = rules.named_axes(node, len(source_shape(node)))
    # An axis before the channels goes or stays by its size, which the next batch may have otherwise.
    return layout if axes is not None and min(axes) > layout.axis else None


def _unsqueezed(node: fx.Node, layout: Layout) -> Layout | None:
    axis = argument(node, 1, "dim")
    if not isinstance(axis, int):
        return None
    return layout.at(layout.axis + (axis % (len(source_shape(node)) + 1) <= layout.axis))


FUNCTION_RULES: dict[Any, AxisRule] = {
    **{function: over_last_axes(axes) for function, axes in rules.SPATIAL_FUNCTIONS.items()},
    **dict.fromkeys(rules.REDUCING_FUNCTIONS, _reduced),
    **dict.fromkeys((functional.softmax, functional.log_softmax, torch.softmax, torch.log_softmax), _softmax),
    functional.interpolate: _resized,
    torch.flatten: _flattened,
    torch.squeeze: _squeezed,
    torch.unsqueeze: _unsqueezed,
    operator.getitem: _sliced,
}
METHOD_RULES: dict[str, AxisRule] = {
    **dict.fromkeys(rules.REDUCING_METHODS, _reduced),
    **dict.fromkeys(("softmax", "log_softmax"), _softmax),
    **dict.fromkeys(("view", "reshape"), _viewed),
    "flatten": _flattened,
    "squeeze": _squeezed,
    "unsqueeze": _unsqueezed,
}


def module_rule(module: nn.Module) -> AxisRule | None:
    """The rule of a module; None if it changes no axes, or is not known."""
    if type(module) in rules.SPATIAL_MODULES:
        return over_last_axes(rules.SPATIAL_MODULES[type(module)])
    if type(module) in rules.RESIZING_MODULES:
        return _resized
    if type(module) is nn.Softmax or type(module) is nn.LogSoftmax:
        return along_axis(module.dim)
    if type(module) is nn.Flatten:
        return flattened_between(module.start_dim, module.end_dim)
    return None
