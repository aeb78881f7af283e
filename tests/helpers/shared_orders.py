"""Random plans in which layers share channel orders."""

from collections.abc import Callable, Iterator

import numpy as np
from torch import nn

import strucspars as ss
from strucspars.channels.sharing import NetworkChannels, OrderSharing
from strucspars.core.checks import IntArray

Policy = Callable[[NetworkChannels], OrderSharing]


def keep_free(channels: NetworkChannels) -> OrderSharing:
    """Every side has an order of its own."""
    return OrderSharing(frozenset())


def shared_plan(
    model: nn.Module, channels: NetworkChannels, sharing: OrderSharing, *, most_level: int = 4, seed: int = 0
) -> ss.GroupingPlan:
    """Every layer at the largest level up to one, with a random order for each shared class and each other side."""
    generator = np.random.default_rng(seed)
    orders = {
        name: np.arange(each.width) if each.is_fixed else generator.permutation(each.width)
        for name, each in channels.classes.items()
        if each.is_fixed or name in sharing.shared
    }

    def order(names: tuple[str, ...], width: int) -> IntArray:
        if not names or not orders.keys() >= set(names):
            return generator.permutation(width)
        ends = np.cumsum([channels.classes[name].width for name in names])
        starts = ends - [channels.classes[name].width for name in names]
        return np.concatenate([orders[name] + start for name, start in zip(names, starts, strict=True)])

    layers = {}
    for selected in ss.select_layers(model).layers:
        out_channels, in_channels = selected.weight_shape[:2]
        sides = channels.sides[selected.name]
        layers[selected.name] = ss.LayerPlan(
            group_level=min(most_level, ss.core.max_group_level(out_channels, in_channels)),
            out_perm=order(sides.outputs, out_channels),
            in_perm=order(sides.inputs, in_channels),
            weight_shape=selected.weight_shape,
        )
    return ss.GroupingPlan(layers)


def shared_sides(channels: NetworkChannels, sharing: OrderSharing) -> Iterator[tuple[str, str]]:
    """The sides of layers, as (layer, side), all of whose channels are in shared classes."""
    for layer, sides in channels.sides.items():
        for side, names in (("input", sides.inputs), ("output", sides.outputs)):
            if names and sharing.shared.issuperset(names):
                yield layer, side
