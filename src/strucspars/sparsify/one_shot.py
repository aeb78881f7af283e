"""Grouping from trained weights alone, without sparse training."""

import logging

from torch import nn

from strucspars.core.budget import Budget
from strucspars.core.importance import Norm
from strucspars.core.learning import Method
from strucspars.core.plan import GroupingPlan
from strucspars.cost.counting import ExampleInputs
from strucspars.nn.groupable import FilterFn, LayerRules, select_layers
from strucspars.sparsify.agreement import agreed
from strucspars.sparsify.config import SparsifyConfig
from strucspars.sparsify.layers import check_values, learned_states
from strucspars.sparsify.planning import kept_fraction, network_size, plan_for_target, with_one_width

logger = logging.getLogger(__name__)


def one_shot_plan(
    model: nn.Module,
    target: float,
    *,
    budget: Budget = "params",
    decay: float = 0.5,
    norm: Norm = "l1",
    method: Method = "fast",
    seed: int = 0,
    min_channels_per_group: int = 1,
    filter_fn: FilterFn | None = None,
    rules: LayerRules | None = None,
    example_inputs: ExampleInputs | None = None,
) -> GroupingPlan:
    """Plan from the weights as they are. Logs how much of their norm is lost: without sparse training that is a lot.

    Of several processes all call it, and get the same plan.

    Args:
        model: any module, trained or not.
        target: fraction of all parameters (or MACs) to remove.
        budget, decay, norm, method, seed, min_channels_per_group: as in `SparsifyConfig`.
        filter_fn, rules, example_inputs: as in `Sparsifier`.

    >>> model = nn.Sequential(nn.Conv2d(4, 8, 3, bias=False))
    >>> one_shot_plan(model, target=0.5).removed_param_fraction
    0.5
    """
    config = SparsifyConfig(
        target=target,
        epochs=1,
        lambda_warmup_epochs=0,
        budget=budget,
        decay=decay,
        norm=norm,
        method=method,
        seed=seed,
        min_channels_per_group=min_channels_per_group,
    )
    config, rules = with_one_width(config, rules or LayerRules())
    selection = select_layers(model, rules, filter_fn=filter_fn)
    if target > 0:
        selection.check_not_empty()
    check_values(selection.layers)
    size = network_size(model, example_inputs, budget)

    def decide() -> GroupingPlan:
        states = learned_states(selection.layers, config, None)
        return plan_for_target(selection.layers, states, size, config, skipped=selection.skipped)

    plan = agreed(decide)
    kept = kept_fraction(selection.layers, plan, config.norm)
    logger.warning(
        "one-shot grouping removes %.1f %% of all parameters and loses %.1f %% of the grouped layers' norm: "
        "finetune before you judge it, or train with a Sparsifier to lose less",
        100 * plan.removed_param_fraction,
        100 * (1 - kept),
    )
    return plan
