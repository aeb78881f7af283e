"""Fewer channels in a module: its tensors with the entries that stay, in place.

A narrower module keeps its type. It remembers which channels of which class it had, as a grouped layer remembers its
orders, so that its plan can be read from it.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from strucspars.core.checks import IntArray
from strucspars.core.narrowing import KeptChannels, KeptSides, ModuleChannels, full_widths, kept_sides
from strucspars.nn.layers import (
    LAYERS_WITH_CHANNELS,
    channels,
    dense_shape,
    is_grouped,
    like_memory_format,
    replace_values_,
)

RECORD = "narrowed_from"
# Of norms and PReLU: one entry per channel.
CHANNEL_TENSORS = ("weight", "bias", "running_mean", "running_var")

TensorChange = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class NarrowedFrom:
    """The channels that a module had, those of them that it kept, and the groups that the network's code gave it."""

    sides: ModuleChannels
    classes: Mapping[str, KeptChannels]
    own_groups: int

    @property
    def kept(self) -> KeptSides:
        """The places along both sides that stayed."""
        return kept_sides(self.sides, self.classes)


def narrowed_from(module: nn.Module) -> NarrowedFrom | None:
    """What a module was narrowed from; None for one that was not."""
    found: NarrowedFrom | None = vars(module).get(RECORD)
    return found


def own_groups(module: nn.Module) -> int:
    """The number of groups that the network's own code gave a layer."""
    record = narrowed_from(module)
    if record is not None:
        return record.own_groups
    return 1 if is_grouped(module) else vars(module).get("groups", 1)


def is_depthwise(module: nn.Module) -> bool:
    """Whether a layer computes every channel by itself, and did so before it was narrowed."""
    if not isinstance(module, nn.modules.conv._ConvNd):
        return False
    record = narrowed_from(module)
    if record is not None:
        return not record.sides.inputs and full_widths(record.sides, record.classes)[0] == record.own_groups
    return own_groups(module) == module.in_channels == module.out_channels > 1


def module_widths(module: nn.Module) -> tuple[int, int]:
    """The (outputs, inputs) of a layer; of a norm or PReLU both are its channels; 0 for others."""
    if isinstance(module, LAYERS_WITH_CHANNELS):
        return channels(module)
    tensors = (module._parameters.get(name, module._buffers.get(name)) for name in CHANNEL_TENSORS)
    width = next((len(tensor) for tensor in tensors if tensor is not None), vars(module).get("num_features", 0))
    return width, width


def full_shape(module: nn.Module, name: str = "") -> tuple[int, ...]:
    """The shape of the weight that a layer has, or had before it was narrowed and grouped."""
    out_channels, in_channels, *kernel = dense_shape(module, name)
    record = narrowed_from(module)
    if record is not None:
        outputs, inputs = full_widths(record.sides, record.classes)
        out_channels, in_channels = outputs or out_channels, inputs or in_channels
        if is_depthwise(module):
            in_channels = out_channels
    return (out_channels, in_channels, *kernel)


def weight_size(module: nn.Module, shape: tuple[int, ...]) -> int:
    """Parameters of a layer's weight at these (outputs, inputs, *kernel), with the groups of the network's own code."""
    if is_depthwise(module):
        return shape[0] * math.prod(shape[2:])
    return math.prod(shape) // own_groups(module)


def shape_with(shape: tuple[int, ...], kept: KeptSides, *, depthwise: bool) -> tuple[int, ...]:
    """The (outputs, inputs, *kernel) with the channels that stay."""
    outputs = shape[0] if kept.outputs is None else len(kept.outputs)
    inputs = shape[1] if kept.inputs is None else len(kept.inputs)
    return (outputs, outputs if depthwise else inputs, *shape[2:])


def params_before(module: nn.Module) -> int:
    """Own parameters that a narrower or grouped module had before."""
    own = {name: each for name, each in module._parameters.items() if each is not None}
    record = narrowed_from(module)
    if isinstance(module, LAYERS_WITH_CHANNELS):
        shape = full_shape(module)
        return weight_size(module, shape) + (shape[0] if "bias" in own else 0)
    widths = (0, 0) if record is None else full_widths(record.sides, record.classes)
    return sum(widths[0] or each.numel() for each in own.values())


def narrow_module_(module: nn.Module, record: NarrowedFrom) -> None:
    """Keep the entries of these channels in all tensors of a dense module, in place."""
    kept = record.kept
    for name, change in tensor_changes(module, kept).items():
        change_tensor_(module, name, change)
    _set_widths_(module, kept)
    setattr(module, RECORD, record)


def change_tensor_(module: nn.Module, name: str, change: TensorChange) -> None:
    """Give a parameter, with its gradient, or a buffer of a module new values; it stays the same object."""
    if name in module._parameters:
        replace_values_(module.get_parameter(name), change)
    else:
        buffer = module.get_buffer(name)
        buffer.data = change(buffer.data)


def _set_widths_(module: nn.Module, kept: KeptSides) -> None:
    outputs, inputs = (None if places is None else len(places) for places in (kept.outputs, kept.inputs))
    names: dict[str, int | None] = {"num_features": outputs, "num_parameters": outputs}
    if isinstance(module, LAYERS_WITH_CHANNELS):
        names = {"out_channels": outputs, "in_channels": inputs, "out_features": outputs, "in_features": inputs}
        if is_depthwise(module):
            names |= {"in_channels": outputs, "groups": outputs}
    for name, width in names.items():
        if width is not None and name in vars(module):
            setattr(module, name, width)


def tensor_changes(module: nn.Module, kept: KeptSides) -> dict[str, TensorChange]:
    """How the tensors of a dense module change, by name; what an optimizer remembers of them changes likewise."""

    def rows(tensor: torch.Tensor) -> torch.Tensor:
        return _selected(tensor, 0, kept.outputs)

    present = {name for name in CHANNEL_TENSORS if _tensor(module, name) is not None}
    if not isinstance(module, LAYERS_WITH_CHANNELS) or is_depthwise(module):
        return dict.fromkeys(sorted(present), rows)
    changes: dict[str, TensorChange] = {"weight": lambda weight: _narrowed_weight(module, weight, kept)}
    return changes | ({"bias": rows} if "bias" in present and kept.outputs is not None else {})


def zeroed_entries(module: nn.Module, kept: KeptSides) -> dict[str, TensorChange]:
    """How the tensors of a module change if the channels that go are zero instead; statistics stay."""

    def rows(tensor: torch.Tensor) -> torch.Tensor:
        assert kept.outputs is not None
        zeroed = torch.zeros_like(tensor)
        places = torch.from_numpy(kept.outputs).to(tensor.device)
        return zeroed.index_copy_(0, places, tensor.index_select(0, places))

    names = ["weight", "bias"] if not isinstance(module, LAYERS_WITH_CHANNELS) else ["bias"]
    return {name: rows for name in names if kept.outputs is not None and _tensor(module, name) is not None}


def kept_entries(module: nn.Module, kept: KeptSides) -> torch.Tensor:
    """Which entries of a dense layer's weight stay, boolean `(C_out, C_in / groups)`, on the CPU."""
    weight = module.get_parameter("weight")
    if is_depthwise(module):
        kept = KeptSides(kept.outputs)
    mask = torch.zeros(weight.shape[:2], dtype=torch.bool, device="cpu")
    rows, columns = _places(module, kept)
    mask[rows[:, None], columns] = True
    return mask


def _narrowed_weight(module: nn.Module, weight: torch.Tensor, kept: KeptSides) -> torch.Tensor:
    if kept.inputs is None or own_groups(module) == 1:
        return _selected(_selected(weight, 0, kept.outputs), 1, kept.inputs)
    rows, columns = (places.to(weight.device) for places in _places(module, kept))
    return like_memory_format(weight[rows[:, None], columns], weight)


def _places(module: nn.Module, kept: KeptSides) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of a weight that stay `(R,)`, and their columns: the same for all `(1, n)`, or by group `(R, n)`."""
    (out_channels, in_channels), groups = channels(module), own_groups(module)
    rows = np.arange(out_channels) if kept.outputs is None else kept.outputs
    inputs = np.arange(in_channels) if kept.inputs is None else kept.inputs
    by_group = inputs.reshape(groups, -1) % (in_channels // groups)
    columns = by_group[rows // (out_channels // groups)] if groups > 1 else by_group
    return torch.from_numpy(rows), torch.from_numpy(columns)


def _selected(tensor: torch.Tensor, axis: int, places: IntArray | None) -> torch.Tensor:
    if places is None:
        return tensor
    return like_memory_format(tensor.index_select(axis, torch.from_numpy(places).to(tensor.device)), tensor)


def _tensor(module: nn.Module, name: str) -> torch.Tensor | None:
    return module._parameters.get(name, module._buffers.get(name))


def reason_not_to_narrow(module: nn.Module, sides: ModuleChannels, classes: Mapping[str, KeptChannels]) -> str:
    """Why the classes are not those of a dense module's sides, or uneven in its own groups; empty if they fit."""
    outputs, inputs = full_widths(sides, classes)
    present: tuple[Any, Any] = module_widths(module)
    if outputs not in (0, present[0]) or inputs not in (0, present[1]):
        return f"it has {present[0]} outputs and {present[1]} inputs, but the plan was made for {outputs} and {inputs}"
    groups = 1 if is_depthwise(module) else own_groups(module)
    kept = kept_sides(sides, classes)
    for places, width in ((kept.outputs, present[0]), (kept.inputs, present[1])):
        if places is None or not isinstance(module, LAYERS_WITH_CHANNELS) or groups == 1:
            continue
        counts = np.bincount(places // (width // groups), minlength=groups)
        if counts.min() < counts.max():
            return f"its {groups} groups must keep the same number of channels, but they keep {counts.tolist()[:16]}"
    return ""
