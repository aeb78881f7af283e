"""The other channel orders of the paper's ablation (Table 3), with the learned number of groups."""

from typing import Literal, get_args

import numpy as np

from strucspars.core.arrays import IntArray
from strucspars.core.permutation import inverse
from strucspars.core.plan import GroupingPlan, LayerPlan

Shuffle = Literal["shufflenet", "random", "no-shuffle"]


def reordered_plan(plan: GroupingPlan, shuffle: Shuffle, *, seed: int = 0) -> GroupingPlan:
    """The same group levels with other orders, to convert freshly initialised networks with (Table 3).

    `"shufflenet"` reads the inputs as they come and interleaves the outputs of the groups; `"random"` draws both
    orders; `"no-shuffle"` changes neither. The paper's FromScratch is `convert_(fresh_network, plan)` itself.

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
