"""Which channels of every class stay, so that all groups lose as many, and what that is in a plan."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

import numpy as np

from strucspars.core.checks import FloatArray, IntArray
from strucspars.core.hierarchy import num_groups
from strucspars.core.narrowing import KeptChannels, most_important
from strucspars.core.permutation import inverse
from strucspars.core.plan import GroupingPlan, LayerPlan
from strucspars.prune.classes import PrunableChannels


def reason_beside_groups(channels: PrunableChannels, name: str, grouped: Collection[str] = ()) -> str:
    """Why no channel of a class can go, with these layers grouped; empty where some can."""
    for layer, _, names, repeat in _sides(channels, name):
        has_groups = layer in grouped or layer in channels.own_groups
        if has_groups and (len(names) > 1 or repeat > 1):
            return f"layer {layer!r} has groups over these and other channels, or over parts of them"
    return channels.classes[name].reason


def keep_most_important(
    channels: PrunableChannels,
    scores: Mapping[str, FloatArray],
    widths: Mapping[str, int],
    layers: Mapping[str, LayerPlan],
) -> dict[str, KeptChannels]:
    """The channels that stay: of every class so many, those of the largest scores that leave all groups even.

    Args:
        channels: of the dense network.
        scores: of every class that becomes narrower, the importance of each channel, not negative.
        widths: how many channels each of them keeps.
        layers: the plan's layers; the orders of those with groups decide which channels are in a group.

    Raises:
        ValueError: a class cannot lose channels, or not so many; with the reason.
    """
    grouped = {name: layer for name, layer in layers.items() if layer.group_level > 1}
    kept = {}
    for name, width in widths.items():
        each = channels.classes[name]
        if reason := reason_beside_groups(channels, name, grouped):
            raise ValueError(f"channels of {name!r} have to stay: {reason}; leave the class out")
        partitions = list(group_partitions(channels, name, grouped))
        found = most_important(scores[name], width, partitions)
        if found is None or not 0 < width <= each.width:
            groups = ", ".join(str(int(partition.max()) + 1) for partition in partitions) or "no"
            raise ValueError(
                f"channels of {name!r}: {width} of {each.width} cannot be chosen evenly from its layers' groups "
                f"({groups} groups); choose another number, or let these layers share an order"
            )
        kept[name] = KeptChannels(each.width, tuple(found.tolist()))
    return kept


def group_partitions(channels: PrunableChannels, name: str, grouped: Mapping[str, LayerPlan]) -> Iterator[IntArray]:
    """The group of each channel of a class, for every side of a layer with groups that sees the class."""
    width = channels.classes[name].width
    for layer, is_output, _, _ in _sides(channels, name):
        if layer in channels.own_groups:
            yield np.arange(width) // (width // channels.own_groups[layer])
        elif layer in grouped:
            perm = grouped[layer].out_perm if is_output else grouped[layer].in_perm
            yield inverse(perm) // (width // num_groups(grouped[layer].group_level))


def with_kept_channels(
    plan: GroupingPlan, channels: PrunableChannels, kept: Mapping[str, KeptChannels]
) -> GroupingPlan:
    """The plan that also keeps only these channels."""
    narrower = {name: each for name, each in kept.items() if each.is_narrower}
    modules = channels.sides(narrower)
    beside = {name for sides in modules.values() for name in (*sides.outputs, *sides.inputs)}
    whole = {name: channels.classes[name].width for name in channels.classes if name in beside - narrower.keys()}
    classes = narrower | {name: KeptChannels(width, tuple(range(width))) for name, width in whole.items()}
    return replace(plan, kept_channels=classes, narrowed=modules)


def _sides(channels: PrunableChannels, name: str) -> Iterator[tuple[str, bool, tuple[str, ...], int]]:
    """The sides of layers that see a class: the layer, whether these are its outputs, all their classes, the repeat."""
    each = channels.classes[name]
    for layer in dict.fromkeys((*each.writers, *each.readers)):
        sides = channels.modules[layer]
        if name in sides.outputs:
            yield layer, True, sides.outputs, 1
        if name in sides.inputs:
            yield layer, False, sides.inputs, sides.repeat
