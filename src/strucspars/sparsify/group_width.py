"""The minimum width of groups: one number wherever it was asked for, and named where a target fails for it."""

from collections.abc import Sequence
from dataclasses import replace

from strucspars.core.budget import (
    LayerBudget,
    ThresholdSearch,
    largest_removed_fraction,
    reachable_target,
    search_threshold,
)
from strucspars.nn.selection import LayerRules
from strucspars.sparsify.config import SparsifyConfig


def with_one_width(config: SparsifyConfig, rules: LayerRules) -> tuple[SparsifyConfig, LayerRules]:
    """Options and rules with the larger of their two minimum widths: either may ask for one.

    >>> config, rules = with_one_width(SparsifyConfig(target=0.5, epochs=20), LayerRules(min_channels_per_group=16))
    >>> config.min_channels_per_group, rules.min_channels_per_group
    (16, 16)
    """
    width = max(config.min_channels_per_group, rules.min_channels_per_group)
    return replace(config, min_channels_per_group=width), replace(rules, min_channels_per_group=width)


def threshold_for_target(budgets: Sequence[LayerBudget], config: SparsifyConfig) -> ThresholdSearch:
    """The threshold that meets the target; the layers' largest levels are those of the minimum width.

    Raises:
        ValueError: the target cannot be reached; the message names the width, and what can be reached with it.
    """
    width = config.min_channels_per_group
    if width > 1:
        most = largest_removed_fraction(budgets, config.budget)
        if most < config.target:
            raise ValueError(
                f"target {config.target:g} cannot be reached: the most that can be removed with "
                f"min_channels_per_group={width} is {reachable_target(most)} of all {config.budget}; "
                "lower min_channels_per_group or the target, or lift fixed and largest levels"
            )
    return search_threshold(budgets, config.target, config.budget)
