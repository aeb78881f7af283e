"""What a plan does to every module of a network: fewer channels, groups, or zeros in place of both."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from strucspars.core.narrowing import KeptSides
from strucspars.core.plan import GroupingPlan, LayerPlan
from strucspars.nn.groupable import WeightUses, parameter_key, reason_not_to_group
from strucspars.nn.layers import (
    LAYERS_WITH_CHANNELS,
    forms_of,
    group_module_,
    grouped_weight,
    hold_at_zero_,
    is_grouped,
    is_grouped_as,
    is_masked,
    kept_connections,
    unmask_module_,
)
from strucspars.nn.names import bare_modules, modules_by_name, under_first_names
from strucspars.nn.narrowing import (
    NarrowedFrom,
    TensorChange,
    change_tensor_,
    full_shape,
    kept_entries,
    narrow_module_,
    narrowed_from,
    own_groups,
    reason_not_to_narrow,
    tensor_changes,
    zeroed_entries,
)


@dataclass(frozen=True, eq=False)
class Change:
    """What a plan does to a module that is dense or masked.

    Attributes:
        narrowed: the channels it loses; None for none.
        layer: its grouping with the channels that stay; None for one group.
        connections: the weights that stay, boolean `(C_out, C_in / groups)`; None for a norm.
    """

    module: nn.Module
    narrowed: NarrowedFrom | None
    layer: LayerPlan | None
    connections: torch.Tensor | None

    @property
    def kept(self) -> KeptSides:
        """The places along both sides that stay."""
        return KeptSides() if self.narrowed is None else self.narrowed.kept

    def convert_(self) -> None:
        """Make the module narrower and group it, in place."""
        if self.narrowed is not None:
            narrow_module_(self.module, self.narrowed)
        if self.layer is not None:
            group_module_(self.module, self.layer)

    def mask_(self) -> None:
        """Hold what goes at zero, in place."""
        for name, change in self._zeroed_beside_the_weight().items():
            change_tensor_(self.module, name, change)
        if self.connections is not None:
            hold_at_zero_(self.module, ~self.connections)

    def converted_tensors(self) -> dict[str, TensorChange]:
        """How `convert_` changes tensors in the shapes of the module's parameters, by their names."""
        changes = {} if self.narrowed is None else tensor_changes(self.module, self.kept)
        if (layer := self.layer) is None:
            return changes
        narrower = changes.get("weight")

        def grouped(weight: torch.Tensor) -> torch.Tensor:
            return grouped_weight(weight if narrower is None else narrower(weight), layer)

        return changes | {"weight": grouped}

    def masked_tensors(self) -> dict[str, TensorChange]:
        """The same of `mask_`."""
        if self.connections is None:
            return self._zeroed_beside_the_weight()
        kept = self.connections

        def masked(weight: torch.Tensor) -> torch.Tensor:
            return weight.masked_fill(~kept.view(*kept.shape, *[1] * (weight.dim() - 2)).to(weight.device), 0)

        return {"weight": masked} | self._zeroed_beside_the_weight()

    def _zeroed_beside_the_weight(self) -> dict[str, TensorChange]:
        return zeroed_entries(self.module, self.kept)


# By the names of the modules.
Changes = Mapping[str, Change]


def planned_modules(model: nn.Module, plan: GroupingPlan) -> dict[str, nn.Module]:
    """The layers that the plan names, after checking that they are there and have the shapes it knows."""
    modules = modules_by_name(model)
    for name in plan.layers:
        if name in modules and not isinstance(modules[name], LAYERS_WITH_CHANNELS):
            kind = type(modules[name]).__name__
            raise ValueError(f"layer {name!r}: {kind} is no convolution or linear layer; remove it from the plan")
    layers = {name: module for name, module in modules.items() if isinstance(module, LAYERS_WITH_CHANNELS)}
    plan.check_matches({name: full_shape(layers[name], name) if name in plan.layers else () for name in layers})
    return {name: layers[name] for name in plan.layers}


def modules_to_change(model: nn.Module, plan: GroupingPlan) -> Changes:
    """The modules that the plan changes, after checking that all of it fits."""
    plan, uses = under_first_names(model, plan), WeightUses.of(model)
    modules = dict(bare_modules(model))
    plan.check_narrowed(modules)
    planned = {name: modules[name] for name in plan.narrowed} | planned_modules(model, plan)
    changes = {}
    for name, module in planned.items():
        layer = plan.narrowed_layer(name) if name in plan.layers and plan.layers[name].group_level > 1 else None
        narrowed = _narrowing(plan, name, module)
        if is_grouped(module):
            if narrowed_from(module) != narrowed or (
                name in plan.layers and not is_grouped_as(module, layer or plan.narrowed_layer(name))
            ):
                raise ValueError(
                    f"layer {name!r} is grouped already, and not as the plan has it; convert the dense network, or "
                    "remove the layer from the plan"
                )
            continue
        if narrowed_from(module) is not None:
            if narrowed_from(module) != narrowed:
                raise ValueError(
                    f"module {name!r} has lost channels already, and not those of the plan; convert the dense network"
                )
            narrowed = None
        if layer is None and narrowed is None:
            continue
        if layer is not None and (reason := reason_not_to_group(name, module, uses)):
            raise ValueError(f"layer {name!r}: {reason}; remove it from the plan")
        if narrowed is not None and (reason := _reason_not_to_narrow(name, module, narrowed, uses)):
            raise ValueError(f"module {name!r}: {reason}; make a plan for this network")
        if any(tensor.is_meta for tensor in module.parameters()):
            raise ValueError(
                f"layer {name!r} is on the meta device, where channel orders and masks have no values; call "
                "model.to_empty(device=...) and load the weights first"
            )
        changes[name] = Change(module, narrowed, layer, _connections(plan, name, module, narrowed))
    return changes


def _narrowing(plan: GroupingPlan, name: str, module: nn.Module) -> NarrowedFrom | None:
    if name not in plan.narrowed:
        return None
    sides = plan.narrowed[name]
    classes = {each: plan.kept_channels[each] for each in (*sides.outputs, *sides.inputs)}
    return NarrowedFrom(sides, classes, own_groups(module))


def _reason_not_to_narrow(name: str, module: nn.Module, narrowed: NarrowedFrom, uses: WeightUses) -> str:
    """Why the channels of a dense or masked module cannot go; empty if they can."""
    if isinstance(module, LAYERS_WITH_CHANNELS) and (forms_of(module) is None or "forward" in vars(module)):
        return f"{type(module).__name__} may compute something else than a plain layer"
    if module in uses.readers:
        return f"{uses.readers[module]} computes with its weight itself"
    for parameter in module.parameters():
        others = [owner for owner in uses.owners[parameter_key(parameter)] if owner != name]
        if others:
            return f"it shares a parameter with {others[0]!r}"
    return reason_not_to_narrow(module, narrowed.sides, narrowed.classes)


def _connections(
    plan: GroupingPlan, name: str, module: nn.Module, narrowed: NarrowedFrom | None
) -> torch.Tensor | None:
    if not isinstance(module, LAYERS_WITH_CHANNELS):
        return None
    if narrowed is None and narrowed_from(module) is not None:
        return kept_connections(plan.narrowed_layer(name))
    kept = kept_entries(module, KeptSides() if narrowed is None else narrowed.kept)
    return kept & kept_connections(plan.layers[name]) if name in plan.layers else kept


def mask_values_(changes: Changes) -> None:
    """Zero what goes, in place, of layers that become dense ones; gradients stay."""
    for change in changes.values():
        for name, masked in change.masked_tensors().items():
            tensor = change.module._parameters.get(name, change.module._buffers.get(name))
            assert tensor is not None
            before = tensor.data
            if name == "weight" and is_masked(change.module):
                before = before * change.module.get_buffer("mask")
            tensor.data = masked(before)
        if is_masked(change.module):
            unmask_module_(change.module)


@contextmanager
def restored(changes: Changes) -> Iterator[None]:
    """Restore types, tensors and attributes of the modules afterwards."""
    before = []
    for module in (change.module for change in changes.values()):
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        # Of a masked layer that becomes dense meanwhile, these lose the mask.
        buffers = {
            "_buffers": dict(module._buffers),
            "_non_persistent_buffers_set": {*module._non_persistent_buffers_set},
        }
        attributes = vars(module) | buffers
        before.append((module, type(module), attributes, [(each, each.data, each.grad) for each in tensors]))
    try:
        yield
    finally:
        for module, kind, attributes, tensors_before in before:
            module.__class__ = kind
            vars(module).clear()
            vars(module).update(attributes)
            for tensor, values, gradient in tensors_before:
                tensor.grad = None
                tensor.data = values
                tensor.grad = gradient
        torch.clear_autocast_cache()
