"""The other channel orders of the paper's ablation (Table 3), with the learned number of groups."""

import math
from dataclasses import replace
from typing import Literal, get_args

import numpy as np
import torch
from torch import nn

from strucspars.convert.changes import planned_modules
from strucspars.core.checks import IntArray
from strucspars.core.permutation import inverse
from strucspars.core.plan import GroupingPlan, LayerPlan

Shuffle = Literal["shufflenet", "random", "no-shuffle"]


def reordered_plan(plan: GroupingPlan, shuffle: Shuffle, *, seed: int = 0) -> GroupingPlan:
    """The same group levels with other orders, to convert freshly initialised networks with (Table 3).

    `"shufflenet"` keeps the order of the inputs and interleaves the outputs of the groups; `"random"` draws both
    orders; `"no-shuffle"` changes neither. The paper's FromScratch is `convert_(fresh_network, plan)` itself. Give the
    fresh weights their scale with `rescale_fresh_weights_`.
    """
    if shuffle not in get_args(Shuffle):
        raise ValueError(f"shuffle must be one of {', '.join(get_args(Shuffle))}, got {shuffle!r}")
    generator = np.random.default_rng(seed)
    layers = {}
    for name, layer in plan.layers.items():
        layers[name] = layer.with_orders(*_orders(layer, shuffle, generator))
    return replace(plan, layers=layers, shared_orders={}, min_kept_norm=None)


def _orders(layer: LayerPlan, shuffle: Shuffle, generator: np.random.Generator) -> tuple[IntArray, IntArray]:
    out_channels, in_channels = layer.weight_shape[:2]
    if shuffle == "random":
        return generator.permutation(out_channels), generator.permutation(in_channels)
    if shuffle == "no-shuffle":
        return np.arange(out_channels), np.arange(in_channels)
    interleaved = np.arange(out_channels).reshape(layer.num_groups, -1).T.ravel()
    return inverse(interleaved), np.arange(in_channels)


@torch.no_grad()
def rescale_fresh_weights_(model: nn.Module, plan: GroupingPlan) -> None:
    """Multiply freshly initialised weights by the root of their number of groups, in place.

    Initialisation counts the inputs of the dense layer; each output of `G` groups sums over `G` times fewer, so its
    variance would be `G` times too small (`docs/decisions/0009-fresh-weights.md`). Call it once, before or after
    `convert_` or `mask_`; not on trained weights. Biases stay.
    """
    for name, module in planned_modules(model, plan).items():
        module.get_parameter("weight").mul_(math.sqrt(plan.layers[name].num_groups))
