"""Convert a model by a plan: group every planned layer (Sec. 3.1, 3.5), or mask it to train dense."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from strucspars.convert.changes import Changes, mask_values_, modules_to_change, planned_modules, restored
from strucspars.convert.comparison import compare_outputs, random_arguments
from strucspars.core.hierarchy import num_groups
from strucspars.core.narrowing import KeptChannels, KeptSides, ModuleChannels, full_widths, order_of_all
from strucspars.core.permutation import inverse
from strucspars.core.plan import GroupingPlan, LayerPlan
from strucspars.cost.counting import ExampleInputs, arguments_of, fresh_arguments, uncompiled, undisturbed
from strucspars.nn.layers import (
    ORDER_NAMES,
    channel_orders,
    groups_of_weight,
    is_grouped,
    is_masked,
    unmask_module_,
)
from strucspars.nn.names import bare_modules, unwrapped
from strucspars.nn.narrowing import TensorChange, full_shape, narrowed_from, params_before

logger = logging.getLogger(__name__)


def convert_(
    model: nn.Module,
    plan: GroupingPlan,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    example_inputs: ExampleInputs | None = None,
) -> nn.Module:
    """Turn the planned layers of a model into group convolutions, in place; returns the model.

    Where the plan keeps only some channels, the layers and norms that see them become narrower. What the plan prunes is
    dropped, so the tensors really shrink. Names, devices, precisions, memory formats, modes, hooks and the identity of
    the parameters stay; so do the bias and the order of the weight's rows. Layers of one group and layers that this
    plan grouped already are left alone, masked ones are converted like dense ones. If the plan does not fit the model,
    nothing changes.

    A model wrapped for distributed training must be wrapped again afterwards: the wrapper holds the old shapes, and the
    weights of the processes would diverge. If the wrapper itself is given, a warning says so.

    Args:
        optimizer: its momenta are converted with the weights. Give it in the call that groups the layers, or make a new
            one.
        example_inputs: a tensor, or a tuple of positional arguments. The network is run on them, and on random ones
            like them, masked and grouped: a module that computes with the weight of a layer, bypassing the layer's own
            forward, gives other outputs, or fails.

    Raises:
        ValueError: the plan does not fit the model; the optimizer holds nothing of it, or was not given in the call
            that grouped the layers; or the outputs of the grouped and the masked network differ, with the layer at
            fault.

    >>> import numpy as np
    >>> import strucspars as ss
    >>> model = nn.Sequential(nn.Conv2d(4, 8, 3))
    >>> layer = ss.LayerPlan(group_level=3, out_perm=np.arange(8), in_perm=np.arange(4), weight_shape=(8, 4, 3, 3))
    >>> convert_(model, ss.GroupingPlan({"0": layer}), example_inputs=torch.zeros(1, 4, 8, 8))[0].weight.shape
    torch.Size([8, 1, 3, 3])
    """
    changes = modules_to_change(model, plan)
    _check_optimizer(optimizer, model, plan)
    if example_inputs is not None:
        _check_by_running(unwrapped(model), changes, example_inputs)
    unmask_(model)
    for change in changes.values():
        with _tensors_like_those_of(change.module):
            if optimizer is not None:
                _change_optimizer_state_(optimizer, change.module, change.converted_tensors())
            change.convert_()
    # Inside autocast it holds casts of the old weights, by parameters that stay the same.
    torch.clear_autocast_cache()
    if changes and any(isinstance(module, nn.parallel.DistributedDataParallel) for module in model.modules()):
        logger.warning(
            "DistributedDataParallel knows the old shapes, and would not average all gradients: wrap the network again "
            "before training, model = DistributedDataParallel(model.module)"
        )
    return model


def mask_(model: nn.Module, plan: GroupingPlan, optimizer: torch.optim.Optimizer | None = None) -> nn.Module:
    """Keep the planned layers dense but hold what the plan prunes at zero, in place; returns the model.

    The function is that of the converted model, and `convert_` turns the one into the other. On GPUs finetuning this
    form is faster. Training is the same up to rounding, unless the optimizer averages over whole tensors: Adafactor
    counts the zeros. The model's keys do not change: the masks are not in its `state_dict`, so mask again after
    `to_empty`. The optimizer, if given, forgets the momenta of pruned weights.

    >>> import numpy as np
    >>> import strucspars as ss
    >>> model = nn.Sequential(nn.Conv2d(4, 8, 1))
    >>> layer = ss.LayerPlan(group_level=2, out_perm=np.arange(8), in_perm=np.arange(4), weight_shape=(8, 4, 1, 1))
    >>> int((mask_(model, ss.GroupingPlan({"0": layer}))[0].weight == 0).sum())
    16
    """
    changes = modules_to_change(model, plan)
    _check_optimizer(optimizer, model, plan)
    unmask_(model)
    for change in changes.values():
        with _tensors_like_those_of(change.module):
            if optimizer is not None:
                _change_optimizer_state_(optimizer, change.module, change.masked_tensors())
            change.mask_()
    return model


@contextmanager
def _tensors_like_those_of(module: nn.Module) -> Iterator[None]:
    """Make inference tensors only if the module has some: a model changed in inference mode may be trained."""
    is_inference = any(tensor.is_inference() for tensor in (*module.parameters(), *module.buffers()))
    with torch.inference_mode(is_inference), torch.no_grad():
        yield


def unmask_(model: nn.Module) -> None:
    """Turn all masked layers into dense ones, pruned weights at zero, in place."""
    for module in model.modules():
        if is_masked(module):
            unmask_module_(module)


def check_fits(model: nn.Module, plan: GroupingPlan) -> None:
    """Raise a `ValueError` that names the layer unless `convert_` would accept this plan for this model."""
    modules_to_change(model, plan)


def _check_optimizer(optimizer: torch.optim.Optimizer | None, model: nn.Module, plan: GroupingPlan) -> None:
    """Refuse an optimizer of another model, one without memory by parameter, and one that missed a layer's grouping."""
    if optimizer is None:
        return
    held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    if held.isdisjoint(model.parameters()):
        raise ValueError(
            "the optimizer holds no parameter of this model; give the one that trains it (a copy of a model has "
            "parameters of its own), or leave it out"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("LBFGS remembers all parameters as one vector; make a new optimizer after the change")
    for name, module in planned_modules(model, plan).items():
        shape, weight = plan.layers[name].weight_shape, module.get_parameter("weight")
        remembered = [each for each in optimizer.state.get(weight, {}).values() if isinstance(each, torch.Tensor)]
        if tuple(weight.shape) != shape and any(tuple(each.shape) == shape for each in remembered):
            raise ValueError(
                f"layer {name!r} is grouped already, but the optimizer remembers its weight in the dense shape "
                f"{shape}, not {tuple(weight.shape)}; give the optimizer with the first call, or make a new one"
            )
    for name, module in bare_modules(model):
        if (record := narrowed_from(module)) is None:
            continue
        former = full_widths(record.sides, record.classes)[0] or None
        for parameter in module.parameters(recurse=False):
            remembered = [
                each for each in optimizer.state.get(parameter, {}).values() if isinstance(each, torch.Tensor)
            ]
            if any(each.dim() and len(each) == former != len(parameter) for each in remembered):
                raise ValueError(
                    f"module {name!r} has lost channels already, but the optimizer remembers {former} of them, not "
                    f"{len(parameter)}; give the optimizer with the first call, or make a new one"
                )


def _change_optimizer_state_(
    optimizer: torch.optim.Optimizer, module: nn.Module, changes: Mapping[str, TensorChange]
) -> None:
    """Apply changes to everything an optimizer remembers in the shapes of a module's parameters. Counters stay.

    Where something has another shape, such as factored moments, the parameter starts without a memory.
    """
    for name, change in changes.items():
        parameter = module._parameters.get(name)
        if parameter is None:
            continue
        state = optimizer.state.get(parameter, {})
        remembered = {key: value for key, value in state.items() if isinstance(value, torch.Tensor) and value.dim() > 0}
        foreign = [key for key, value in remembered.items() if value.numel() > 1 and value.shape != parameter.shape]
        foreign += [key for key, value in state.items() if isinstance(value, list | tuple | dict)]
        if foreign:
            logger.warning(
                "%s cannot carry %s over to a grouped weight of former shape %s; its memory is cleared",
                type(optimizer).__name__,
                ", ".join(map(repr, foreign)),
                tuple(parameter.shape),
            )
            del optimizer.state[parameter]
            continue
        for key, value in remembered.items():
            if value.shape == parameter.shape:
                state[key] = change(value)


def _check_by_running(model: nn.Module, changes: Changes, example_inputs: ExampleInputs) -> None:
    """Run the grouped and the masked network; raise a `ValueError` that names the first layer at fault."""
    arguments = arguments_of(model, example_inputs)
    with undisturbed(model), uncompiled(model), restored(changes):
        mask_values_(changes)
        expected = _outputs(model, arguments)
        complaint = _complaint(model, changes, arguments, expected)
        if not complaint:
            arguments = random_arguments(arguments, in_double=False)
            try:
                expected = _outputs(model, arguments)
            # The network may reject random values.
            except Exception:
                return
            complaint = _complaint(model, changes, arguments, expected)
        if complaint:
            found = ((place, _complaint(model, part, arguments, expected)) for place, part in _parts(changes))
            place, complaint = next((each for each in found if each[1]), ("several layers", complaint))
            raise ValueError(
                f"{place}: grouped, the network computes something else than masked: {complaint}; something uses the "
                "weight and bypasses the layer's own forward: remove the layer from the plan, or keep it dense with "
                "mask_"
            )


def _parts(changes: Changes) -> Iterator[tuple[str, Changes]]:
    """The changes one by one, with what each is called; those of channels that go only work together."""
    narrow = {name: replace(change, layer=None) for name, change in changes.items() if change.narrowed is not None}
    if narrow:
        yield "without the channels that go", narrow
    for name, change in changes.items():
        if change.layer is not None:
            yield f"layer {name!r}", narrow | {name: change}


def _complaint(model: nn.Module, changes: Changes, arguments: tuple[Any, ...], expected: object) -> str:
    """How the outputs change where these layers are grouped and narrower, or why there are none."""
    with restored(changes):
        for change in changes.values():
            change.convert_()
        try:
            return compare_outputs(_outputs(model, arguments), expected).complaint
        # The code that reads the weight may raise any error.
        except Exception as error:
            return f"{type(error).__name__}: {error}".splitlines()[0]


def _outputs(model: nn.Module, arguments: tuple[Any, ...]) -> object:
    torch.clear_autocast_cache()
    return model(*fresh_arguments(arguments))


def model_plan(model: nn.Module) -> GroupingPlan:
    """Read the grouping from a converted model: the plan that makes it from the dense one. Empty for a dense model.

    >>> import strucspars as ss
    >>> model = nn.Sequential(nn.Conv2d(4, 8, 3, bias=False))
    >>> plan = ss.one_shot_plan(model, target=0.5)
    >>> model_plan(ss.convert_(model, plan)).layers == plan.layers
    True
    """
    layers: dict[str, LayerPlan] = {}
    narrowed: dict[str, ModuleChannels] = {}
    kept_channels: dict[str, KeptChannels] = {}
    kept = sum(parameter.numel() for parameter in model.parameters())
    dense = float(kept)
    for name, module in bare_modules(model):
        if is_masked(module):
            raise ValueError(f"layer {name!r} is masked, not grouped; call convert_(model, plan) first")
        if is_grouped(module):
            layers[name] = _layer_plan(name, module)
        if (record := narrowed_from(module)) is not None:
            narrowed[name] = record.sides
            kept_channels |= record.classes
        if name in layers or name in narrowed:
            dense += params_before(module) - sum(each.numel() for each in module.parameters(recurse=False))
    return GroupingPlan(
        layers,
        kept_channels=kept_channels,
        narrowed=narrowed,
        removed_param_fraction=1 - kept / dense if dense else 0.0,
    )


def _layer_plan(name: str, module: nn.Module) -> LayerPlan:
    """The grouping of a layer; channels that it lost fill up the groups."""
    shape, record = full_shape(module, name), narrowed_from(module)
    kept = KeptSides() if record is None else record.kept
    groups = groups_of_weight(module)
    level = groups.bit_length()
    if num_groups(level) != groups:
        raise ValueError(f"layer {name!r} has {groups} groups, no power of two: no plan makes such a layer")
    in_perm, out_inverse = (channel_orders(module)[order].cpu().numpy() for order in ORDER_NAMES)
    orders = ((inverse(out_inverse), kept.outputs, shape[0]), (in_perm, kept.inputs, shape[1]))
    out_perm, in_perm = (
        perm if places is None else order_of_all(perm, places, width, groups) for perm, places, width in orders
    )
    return LayerPlan(group_level=level, out_perm=out_perm, in_perm=in_perm, weight_shape=shape)


def plan_of(model: nn.Module) -> GroupingPlan | None:
    """The plan of a converted model; None where no plan describes it: masked layers, or groups made by hand."""
    try:
        return model_plan(model)
    except ValueError:
        return None
