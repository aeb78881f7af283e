"""From importances to a plan: the threshold that meets the target, then the orders refined for the chosen levels.

In distributed training rank 0 decides, and all processes take over its decision.
"""

import logging
import math
import os
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Executor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import cast

import numpy as np
import numpy.typing as npt
from torch import nn

from strucspars.core.budget import (
    LayerBudget,
    ThresholdSearch,
    cheapest_levels,
    levels_by_loss,
    reachable_target,
    removed_fraction,
    search_threshold,
    without_surplus,
)
from strucspars.core.checks import FloatArray, IntArray
from strucspars.core.hierarchy import group_penalty
from strucspars.core.importance import kept_norm_by_level, level_keeping, penalty_scale
from strucspars.core.learning import learn_permutations, refine_at_level
from strucspars.core.permutation import connection_cost
from strucspars.core.plan import GroupingPlan, LayerPlan, PlannedLatency
from strucspars.core.registry import import_named
from strucspars.core.shared_orders import NetworkOrders
from strucspars.cost.counting import ExampleInputs, count_macs, refuse_lazy_modules
from strucspars.cost.latency import LatencyTable
from strucspars.nn.groupable import SelectedLayer, Selection, SkippedLayer, hint_at_types
from strucspars.nn.names import bare_modules
from strucspars.sparsify.agreement import agreed
from strucspars.sparsify.calibration import OnProgress
from strucspars.sparsify.config import SparsifyConfig
from strucspars.sparsify.extensions import (
    MACS,
    PARAMS,
    Budget,
    CountedLayer,
    LayerToOrder,
    Orders,
    Solve,
    WholeNetwork,
    find_budget,
    find_importance,
    importance_of,
)
from strucspars.sparsify.orders import hierarchy_penalty, level_penalty, one_blas_thread, orders_of, planned_layers

logger = logging.getLogger(__name__)

# Of the whole network: the paper's tables are met within one point.
NOTABLE_SURPLUS = 0.01
EVERYTHING_ELSE = "(everything else)"
# Of a layer's norm: a loss on a logarithmic scale has no zero.
LEAST_KEPT = 1e-6
# Of the package's upper floors, where networks are exported and timed.
LATENCY_TABLE = "strucspars.bench.latency:latency_table"
_STANDARD_OUTPUT = threading.Lock()
# Of the whole network, in layers that are left out for the same reason.
NOTABLE_SHARE = 0.05


@dataclass(frozen=True, eq=False)
class LayerState:
    """Channel orders, kept norms and level of one layer at the end of an epoch.

    An importance that reads data also scales the penalty: `penalty_scale` is then the factor of every connection, in
    the original channel orders.
    """

    out_perm: IntArray
    in_perm: IntArray
    cost: float
    kept_norm: tuple[float, ...]
    group_level: int
    # Single precision: checkpoints hold it.
    penalty_scale: npt.NDArray[np.float32] | None = None

    @property
    def orders(self) -> Orders:
        """Both orders, `(out_perm, in_perm)`."""
        return self.out_perm, self.in_perm


def network_size(
    model: nn.Module, example_inputs: ExampleInputs | None, latency: LatencyTable | None = None
) -> WholeNetwork:
    """Count the network's parameters and, given an input to run it on, its multiply-accumulates."""
    refuse_lazy_modules(model)
    params = sum(parameter.numel() for parameter in model.parameters())
    if example_inputs is None:
        return WholeNetwork(params, None, {})
    count, modules = count_macs(model, example_inputs), dict(bare_modules(model))
    layer_macs = {modules[name]: layer.macs for name, layer in count.layers.items()}
    return WholeNetwork(params, count.macs, layer_macs, latency)


def measured_latency(
    model: nn.Module,
    example_inputs: ExampleInputs | None,
    config: SparsifyConfig,
    on_progress: OnProgress | None = None,
) -> LatencyTable | None:
    """The times of the layers on this machine where the budget counts them, else None; of several processes, rank 0's.

    Timing needs the exporters and runtimes, which know the plans that are made here: they are found by name.
    """
    if not config.counts_latency:
        return None
    if example_inputs is None:
        raise ValueError("budget='latency' needs example_inputs to measure the milliseconds with")
    timed = import_named("budget", LATENCY_TABLE)
    return agreed(lambda: cast(LatencyTable, timed(model, example_inputs, config, on_progress)))


def with_known_target(config: SparsifyConfig, latency: LatencyTable | None) -> SparsifyConfig:
    """The options with the fraction to remove that `target_ms` asks for."""
    if config.target_ms is None or latency is None:
        return config
    if config.target_ms >= latency.dense_ms:
        logger.warning(
            "the dense network takes %.3g ms, which is no more than target_ms=%g: nothing is removed",
            latency.dense_ms,
            config.target_ms,
        )
    # Rounded down, so that levels that take just these milliseconds meet it.
    target = max(0.0, 1 - config.target_ms / latency.dense_ms - 1e-9)
    return replace(config, target=target, target_ms=None)


def check_values(layers: Iterable[SelectedLayer]) -> None:
    """Raise a `ValueError` where a weight is on the meta device: there is nothing to learn from."""
    for layer in layers:
        if layer.weight.is_meta:
            raise ValueError(
                f"layer {layer.name!r} is on the meta device, where weights have no values; call "
                "model.to_empty(device=...) and load the weights first"
            )


def learned_states(
    layers: Sequence[SelectedLayer],
    config: SparsifyConfig,
    previous: Sequence[LayerState] | None,
    executor: Executor | None = None,
    *,
    importances: Sequence[FloatArray] | None = None,
    network: NetworkOrders | None = None,
) -> list[LayerState]:
    """Learn or refresh the channel orders of all layers, then read off the levels.

    The importances are those of the present weights unless given. With an executor its workers solve the layers in
    parallel, except those that share orders; the outcome is the same.
    """
    starts = [None] * len(layers) if previous is None else [state.orders for state in previous]
    importances = importances or [importance_of(layer, config.importance) for layer in layers]
    problems = [
        LayerToOrder(layer.name, importance, start, layer.largest_level)
        for layer, importance, start in zip(layers, importances, starts, strict=True)
    ]

    def solve(chosen: Sequence[LayerToOrder]) -> list[Orders]:
        return _learned_by_workers(chosen, config, executor) if executor is not None else _learned_here(chosen, config)

    found = orders_of(problems, network, config, solve=solve, penalty=hierarchy_penalty(config))
    return [
        _state(layer, problem.importance, orders, config)
        for layer, problem, orders in zip(layers, problems, found, strict=True)
    ]


def refined_orders(layers: Sequence[LayerToOrder]) -> list[Orders]:
    """The best orders found for the level of each layer, from the orders it has."""
    refined: list[Orders] = []
    with one_blas_thread():
        for layer in layers:
            assert layer.start is not None, "refined after they are learned"
            found = refine_at_level(layer.importance, layer.start, group_level=layer.level)
            refined.append((found.out_perm, found.in_perm))
    return refined


def _learned_here(layers: Sequence[LayerToOrder], config: SparsifyConfig) -> list[Orders]:
    with one_blas_thread():
        return [_learned(layer, config) for layer in layers]


def _learned_by_workers(layers: Sequence[LayerToOrder], config: SparsifyConfig, executor: Executor) -> list[Orders]:
    # The largest first: a long one that starts last keeps all others waiting.
    order = sorted(range(len(layers)), key=lambda index: -layers[index].importance.size)
    try:
        futures = {index: executor.submit(_learned, layers[index], config) for index in order}
        return [futures[index].result() for index in range(len(layers))]
    except BrokenExecutor:
        logger.warning(
            "a worker process died, perhaps for lack of memory; the channel orders are learned in this process"
        )
        return _learned_here(layers, config)


def _learned(layer: LayerToOrder, config: SparsifyConfig) -> Orders:
    learned = learn_permutations(
        layer.importance,
        config.method,
        decay=config.decay,
        max_group_level=layer.level,
        start=layer.start,
        seed=config.seed,
    )
    return learned.out_perm, learned.in_perm


def _state(layer: SelectedLayer, importance: FloatArray, orders: Orders, config: SparsifyConfig) -> LayerState:
    out_perm, in_perm = orders
    penalty = group_penalty(layer.largest_level - 1, decay=config.decay)
    cost = connection_cost(importance, penalty, out_perm, in_perm)
    kept_norm = tuple(kept_norm_by_level(importance[out_perm][:, in_perm]).tolist())
    level = layer.fixed_level
    if level is None:
        level = min(level_keeping(kept_norm, config.min_kept_norm), layer.largest_level)
    reads_data = bool(find_importance(config.importance).needs)
    scale = penalty_scale(importance).astype(np.float32) if reads_data else None
    return LayerState(out_perm, in_perm, cost, kept_norm, level, scale)


def network_budget(
    selection: Selection, states: Sequence[LayerState], size: WholeNetwork, budget: Budget
) -> list[LayerBudget]:
    """Every selected layer, and one entry for everything else: the denominator is the whole network."""
    pairs = list(zip(selection.layers, states, strict=True))
    counted = [_counted(layer, len(state.kept_norm), size) for layer, state in pairs]
    budgets = []
    for place, (layer, state) in enumerate(pairs):
        neighbours = (*counted[max(0, place - 1) : place], *counted[place + 1 : place + 2])
        costs = budget.cost_by_level(counted[place], neighbours)
        budgets.append(
            LayerBudget(
                layer.name,
                costs[0],
                kept_norm=state.kept_norm,
                cost_by_level=costs,
                fixed_level=layer.fixed_level,
                largest_level=layer.largest_level,
            )
        )
    if budget.whole is None:
        rest = sum(cost for _, cost in _skipped_costs(selection, size, budget))
    else:
        # Sums of milliseconds are rounded.
        rest = max(0.0, budget.whole(size) - sum(layer.cost for layer in budgets))
    return [*budgets, LayerBudget(EVERYTHING_ELSE, rest)]


def _counted(layer: SelectedLayer | SkippedLayer, num_levels: int, size: WholeNetwork) -> CountedLayer:
    macs = None if size.macs is None else size.layer_macs.get(layer.module, 0)
    weight = layer.module._parameters.get("weight")
    return CountedLayer(
        layer.name,
        layer.module,
        0 if weight is None else weight.numel(),
        macs,
        num_levels,
        None if size.latency is None else size.latency.ms_by_level(layer.name, num_levels),
    )


def _skipped_costs(selection: Selection, size: WholeNetwork, budget: Budget) -> Iterator[tuple[SkippedLayer, float]]:
    """What the layers that stay cost. Of weights that several of them share, the first one's counts."""
    seen = set()
    for layer in selection.skipped:
        counted, weight = _counted(layer, 1, size), layer.module._parameters.get("weight")
        if weight in seen:
            counted = replace(counted, weight_params=0)
        seen.add(weight)
        yield layer, budget.cost_by_level(counted, ())[0]


def removed_by(selection: Selection, states: Sequence[LayerState], size: WholeNetwork, config: SparsifyConfig) -> float:
    """Fraction of the budget that the present levels of the layers remove; 0 where copies cost more than they save."""
    budget = find_budget(config.budget)
    budgets = network_budget(selection, states, size, budget)
    levels = {layer.name: state.group_level for layer, state in zip(selection.layers, states, strict=True)}
    return max(0.0, removed_fraction(budgets, levels, budget.shuffles(size)))


def levels_for_target(
    selection: Selection, states: Sequence[LayerState], size: WholeNetwork, config: SparsifyConfig
) -> ThresholdSearch:
    """The group levels that meet the target by the kept norms, without groups that the target does not need."""
    budgets = reachable_budgets(selection, states, size, config)
    if config.levels == "threshold" and not config.counts_latency:
        return without_surplus(budgets, search_threshold(budgets, config.target), config.target)
    shuffles = find_budget(config.budget).shuffles(size)
    losses = {
        layer.name: [-math.log(max(kept, LEAST_KEPT)) for kept in layer.kept_norm[: layer.largest_level]]
        for layer in budgets
        if layer.name != EVERYTHING_ELSE
    }
    with without_solver_lines():
        levels = levels_by_loss(budgets, losses, config.target, shuffles)
    kept = (layer.kept_norm[levels[layer.name] - 1] for layer in budgets if levels.get(layer.name, 1) > 1)
    return ThresholdSearch(min(kept, default=1.0), levels, max(0.0, removed_fraction(budgets, levels, shuffles)))


@contextmanager
def without_solver_lines() -> Iterator[None]:
    """Drop what HiGHS 1.12 prints to the standard output of the process now and then, whatever its options.

    Scripts read that output. Lines of other threads pass.
    """
    with _STANDARD_OUTPUT, tempfile.TemporaryFile() as lines:
        kept = os.dup(1)
        try:
            os.dup2(lines.fileno(), 1)
            yield
        finally:
            os.dup2(kept, 1)
            os.close(kept)
            lines.seek(0)
            for line in lines:
                if not line.startswith(b"Highs"):
                    os.write(1, line)


def reachable_budgets(
    selection: Selection, states: Sequence[LayerState], size: WholeNetwork, config: SparsifyConfig
) -> list[LayerBudget]:
    """The budget of the whole network, or a `ValueError` that says why the target is out of its reach."""
    budget = find_budget(config.budget)
    budgets, shuffles = network_budget(selection, states, size, budget), budget.shuffles(size)
    with without_solver_lines() if shuffles else nullcontext():
        most = removed_fraction(budgets, cheapest_levels(budgets, shuffles), shuffles)
    if most < config.target and size.latency is not None and config.counts_latency:
        dense = size.latency.dense_ms
        raise ValueError(
            f"{(1 - config.target) * dense:.3g} ms cannot be reached: the fastest that groups make this network in "
            f"{size.latency.runtime} is {(1 - most) * dense:.3g} of {dense:.3g} ms; ask for at least "
            f"{math.ceil(1000 * (1 - most) * dense) / 1000:g} ms, a target of at most {reachable_target(most)}"
            f"{', or share channel orders (orders=one-shuffle)' * config.has_free_orders}"
        )
    if most < config.target:
        width = config.min_channels_per_group
        limit = f" with min_channels_per_group={width}" if width > 1 else ""
        remedies = ["lower the target"]
        remedies += ["lower min_channels_per_group"] if width > 1 else []
        remedies += ["lift fixed and largest levels"] if config.fixed_levels or config.largest_levels else []
        raise ValueError(
            f"target {config.target:g} cannot be reached: the most that can be removed{limit} is "
            f"{reachable_target(most)} of all {config.budget}; {' or '.join(remedies)}"
            f"{_left_out(_skipped_costs(selection, size, budget), sum(each.cost for each in budgets), config.budget)}"
        )
    return budgets


def _left_out(costs: Iterable[tuple[SkippedLayer, float]], whole: float, budget: str) -> str:
    """Why much of the network is left out, and the remedy, to end an error; empty where little is left out."""
    by_reason: dict[str, float] = defaultdict(float)
    for layer, cost in costs:
        by_reason[layer.reason] += cost / whole
    largest = sorted(by_reason.items(), key=itemgetter(1), reverse=True)[:3]
    notable = {reason: share for reason, share in largest if share > NOTABLE_SHARE}
    shares = ", ".join(f"{100 * share:.0f} % ({reason})" for reason, share in notable.items())
    return f"; of all {budget}, {shares} are left out{hint_at_types(notable)}" if notable else ""


def plan_for_target(
    selection: Selection, states: Sequence[LayerState], size: WholeNetwork, config: SparsifyConfig
) -> GroupingPlan:
    """The plan whose levels remove the target, with the orders refined for these levels."""
    found = levels_for_target(selection, states, size, config)
    plan = plan_at_levels(selection, states, size, config, found.group_levels)
    return replace(plan, min_kept_norm=found.min_kept_norm)


def orders_at_levels(
    selection: Selection,
    states: Sequence[LayerState],
    config: SparsifyConfig,
    levels: Mapping[str, int],
    *,
    importances: Sequence[FloatArray],
    solve: Solve = refined_orders,
) -> list[Orders]:
    """The orders of all layers, refined for these group levels."""
    problems = [
        LayerToOrder(layer.name, importance, state.orders, levels[layer.name])
        for layer, importance, state in zip(selection.layers, importances, states, strict=True)
    ]
    return orders_of(problems, selection.orders, config, solve=solve, penalty=level_penalty)


def plan_at_levels(
    selection: Selection,
    states: Sequence[LayerState],
    size: WholeNetwork,
    config: SparsifyConfig,
    levels: Mapping[str, int],
    *,
    importances: Sequence[FloatArray] | None = None,
    solve: Solve = refined_orders,
) -> GroupingPlan:
    """The plan with these group levels, and orders that `solve` refines for them.

    Logs a warning where they remove much more than the target: few or wide layers allow coarse steps only.
    """

    def removed(budget: Budget) -> float:
        return removed_fraction(network_budget(selection, states, size, budget), levels, budget.shuffles(size))

    if removed(find_budget(config.budget)) > config.target + NOTABLE_SURPLUS:
        logger.warning(
            "the plan removes %.1f %% of all %s where %.1f %% were asked for: the steps between the layers' group "
            "levels are coarse, and nothing nearer was found; more layers to group, or looser rules, may come nearer",
            100 * removed(find_budget(config.budget)),
            config.budget,
            100 * config.target,
        )
    planned, shared = grouping_at_levels(selection, states, config, levels, importances=importances, solve=solve)
    return GroupingPlan(
        planned,
        shared_orders=shared,
        budget=config.budget,
        target=config.target,
        removed_param_fraction=removed(PARAMS),
        removed_mac_fraction=removed(MACS) if size.macs else None,
        latency=None if size.latency is None else planned_latency(size.latency, levels),
    )


def grouping_at_levels(
    selection: Selection,
    states: Sequence[LayerState],
    config: SparsifyConfig,
    levels: Mapping[str, int],
    *,
    importances: Sequence[FloatArray] | None = None,
    solve: Solve = refined_orders,
) -> tuple[dict[str, LayerPlan], dict[str, tuple[int, ...]]]:
    """The layers of a plan with these group levels, and the orders that they share."""
    importances = importances or [importance_of(layer, config.importance) for layer in selection.layers]
    orders = orders_at_levels(selection, states, config, levels, importances=importances, solve=solve)
    return planned_layers(selection.layers, levels, orders, selection.orders)


def planned_latency(table: LatencyTable, levels: Mapping[str, int]) -> PlannedLatency:
    """What the times of the layers say about a plan with these levels."""
    return PlannedLatency(
        machine=table.machine,
        runtime=table.runtime,
        dense_ms=table.dense_ms,
        expected_ms=table.expected_ms(levels),
        layers_without_gain=table.layers_without_gain(),
    )


def kept_fraction(layers: Sequence[SelectedLayer], plan: GroupingPlan, importance: str = "l1") -> float:
    """Share of the selected layers' importance that the plan keeps."""
    kept = whole = 0.0
    for layer in layers:
        matrix, sides = importance_of(layer, importance), plan.kept_sides(layer.name)
        whole += float(matrix.sum())
        matrix = matrix if sides.outputs is None else matrix[sides.outputs]
        matrix = matrix if sides.inputs is None else matrix[:, sides.inputs]
        share = 1.0
        if layer.name in plan.layers:
            planned = plan.narrowed_layer(layer.name)
            share = float(kept_norm_by_level(matrix[planned.out_perm][:, planned.in_perm])[planned.group_level - 1])
        kept += float(matrix.sum()) * share
    return kept / whole if whole > 0 else 1.0
