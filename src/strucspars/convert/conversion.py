"""Compression: every planned layer becomes input shuffle, group convolution, output shuffle (Sec. 3.1, 3.5)."""

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from strucspars.convert.optimizer_state import change_optimizer_state_, check_optimizer, remembers_shape
from strucspars.core.hierarchy import num_groups
from strucspars.core.permutation import inverse
from strucspars.core.plan import GroupingPlan, LayerPlan
from strucspars.nn.groupable import (
    is_computable,
    is_plain,
    owners_of_parameters,
    parameter_key,
)
from strucspars.nn.layers import (
    DENSE_TYPES,
    GROUPED_TYPES,
    LAYERS_WITH_CHANNELS,
    ORDERS,
    channel_orders,
    dense_shape,
    group_module_,
    grouped_weight,
    groups_of_weight,
    is_grouped,
    is_grouped_as,
    like_memory_format,
    mask_module_,
    unmask_module_,
)
from strucspars.nn.names import bare_modules, modules_by_name
from strucspars.nn.weight_readers import readers_of_weights

logger = logging.getLogger(__name__)


def convert_(model: nn.Module, plan: GroupingPlan, optimizer: torch.optim.Optimizer | None = None) -> nn.Module:
    """Turn the planned layers of a model into group convolutions, in place; returns the model.

    What the plan prunes is dropped, so the tensors really shrink. Names, devices, precisions, memory formats, modes,
    hooks and the parameters' identity stay. Layers of one group and layers that this plan grouped already stay as they
    are, masked ones are converted like dense ones. Nothing changes if the plan does not fit the model. A model wrapped
    for distributed training must be wrapped again afterwards: the wrapper knows the old shapes, and the processes would
    drift apart. Where the wrapper itself is given, a warning says so.

    Args:
        model: any module; no graph is traced.
        plan: what to group.
        optimizer: its momenta follow the weights they belong to. Only in the call that groups them: give it then, and
            make others anew.

    Raises:
        ValueError: the plan does not fit the model; or the optimizer holds nothing of it, or was left behind by an
            earlier call.

    >>> import numpy as np
    >>> import strucspars as ss
    >>> model = nn.Sequential(nn.Conv2d(4, 8, 3))
    >>> layer = ss.LayerPlan(group_level=3, out_perm=np.arange(8), in_perm=np.arange(4), weight_shape=(8, 4, 3, 3))
    >>> convert_(model, ss.GroupingPlan({"0": layer}))[0].weight.shape
    torch.Size([8, 1, 3, 3])
    """
    check_optimizer(optimizer, model)
    changes = _layers_to_convert(model, plan)
    _check_not_left_behind(optimizer, model, plan)
    _warn_of_gradient_hooks(changes)
    unmask_(model)
    for module, layer in changes.values():
        with _tensors_like_the_weight(module):
            if optimizer is not None:
                _regroup_optimizer_state_(optimizer, module, layer)
            group_module_(module, layer)
    # Inside of autocast it holds the weights of before, by parameters that stay the same.
    torch.clear_autocast_cache()
    if changes and any(isinstance(module, nn.parallel.DistributedDataParallel) for module in model.modules()):
        logger.warning(
            "DistributedDataParallel knows the shapes of before, and would not average all gradients: wrap the network "
            "again before it is trained, model = DistributedDataParallel(model.module)"
        )
    return model


def mask_(model: nn.Module, plan: GroupingPlan, optimizer: torch.optim.Optimizer | None = None) -> nn.Module:
    """Keep the planned layers dense but hold what the plan prunes at zero, in place; returns the model.

    The function is that of the converted model, and `convert_` turns the one into the other. On GPUs finetuning this
    form is faster. It trains alike, up to rounding, unless the optimizer takes means over whole tensors: Adafactor
    counts the zeros. The model's keys do not change: the masks are not in its `state_dict`, so mask again after
    `to_empty`.

    Args:
        model: any module.
        plan: what to prune.
        optimizer: give the one you go on with; its momenta of pruned weights are cleared, or they would move them.

    >>> import numpy as np
    >>> import strucspars as ss
    >>> model = nn.Sequential(nn.Conv2d(4, 8, 1))
    >>> layer = ss.LayerPlan(group_level=2, out_perm=np.arange(8), in_perm=np.arange(4), weight_shape=(8, 4, 1, 1))
    >>> int((mask_(model, ss.GroupingPlan({"0": layer}))[0].weight == 0).sum())
    16
    """
    check_optimizer(optimizer, model)
    changes = _layers_to_change(model, plan)
    _check_names_free(changes, ("mask",))
    _check_not_left_behind(optimizer, model, plan)
    unmask_(model)
    for module, layer in changes.values():
        with _tensors_like_the_weight(module):
            mask_module_(module, layer)
            if optimizer is not None:
                _mask_optimizer_state_(optimizer, module)
    return model


@contextmanager
def _tensors_like_the_weight(module: nn.Module) -> Iterator[None]:
    """Make inference tensors if the weight is one, and no others: what is changed in inference mode may be trained."""
    with torch.inference_mode(module.get_parameter("weight").is_inference()), torch.no_grad():
        yield


def unmask_(model: nn.Module) -> None:
    """A new plan replaces an old mask, also where it groups nothing."""
    for module in model.modules():
        if type(module) in DENSE_TYPES:
            unmask_module_(module)


def check_fits(model: nn.Module, plan: GroupingPlan) -> None:
    """Raise a `ValueError` that names the layer unless `convert_` would accept this plan for this model."""
    _layers_to_convert(model, plan)


def _layers_to_convert(model: nn.Module, plan: GroupingPlan) -> dict[str, tuple[nn.Module, LayerPlan]]:
    """The layers to change, none of which has to keep its shape."""
    changes = _layers_to_change(model, plan)
    _check_names_free(changes, ORDERS)
    return changes


def planned_modules(model: nn.Module, plan: GroupingPlan) -> dict[str, nn.Module]:
    """The layers that the plan names, after checking that they are there and have the shapes it knows."""
    modules = modules_by_name(model)
    layers = {name: module for name, module in modules.items() if isinstance(module, LAYERS_WITH_CHANNELS)}
    for name in plan.layers:
        if name in layers:
            _check_weight(name, layers[name])
        elif name in modules:
            _check_type(name, modules[name])
    plan.check_matches({name: dense_shape(layers[name]) if name in plan.layers else () for name in layers})
    return {name: layers[name] for name in plan.layers}


def _layers_to_change(model: nn.Module, plan: GroupingPlan) -> dict[str, tuple[nn.Module, LayerPlan]]:
    """The dense layers that the plan groups, after checking that all of it fits."""
    readers, owners = readers_of_weights(model), owners_of_parameters(model)
    changes: dict[str, tuple[nn.Module, LayerPlan]] = {}
    seen = set()
    for name, module in planned_modules(model, plan).items():
        if is_grouped(module):
            _check_grouped_alike(name, module, plan.layers[name])
            continue
        if plan.layers[name].group_level == 1:
            continue
        _check_groupable(name, module)
        if module in seen or len(owners[parameter_key(module.get_parameter("weight"))]) > 1:
            raise ValueError(f"layer {name!r} shares its weight with another layer; take it off the plan")
        if module in readers:
            raise ValueError(
                f"layer {name!r}: {readers[module]} itself, and would go on as before; take it off the plan"
            )
        seen.add(module)
        changes[name] = module, plan.layers[name]
    return changes


def _check_grouped_alike(name: str, module: nn.Module, layer: LayerPlan) -> None:
    if not is_grouped_as(module, layer):
        raise ValueError(
            f"layer {name!r} is grouped already, and otherwise than the plan has it; build the network anew and "
            "convert that, or take the layer off the plan"
        )


def _check_names_free(changes: Mapping[str, tuple[nn.Module, LayerPlan]], attributes: tuple[str, ...]) -> None:
    """Refuse layers that have something else under the names of what they are to get."""
    for name, (module, _) in changes.items():
        for attribute in attributes:
            is_ours = attribute == "mask" and type(module) in DENSE_TYPES
            if hasattr(module, attribute) and not is_ours:
                raise ValueError(
                    f"layer {name!r} has an attribute {attribute!r} already, where strucspars would put its own; "
                    "rename it"
                )


def _warn_of_gradient_hooks(changes: Mapping[str, tuple[nn.Module, LayerPlan]]) -> None:
    """Many hooks, such as one that clips, do not care what they see; one that masks some inputs would mask others."""
    for name, (module, _) in changes.items():
        if module.get_parameter("weight")._backward_hooks:
            logger.warning(
                "layer %r: from now on the hook on the gradient of its weight sees, for every output channel, the "
                "inputs of its group only; register another hook if that matters",
                name,
            )


def _check_not_left_behind(optimizer: torch.optim.Optimizer | None, model: nn.Module, plan: GroupingPlan) -> None:
    """Refuse an optimizer that was not there when a layer was grouped: its momenta still have the dense shape."""
    if optimizer is None:
        return
    for name, module in planned_modules(model, plan).items():
        layer, weight = plan.layers[name], module.get_parameter("weight")
        if tuple(weight.shape) != layer.weight_shape and remembers_shape(optimizer, weight, layer.weight_shape):
            raise ValueError(
                f"layer {name!r} is grouped already, but the optimizer remembers its weight in the dense shape "
                f"{layer.weight_shape}, not {tuple(weight.shape)}; give the optimizer with the first call, or make a "
                "new one"
            )


def _check_weight(name: str, module: nn.Module) -> None:
    weight = module._parameters.get("weight")
    if weight is None or is_lazy(weight):
        raise ValueError(
            f"layer {name!r} has no plain weight: it is lazy, or recomputed by a parametrisation; "
            "run the model once, or remove the parametrisation"
        )


def _check_type(name: str, module: nn.Module) -> None:
    if type(module) not in (*GROUPED_TYPES, *DENSE_TYPES):
        known = ", ".join(known_type.__name__ for known_type in GROUPED_TYPES)
        raise ValueError(
            f"layer {name!r} is a {type(module).__name__}, only {known} can be grouped; take it off the plan"
        )


def _check_groupable(name: str, module: nn.Module) -> None:
    _check_type(name, module)
    if "forward" in vars(module):
        raise ValueError(f"layer {name!r} has a forward of its own, which would go on as before; take it off the plan")
    if not isinstance(module, nn.Linear) and module.groups != 1:
        raise ValueError(f"layer {name!r} has {module.groups} groups already; take it off the plan")
    weight = module.get_parameter("weight")
    if not is_plain(weight):
        raise ValueError(
            f"layer {name!r}: its weight is a {type(weight).__name__}, not a plain tensor; take it off the plan"
        )
    if not is_computable(weight):
        raise ValueError(
            f"layer {name!r}: its weight is {weight.dtype}, not a floating-point type of 16 bits or more; take it off "
            "the plan, or give the network another precision first"
        )
    if weight.is_meta:
        raise ValueError(
            f"layer {name!r} is on the meta device, where channel orders and masks have no values and to_empty() "
            "would invent some; call model.to_empty(device=...) and load the weights first"
        )


def _regroup_optimizer_state_(optimizer: torch.optim.Optimizer, module: nn.Module, layer: LayerPlan) -> None:
    def regroup(momentum: torch.Tensor) -> torch.Tensor:
        # In the layout of the weight: fused optimizers go through both as one run of numbers.
        return like_memory_format(grouped_weight(momentum, layer), momentum)

    change_optimizer_state_(optimizer, module.get_parameter("weight"), regroup)


def _mask_optimizer_state_(optimizer: torch.optim.Optimizer, module: nn.Module) -> None:
    mask = module.get_buffer("mask")
    change_optimizer_state_(optimizer, module.get_parameter("weight"), lambda momentum: momentum * mask.to(momentum))


def model_plan(model: nn.Module) -> GroupingPlan:
    """Read the grouping off a converted model: the plan that makes it from the dense one. Empty for a dense model.

    >>> import strucspars as ss
    >>> model = nn.Sequential(nn.Conv2d(4, 8, 3, bias=False))
    >>> plan = ss.one_shot_plan(model, target=0.5)
    >>> model_plan(ss.convert_(model, plan)).layers == plan.layers
    True
    """
    layers = {}
    for name, module in bare_modules(model):
        if type(module) in DENSE_TYPES:
            raise ValueError(f"layer {name!r} is masked, not grouped; call convert_(model, plan) first")
        if is_grouped(module):
            layers[name] = _layer_plan(name, module)
    kept = sum(parameter.numel() for parameter in model.parameters())
    dense = kept + sum(math.prod(layer.weight_shape) * (1 - 1 / layer.num_groups) for layer in layers.values())
    return GroupingPlan(layers, removed_param_fraction=1 - kept / dense if dense else 0.0)


def _layer_plan(name: str, module: nn.Module) -> LayerPlan:
    shape = dense_shape(module, name)
    groups = groups_of_weight(module)
    level = groups.bit_length()
    if num_groups(level) != groups:
        raise ValueError(f"layer {name!r} has {groups} groups, no power of two: no plan makes such a layer")
    return LayerPlan(
        group_level=level,
        out_perm=inverse(channel_orders(module)["out_inverse"].cpu().numpy()),
        in_perm=channel_orders(module)["in_perm"].cpu().numpy(),
        weight_shape=shape,
    )


def plan_of(model: nn.Module) -> GroupingPlan | None:
    """The plan of a converted model; None where no plan describes it: masked layers, or groups made by hand."""
    try:
        return model_plan(model)
    except ValueError:
        return None
