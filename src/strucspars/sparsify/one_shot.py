"""Planning trained weights without training: from their norms, or from what calibration images tell about them."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from strucspars.core.budget import levels_by_loss
from strucspars.core.checks import FloatArray
from strucspars.core.hierarchy import num_groups
from strucspars.core.plan import GroupingPlan
from strucspars.cost.counting import ExampleInputs
from strucspars.nn.groupable import FilterFn, Selection, select_layers
from strucspars.sparsify.agreement import agreed
from strucspars.sparsify.calibration import Calibration, CalibrationBatch, OnProgress, device_of, ignore_progress
from strucspars.sparsify.config import SparsifyConfig
from strucspars.sparsify.extensions import (
    DEFAULT_IMPORTANCE,
    LayerToOrder,
    Orders,
    Solve,
    WholeNetwork,
    find_budget,
    find_importance,
    importance_of,
)
from strucspars.sparsify.levels import error_importance, layer_data, losses_by_level, with_statistics
from strucspars.sparsify.narrowing import (
    find_prunable_channels,
    layers_with_channels,
    narrowable_network,
    plan_with_narrowing,
    pruned_layers,
)
from strucspars.sparsify.orders import with_network_orders
from strucspars.sparsify.planning import (
    LayerState,
    check_values,
    kept_fraction,
    learned_states,
    measured_latency,
    network_size,
    orders_at_levels,
    plan_at_levels,
    plan_for_target,
    reachable_budgets,
    refined_orders,
    with_known_target,
    without_solver_lines,
)
from strucspars.sparsify.refit_orders import Regression, refit_orders

logger = logging.getLogger(__name__)

# In nats per image: an ImageNet ResNet-50 lost about a point at 0.05 (docs/decisions/0018-levels-by-loss.md).
NOTABLE_DIVERGENCE = 0.05


def one_shot_plan(
    model: nn.Module,
    target: float | SparsifyConfig,
    *,
    calibration: Iterable[CalibrationBatch] | Calibration | None = None,
    filter_fn: FilterFn | None = None,
    example_inputs: ExampleInputs | None = None,
    on_progress: OnProgress | None = None,
) -> GroupingPlan:
    """Plan from the present weights, and from images where some are given.

    With images, the group levels are those that cost the predictions least, as measured with refitted weights, and the
    plan has its `predicted_divergence`; `reconstruct_` refits the converted network. Without images the levels follow
    the norms of the weights, and a warning says how much of them is lost: such a network needs training.

    In distributed training all processes call it, and get the same plan.

    Args:
        model: any module, trained or not.
        target: fraction of all parameters to remove, or all options; those of the training are not used.
        calibration: a few hundred images: tensors, or pairs of images and labels; at most the first 1,024 are used. The
            channel orders are then learned from the errors that lost connections cause, unless the options name
            another importance than `l1`.
        filter_fn: called as `filter_fn(module, name)`; False leaves a layer alone.
        example_inputs: a tensor or a tuple of them to count MACs with and to trace the network; needed for
            `budget="macs"`, for `budget="latency"`, whose milliseconds are those of a call with these, and for shared
            orders, unless there are calibration images.
        on_progress: called as `on_progress(what, done, total)` during long work.

    >>> import strucspars as ss
    >>> model = nn.Sequential(nn.Conv2d(4, 8, 3, bias=False))
    >>> ss.one_shot_plan(model, target=0.5).removed_param_fraction
    0.5
    >>> ss.one_shot_plan(model, ss.SparsifyConfig(target=0.3, min_channels_per_group=2)).layers["0"].num_groups
    2
    """
    config = target if isinstance(target, SparsifyConfig) else SparsifyConfig(target=target)
    (plan,) = one_shot_plans(
        model,
        config,
        None,
        calibration=calibration,
        filter_fn=filter_fn,
        example_inputs=example_inputs,
        on_progress=on_progress,
    )
    if config.narrow != "none":
        logger.warning(
            "groups and fewer channels remove %.1f %% of all parameters and lose %.1f %% of the norm of their layers; "
            "recalibrate the batch norms at the least, or finetune, before you judge the network",
            100 * plan.removed_param_fraction,
            100 * (1 - kept_fraction(pruned_layers(model, plan), plan)),
        )
    elif calibration is None:
        layers = select_layers(model, config, filter_fn=filter_fn).layers
        logger.warning(
            "one-shot grouping removes %.1f %% of all parameters and loses %.1f %% of the grouped layers' norm; without"
            " images the network is not usable as it is: give calibration=batches (a few hundred), recalibrate its "
            "batch norms at the least, or finetune before you judge it",
            100 * plan.removed_param_fraction,
            100 * (1 - kept_fraction(layers, plan, config.importance)),
        )
    else:
        _log_prediction(plan)
    return plan


def one_shot_plans(
    model: nn.Module,
    config: SparsifyConfig,
    targets: Sequence[float] | None,
    *,
    calibration: Iterable[CalibrationBatch] | Calibration | None = None,
    filter_fn: FilterFn | None = None,
    example_inputs: ExampleInputs | None = None,
    on_progress: OnProgress | None = None,
) -> list[GroupingPlan]:
    """A plan for every target, from one look at the layers; None is the target of the options. Logs nothing."""
    data = None if calibration is None else Calibration.of(calibration).on(device_of(model))
    selection = select_layers(model, config, filter_fn=filter_fn)
    if (config.target > 0 or targets) and config.narrow == "none":
        selection.check_not_empty()
    check_values(selection.layers)
    if data is not None and example_inputs is None:
        example_inputs = data.images[0][:1]
    latency = measured_latency(model, example_inputs, config, on_progress)
    wanted = [replace(config, target=target) for target in targets] if targets else [with_known_target(config, latency)]
    size = network_size(model, example_inputs, latency)
    selection = with_network_orders(selection, model, config, example_inputs)

    def decide() -> list[GroupingPlan]:
        if config.narrow != "none":
            return narrowed_plans(model, selection, size, wanted, example_inputs, data)
        if data is not None and selection.layers:
            measured = measured_layers(model, selection, config, data, on_progress or ignore_progress)
            return [plan_by_loss(selection, measured, size, each) for each in wanted]
        states = learned_states(selection.layers, config, None, network=selection.orders)
        return [plan_for_target(selection, states, size, each) for each in wanted]

    return agreed(decide)


def narrowed_plans(
    model: nn.Module,
    selection: Selection,
    size: WholeNetwork,
    wanted: Sequence[SparsifyConfig],
    example_inputs: ExampleInputs | None,
    data: Calibration | None,
) -> list[GroupingPlan]:
    """A plan with groups and fewer channels for every target, by the importance of the options."""
    config = wanted[0]
    channels = find_prunable_channels(model, config, example_inputs)
    layers = layers_with_channels(model, channels)
    known = {layer.name: layer for layer in selection.layers} | {
        name: layer for name, layer in layers.items() if name not in channels.own_groups
    }
    needs = find_importance(config.importance).needs
    if needs and data is not None:
        known = dict(zip(known, with_statistics(model, list(known.values()), needs, data), strict=True))
    importances = [importance_of(known[layer.name], config.importance) for layer in selection.layers]
    states = learned_states(selection.layers, config, None, importances=importances, network=selection.orders)
    layers |= {name: known[name] for name in layers if name in known}
    network = narrowable_network(model, channels, layers, config)
    return [
        plan_with_narrowing(model, selection, states, size, each, network, importances=importances) for each in wanted
    ]


def _log_prediction(plan: GroupingPlan) -> None:
    """Say in plain words what the plan will cost, before anything is converted."""
    predicted = plan.predicted_divergence or 0.0
    large = predicted > NOTABLE_DIVERGENCE
    logger.log(
        logging.WARNING if large else logging.INFO,
        "removing %.1f %% of all parameters is predicted to move the predictions by %.3f nats%s",
        100 * plan.removed_param_fraction,
        predicted,
        "; for an ImageNet classifier that costs several points of accuracy without training: lower the target, or "
        "finetune"
        if large
        else "",
    )


@dataclass(frozen=True, eq=False)
class MeasuredLayers:
    """What calibration images tell about the selected layers: enough to plan for any target.

    Attributes:
        importances: what the channel orders are learned from.
        states: the orders before they are refined for a level.
        losses: by layer, the divergence of the predictions that each group level alone is expected to cause.
        solve: refines orders for the levels that are chosen.
    """

    importances: Sequence[FloatArray]
    states: Sequence[LayerState]
    losses: Mapping[str, Sequence[float]]
    solve: Solve


def measured_layers(
    model: nn.Module, selection: Selection, config: SparsifyConfig, data: Calibration, progress: OnProgress
) -> MeasuredLayers:
    """Measure what every group level of every layer costs the predictions; the target of the options is not used."""
    layers = selection.layers
    fit, held = data.split()
    found = layer_data(model, layers, fit, progress)
    reads_error = config.importance == DEFAULT_IMPORTANCE
    if reads_error:
        importances = [error_importance(layer, known) for layer, known in zip(layers, found, strict=True)]
    else:
        needs = find_importance(config.importance).needs
        importances = [importance_of(layer, config.importance) for layer in with_statistics(model, layers, needs, fit)]
    states = learned_states(layers, config, None, importances=importances, network=selection.orders)
    by_name = {layer.name: (layer, known) for layer, known in zip(layers, found, strict=True)}

    def least_error(problems: Sequence[LayerToOrder]) -> list[Orders]:
        """Orders for layers that are refitted."""
        found_orders = refined_orders(problems)
        for place, problem in enumerate(problems):
            if problem.level > 1:
                layer, known = by_name[problem.name]
                regression = Regression.of(layer.weight.detach().float(), known.covariance, known.sensitivity)
                found_orders[place] = refit_orders(regression, found_orders[place], num_groups(problem.level))
            progress("channel orders", place + 1, len(problems))
        return found_orders

    # Other importances decide the orders alone.
    solve = least_error if reads_error else refined_orders

    def orders_at(level: int) -> list[Orders]:
        levels = {layer.name: min(level, layer.largest_level) for layer in layers}
        return orders_at_levels(selection, states, config, levels, importances=importances)

    losses = losses_by_level(model, layers, found, orders_at, held, progress)
    return MeasuredLayers(importances, states, losses, solve)


def plan_by_loss(
    selection: Selection, measured: MeasuredLayers, size: WholeNetwork, config: SparsifyConfig
) -> GroupingPlan:
    """The plan whose levels remove the target at the least measured loss."""
    budgets = reachable_budgets(selection, measured.states, size, config)
    shuffles = find_budget(config.budget).shuffles(size)
    with without_solver_lines():
        levels = levels_by_loss(budgets, measured.losses, config.target, shuffles)
    plan = plan_at_levels(
        selection, measured.states, size, config, levels, importances=measured.importances, solve=measured.solve
    )
    loss = sum(measured.losses[name][level - 1] for name, level in levels.items())
    return replace(plan, predicted_divergence=loss)
