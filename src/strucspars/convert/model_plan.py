"""The plan that a converted model carries in itself."""

import math

from torch import nn

from strucspars.core.hierarchy import num_groups
from strucspars.core.permutation import inverse
from strucspars.core.plan import GroupingPlan, LayerPlan
from strucspars.nn.masked import DENSE_TYPES
from strucspars.nn.shuffled import channel_orders, dense_shape, groups_of_weight, is_grouped
from strucspars.nn.wrappers import bare_modules


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
