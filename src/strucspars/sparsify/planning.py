"""From kept norms to a plan: the threshold that meets the target, then the orders refined for the chosen levels."""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from strucspars.core.budget import (
    Budget,
    LayerBudget,
    ThresholdSearch,
    largest_removed_fraction,
    reachable_target,
    removed_fraction,
    search_threshold,
    without_surplus,
)
from strucspars.core.criterion import kept_norm_by_level
from strucspars.core.importance import Norm
from strucspars.core.learning import refine_at_level
from strucspars.core.plan import GroupingPlan, LayerPlan
from strucspars.cost.counting import ExampleInputs, count_macs
from strucspars.cost.layers import refuse_lazy_modules
from strucspars.nn.groupable import LayerRules, SelectedLayer, Selection, SkippedLayer, rules_for_types
from strucspars.nn.importance import importance_matrix
from strucspars.nn.layers import dense_type
from strucspars.nn.names import bare_modules
from strucspars.sparsify.config import SparsifyConfig
from strucspars.sparsify.layers import ONE_BLAS_THREAD, LayerState, layer_budget


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


logger = logging.getLogger(__name__)

# Of the whole network: the paper's tables are met within one point.
NOTABLE_SURPLUS = 0.01
# Of the whole network, in layers that are left out for the same reason.
NOTABLE_SHARE = 0.05


@dataclass(frozen=True)
class NetworkSize:
    """Parameters and multiply-accumulates of the whole network; MACs only where an input was given."""

    params: int
    macs: int
    layer_macs: Mapping[str, int]


def network_size(model: nn.Module, example_inputs: ExampleInputs | None, budget: Budget) -> NetworkSize:
    """Count the network's parameters and, given an input to run it on, its multiply-accumulates."""
    refuse_lazy_modules(model)
    params = sum(parameter.numel() for parameter in model.parameters())
    if example_inputs is None:
        if budget == "macs":
            raise ValueError("budget='macs' needs example_inputs to count the multiply-accumulates with")
        return NetworkSize(params, 0, {})
    count = count_macs(model, example_inputs)
    return NetworkSize(params, count.macs, {name: layer.macs for name, layer in count.layers.items()})


class PresentSize:
    """A model's size, counted again where the model has changed: a classifier may be replaced while others train on."""

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[SelectedLayer],
        *,
        example_inputs: ExampleInputs | None,
        budget: Budget,
    ) -> None:
        self._model, self._layers = model, tuple(layers)
        self._example_inputs, self._budget = example_inputs, budget
        self._modules = tuple(model.modules())
        self._size = network_size(model, example_inputs, budget)

    def counted(self) -> NetworkSize:
        """The size as it is now. MACs take a forward pass, so only what may change them has them counted again."""
        modules = tuple(self._model.modules())
        params = sum(parameter.numel() for parameter in self._model.parameters())
        if modules != self._modules or params != self._size.params:
            self._size = self._under_former_names(network_size(self._model, self._example_inputs, self._budget))
            self._modules = modules
        return self._size

    def _under_former_names(self, size: NetworkSize) -> NetworkSize:
        """A wrapper that came later, such as one that recomputes activations, gives layers other names."""
        names = {module: name for name, module in bare_modules(self._model)}
        macs = {layer.name: size.layer_macs.get(names[layer.module], 0) for layer in self._layers}
        return replace(size, layer_macs={**size.layer_macs, **macs})


def network_budget(
    layers: Sequence[SelectedLayer], states: Sequence[LayerState], size: NetworkSize
) -> list[LayerBudget]:
    """Every selected layer, and one entry for everything else: the denominator is the whole network."""
    budgets = [
        layer_budget(layer, state.kept_norm, size.layer_macs.get(layer.name, 0))
        for layer, state in zip(layers, states, strict=True)
    ]
    rest_params = size.params - sum(budget.params for budget in budgets)
    rest_macs = size.macs - sum(budget.macs for budget in budgets)
    return [*budgets, LayerBudget("(everything else)", rest_params, macs=rest_macs)]


def threshold_in_network(
    budgets: Sequence[LayerBudget], selection: Selection, size: NetworkSize, config: SparsifyConfig
) -> ThresholdSearch:
    """The threshold that meets the target.

    Raises:
        ValueError: the target cannot be reached; the message says what lies in layers that are left out.
    """
    try:
        return threshold_for_target(budgets, config)
    except ValueError as error:
        left_out = _left_out(selection, size, config.budget)
        if not left_out:
            raise
        raise ValueError(f"{error}; {left_out}") from error


def _left_out(selection: Selection, size: NetworkSize, budget: Budget) -> str:
    """Why much of the network is left out, and the remedy; to stand inside an error, empty where little is."""
    whole = size.params if budget == "params" else size.macs
    by_reason: Counter[str] = Counter()
    by_missing_type: Counter[type[nn.Module]] = Counter()
    for layer, cost in _costs(selection.skipped, size, budget):
        by_reason[layer.reason] += cost
        if layer.missing_type is not None:
            by_missing_type[layer.missing_type] += cost
    notable = [(reason, cost) for reason, cost in by_reason.most_common(3) if cost > NOTABLE_SHARE * whole]
    if not notable:
        return ""
    shares = ", ".join(f"{100 * cost / whole:.0f} % ({reason})" for reason, cost in notable)
    missing = {missing_type for missing_type, cost in by_missing_type.items() if cost > NOTABLE_SHARE * whole}
    present = {dense_type(layer.module) for layer in selection.layers}
    remedy = f"; more can be removed with {rules_for_types(present | missing)}" if missing else ""
    return f"of all {budget}, {shares} are left out{remedy}"


def _costs(skipped: Sequence[SkippedLayer], size: NetworkSize, budget: Budget) -> Iterator[tuple[SkippedLayer, int]]:
    """What each layer adds to the whole network; parameters that layers share count once."""
    counted: set[nn.Parameter] = set()
    for layer in skipped:
        params = set(layer.module.parameters()) - counted
        counted |= params
        macs = size.layer_macs.get(layer.name, 0)
        yield layer, macs if budget == "macs" else sum(parameter.numel() for parameter in params)


def plan_for_target(
    layers: Sequence[SelectedLayer],
    states: Sequence[LayerState],
    size: NetworkSize,
    config: SparsifyConfig,
    *,
    skipped: Sequence[SkippedLayer] = (),
) -> GroupingPlan:
    """The plan whose levels remove the target, with the orders refined for these levels.

    Logs a warning where they remove much more: few or wide layers allow coarse steps only.

    Args:
        layers: those to group.
        states: what is known about them.
        size: of the whole network.
        config: the options.
        skipped: the layers that stay, to be named where the target cannot be reached for them.
    """
    budgets = network_budget(layers, states, size)
    found = threshold_in_network(budgets, Selection(tuple(layers), tuple(skipped)), size, config)
    found = without_surplus(budgets, found, config.target, config.budget)
    if found.removed_fraction > config.target + NOTABLE_SURPLUS:
        logger.warning(
            "the plan removes %.1f %% of all %s where %.1f %% were asked for: the steps between the layers' group "
            "levels are coarse, and nothing nearer was found; more layers to group, or looser rules, may come nearer",
            100 * found.removed_fraction,
            config.budget,
            100 * config.target,
        )
    with ONE_BLAS_THREAD:
        planned = {
            layer.name: _planned_layer(layer, state, found.group_levels[layer.name], config)
            for layer, state in zip(layers, states, strict=True)
        }

    def removed(budget: Budget) -> float:
        return removed_fraction(budgets, found.group_levels, budget)

    return GroupingPlan(
        planned,
        budget=config.budget,
        target=config.target,
        min_kept_norm=found.min_kept_norm,
        removed_param_fraction=removed("params"),
        removed_mac_fraction=removed("macs") if size.macs else None,
    )


def kept_fraction(layers: Sequence[SelectedLayer], plan: GroupingPlan, norm: Norm = "l1") -> float:
    """Share of the selected layers' norm that the plan keeps."""
    kept = whole = 0.0
    for layer in layers:
        importance = importance_matrix(layer.weight, norm)
        planned = plan.layers[layer.name]
        layer_norm = float(importance.sum())
        kept_norm = kept_norm_by_level(importance[planned.out_perm][:, planned.in_perm])
        kept += layer_norm * float(kept_norm[planned.group_level - 1])
        whole += layer_norm
    return kept / whole if whole > 0 else 1.0


def _planned_layer(layer: SelectedLayer, state: LayerState, level: int, config: SparsifyConfig) -> LayerPlan:
    importance = importance_matrix(layer.weight, config.norm)
    refined = refine_at_level(importance, (state.out_perm, state.in_perm), group_level=level)
    return LayerPlan(
        group_level=level, out_perm=refined.out_perm, in_perm=refined.in_perm, weight_shape=layer.weight_shape
    )
