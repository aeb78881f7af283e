"""The other channel orders of the paper's ablation (Table 3), with the learned number of groups."""

import math
from typing import Literal, get_args

import numpy as np
import torch
from torch import nn

from strucspars.convert.conversion import planned_modules
from strucspars.core.checks import IntArray
from strucspars.core.permutation import inverse
from strucspars.core.plan import GroupingPlan, LayerPlan
from strucspars.nn.layers import is_grouped

Shuffle = Literal["shufflenet", "random", "no-shuffle"]


def reordered_plan(plan: GroupingPlan, shuffle: Shuffle, *, seed: int = 0) -> GroupingPlan:
    """The same group levels with other orders, to convert freshly initialised networks with (Table 3).

    `"shufflenet"` reads the inputs as they come and interleaves the outputs of the groups; `"random"` draws both
    orders; `"no-shuffle"` changes neither. The paper's FromScratch is `convert_(fresh_network, plan)` itself. Give the
    fresh weights their scale with `rescale_fresh_weights_`.

    >>> layer = LayerPlan(group_level=2, out_perm=np.arange(4)[::-1], in_perm=np.arange(2), weight_shape=(4, 2))
    >>> reordered_plan(GroupingPlan({"fc": layer}), "shufflenet").layers["fc"].out_perm
    array([0, 2, 1, 3])
    """
    if shuffle not in get_args(Shuffle):
        raise ValueError(f"shuffle must be one of {', '.join(get_args(Shuffle))}, got {shuffle!r}")
    generator = np.random.default_rng(seed)
    layers = {}
    for name, layer in plan.layers.items():
        out_perm, in_perm = _orders(layer, shuffle, generator)
        layers[name] = LayerPlan(
            group_level=layer.group_level, out_perm=out_perm, in_perm=in_perm, weight_shape=layer.weight_shape
        )
    return GroupingPlan(
        layers,
        budget=plan.budget,
        target=plan.target,
        min_kept_norm=None,
        removed_param_fraction=plan.removed_param_fraction,
        removed_mac_fraction=plan.removed_mac_fraction,
    )


def _orders(layer: LayerPlan, shuffle: Shuffle, generator: np.random.Generator) -> tuple[IntArray, IntArray]:
    out_channels, in_channels = layer.weight_shape[:2]
    if shuffle == "random":
        return generator.permutation(out_channels), generator.permutation(in_channels)
    in_order = np.arange(in_channels)
    if shuffle == "no-shuffle":
        return np.arange(out_channels), in_order
    interleaved = np.arange(out_channels).reshape(layer.num_groups, -1).T.ravel()
    return inverse(interleaved), in_order


def rescale_fresh_weights_(model: nn.Module, plan: GroupingPlan) -> nn.Module:
    """Multiply freshly initialised weights by the root of their number of groups, in place; returns the model.

    Initialisation counts the inputs of the dense layer; each output of `G` groups sums over `G` times fewer, so its
    variance would be `G` times too small (`docs/decisions/0009-fresh-weights.md`). Call it once, before or after
    `convert_` or `mask_`; not on trained weights. Biases stay.

    Args:
        model: freshly initialised as a dense network; dense still, masked or converted.
        plan: what it is, or will be, converted with.

    >>> import strucspars as ss
    >>> model = nn.Sequential(nn.Conv2d(4, 4, 1, bias=False))
    >>> plan = ss.one_shot_plan(model, target=0.75)
    >>> before = model[0].weight.detach().clone()
    >>> torch.equal(rescale_fresh_weights_(model, plan)[0].weight, 2 * before)
    True
    """
    modules = planned_modules(model, plan)
    if len({module.get_parameter("weight") for module in modules.values()}) < len(modules):
        raise ValueError("the plan names a shared weight more than once; keep one of its names")
    for name, module in modules.items():
        layer, weight = plan.layers[name], module.get_parameter("weight")
        kept_inputs = layer.weight_shape[1] // (layer.num_groups if is_grouped(module) else 1)
        if weight.shape[1] != kept_inputs:
            raise ValueError(
                f"layer {name!r} has {layer.weight_shape[1] // weight.shape[1]} groups, the plan {layer.num_groups}; "
                "give the plan that the model was converted with"
            )
    with torch.no_grad():
        for name, module in modules.items():
            module.get_parameter("weight").mul_(math.sqrt(plan.layers[name].num_groups))
    return model
