"""Random plans in which classes of channels lose channels at random."""

import numpy as np
from torch import nn

import strucspars as ss
from strucspars.core.narrowing import KeptChannels, narrower_widths
from strucspars.cost.counting import ExampleInputs
from strucspars.prune.choice import (
    group_partitions,
    keep_most_important,
    reason_beside_groups,
    with_kept_channels,
)
from strucspars.prune.classes import prunable_channels


def narrow_plan(
    model: nn.Module, example_inputs: ExampleInputs, plan: ss.GroupingPlan | None = None, *, seed: int = 0
) -> ss.GroupingPlan:
    """The plan with fewer channels in every class that can lose some, beside the groups that it has."""
    generator, plan = np.random.default_rng(seed), plan or ss.GroupingPlan({})
    channels = prunable_channels(model, example_inputs)
    grouped = {name: layer for name, layer in plan.layers.items() if layer.group_level > 1}
    kept: dict[str, KeptChannels] = {}
    for name, each in channels.classes.items():
        if reason_beside_groups(channels, name, grouped):
            continue
        partitions = list(group_partitions(channels, name, grouped))
        widths = narrower_widths(each.width, [int(groups.max()) + 1 for groups in partitions])[1:]
        if widths and len(partitions) < 3:
            scores, width = {name: generator.random(each.width)}, {name: int(generator.choice(widths))}
            kept |= keep_most_important(channels, scores, width, grouped)
    return with_kept_channels(plan, channels, kept)
