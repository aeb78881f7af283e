"""Planning fewer channels and groups together: what each costs, what each loses, and one choice over both.

The loss of an option is what the norm of the layers loses, on a logarithmic scale: a layer whose outputs, inputs and
groups keep the shares a, b and c of its norm keeps about a * b * c of it.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import nn

from strucspars.core.budget import reachable_target
from strucspars.core.checks import FloatArray
from strucspars.core.hierarchy import num_groups
from strucspars.core.levels_and_widths import Choices, Conflict, Option, Product, cheapest, choose
from strucspars.core.narrowing import narrower_widths
from strucspars.core.plan import GroupingPlan
from strucspars.cost.counting import ExampleInputs, layer_sizes, network_params
from strucspars.nn.groupable import SelectedLayer, Selection
from strucspars.nn.importance import importance_matrix
from strucspars.nn.layers import LAYERS_WITH_CHANNELS, groups_of_weight
from strucspars.nn.names import bare_modules
from strucspars.prune.choice import keep_most_important, reason_beside_groups, with_kept_channels
from strucspars.prune.classes import PrunableChannels, PrunableClass, prunable_channels
from strucspars.sparsify.config import SparsifyConfig
from strucspars.sparsify.extensions import ClassMembers, WholeNetwork, find_importance, importance_of
from strucspars.sparsify.planning import LEAST_KEPT, LayerState, grouping_at_levels, without_solver_lines

# More widths of a class are thinned out: the choice gets slow, and one in so many is near enough.
MOST_WIDTHS = 8


@dataclass(frozen=True, eq=False)
class NarrowableNetwork:
    """What is known about the channels of a network before any of them goes.

    Attributes:
        channels: the classes.
        layers: all layers that write or read some of them.
        beside: norms and depthwise convolutions that they pass, by name.
        scores: importance of every channel of the classes that may lose some.
        widths: for these classes, the numbers of channels to choose from.
        reasons: why the others stay.
    """

    channels: PrunableChannels
    layers: Mapping[str, SelectedLayer]
    beside: Mapping[str, nn.Module]
    scores: Mapping[str, FloatArray]
    widths: Mapping[str, Sequence[Option]]
    reasons: Mapping[str, str]


def layers_with_channels(model: nn.Module, channels: PrunableChannels) -> dict[str, SelectedLayer]:
    """The convolutions and linear layers that write or read classes of channels; not depthwise ones."""
    return {
        name: SelectedLayer(name, module, 1)
        for name, module in bare_modules(model)
        if isinstance(module, LAYERS_WITH_CHANNELS) and name in channels.modules and channels.modules[name].inputs
    }


def pruned_layers(model: nn.Module, plan: GroupingPlan) -> list[SelectedLayer]:
    """The dense layers that a plan groups or makes narrower, but for those with groups of the network's own."""
    return [
        SelectedLayer(name, module, 1)
        for name, module in bare_modules(model)
        if isinstance(module, LAYERS_WITH_CHANNELS)
        and (name in plan.layers or name in plan.narrowed)
        and groups_of_weight(module) == 1
    ]


def narrowable_network(
    model: nn.Module, channels: PrunableChannels, layers: Mapping[str, SelectedLayer], config: SparsifyConfig
) -> NarrowableNetwork:
    """Score all channels that may go, by the importance that the options name."""
    by_layer = {name: _full_importance(layer, channels, config) for name, layer in layers.items()}
    modules = dict(bare_modules(model))
    scores, widths, reasons = {}, {}, {}
    for name, each in channels.classes.items():
        reason = reason_beside_groups(channels, name)
        if not reason and each.is_stream and config.narrow == "inside":
            reason = "it is a residual stream, which narrow='inside' protects"
        found = None if reason else _scores(each, channels, layers, by_layer, modules, config)
        if found is None:
            reasons[name] = reason or f"importance {config.importance!r} says nothing about them"
            continue
        own = [channels.own_groups[layer] for layer in (*each.writers, *each.readers) if layer in channels.own_groups]
        values = _thinned(narrower_widths(each.width, own, multiple=config.width_multiple))
        if len(values) == 1:
            reasons[name] = f"no multiple of {config.width_multiple} below {each.width} suits them"
            continue
        scores[name] = found
        widths[name] = _width_options(each, found, values, channels, by_layer)
    beside = {name: modules[name] for name, sides in channels.modules.items() if not sides.inputs}
    return NarrowableNetwork(channels, layers, beside, scores, widths, reasons)


def _full_importance(layer: SelectedLayer, channels: PrunableChannels, config: SparsifyConfig) -> FloatArray:
    """S of a layer, `(C_out, C_in)`; with groups of the network's own, zero between them, and by norm."""
    groups = channels.own_groups.get(layer.name, 1)
    if groups == 1:
        return importance_of(layer, config.importance)
    within = importance_matrix(layer.weight, find_importance(config.importance).penalty)
    out_channels, in_width = within.shape
    full = np.zeros((groups, out_channels // groups, groups, in_width))
    full[np.arange(groups), :, np.arange(groups)] = within.reshape(groups, -1, in_width)
    return full.reshape(out_channels, groups * in_width)


def _scores(
    each: PrunableClass,
    channels: PrunableChannels,
    layers: Mapping[str, SelectedLayer],
    by_layer: Mapping[str, FloatArray],
    modules: Mapping[str, nn.Module],
    config: SparsifyConfig,
) -> FloatArray | None:
    """The importance of every channel of a class; None where the importance cannot tell."""
    own_scores = find_importance(config.importance).channel_scores
    writers = {name: _places(channels, name, each.name, output=True) for name in each.writers}
    if own_scores is not None:
        members = ClassMembers(
            name=each.name,
            width=each.width,
            writers=[(layers[name], place) for name, place in writers.items()],
            norms=[(modules[name], _places(channels, name, each.name, output=True)) for name in each.norms],
        )
        found = own_scores(members)
        if found is not None and (found.shape != (each.width,) or not np.isfinite(found).all() or found.min() < 0):
            raise ValueError(
                f"channels of {each.name!r}: importance {config.importance!r} must give {each.width} finite scores "
                "that are not negative; check the weights, or the function"
            )
        return found
    return sum((by_layer[name].sum(1)[place] for name, place in writers.items()), start=np.zeros(each.width))


def _places(channels: PrunableChannels, module: str, name: str, *, output: bool) -> slice:
    """Where the channels of a class are on a side of a module, without repeats."""
    sides = channels.modules[module]
    names = sides.outputs if output else sides.inputs
    start = sum(channels.classes[other].width for other in names[: names.index(name)])
    return slice(start, start + channels.classes[name].width)


def _thinned(values: list[int]) -> list[int]:
    places = np.unique(np.linspace(0, len(values) - 1, min(MOST_WIDTHS, len(values))).round().astype(int))
    return [values[place] for place in places]


def _width_options(
    each: PrunableClass,
    scores: FloatArray,
    values: Sequence[int],
    channels: PrunableChannels,
    by_layer: Mapping[str, FloatArray],
) -> list[Option]:
    """The numbers of channels to keep, with the loss of the layers' norms if the best are kept."""
    order = np.argsort(-scores, kind="stable")
    lost = np.zeros(each.width + 1)
    for name in each.writers:
        rows = by_layer[name].sum(1)
        lost += _loss_by_width(rows[_places(channels, name, each.name, output=True)][order], float(rows.sum()))
    for name in each.readers:
        columns = by_layer[name].sum(0).reshape(-1, channels.modules[name].repeat).sum(1)
        lost += _loss_by_width(columns[_places(channels, name, each.name, output=False)][order], float(columns.sum()))
    return [Option(value=width, share=width / each.width, loss=float(lost[width])) for width in values]


def _loss_by_width(norms: FloatArray, whole: float) -> FloatArray:
    """Minus the logarithm of the share of a layer's norm that is left with the first 0, 1, 2, ... of these channels."""
    left_out = norms.sum() - np.cumsum([0.0, *norms])
    kept = 1 - left_out / whole if whole > 0 else np.ones(len(left_out))
    losses: FloatArray = -np.log(np.clip(kept, LEAST_KEPT, 1))
    return losses


def plan_with_narrowing(
    model: nn.Module,
    selection: Selection,
    states: Sequence[LayerState],
    size: WholeNetwork,
    config: SparsifyConfig,
    network: NarrowableNetwork,
    *,
    importances: Sequence[FloatArray] | None = None,
) -> GroupingPlan:
    """The plan whose groups and widths remove the target at the least loss of norm."""
    choices = narrowing_choices(selection, states, size, config, network)
    with without_solver_lines():
        chosen = choose(choices, config.target)
        least = {} if chosen is not None else cheapest(choices)
    if chosen is None:
        raise ValueError(_out_of_reach(1 - choices.cost(least) / choices.whole, config, network))
    levels = {layer.name: chosen[_groups_of(layer.name)] for layer in selection.layers}
    planned, shared = grouping_at_levels(selection, states, config, levels, importances=importances)
    widths = {name: chosen[_channels_of(name)] for name in network.widths}
    narrower = {name: width for name, width in widths.items() if width < network.channels.classes[name].width}
    kept = keep_most_important(network.channels, network.scores, narrower, planned)
    plan = with_kept_channels(GroupingPlan(planned, shared_orders=shared), network.channels, kept)
    sizes = layer_sizes(model, plan)
    removed_macs = None
    if size.macs:
        # Every weight of a layer multiplies as often as any other. In whole numbers, so that a target is met exactly.
        left = sum(
            size.layer_macs.get(each.module, 0) * each.weight_params.after // max(each.weight_params.before, 1)
            for each in sizes.values()
        )
        removed_macs = (size.macs - left) / size.macs
    params = network_params(model, sizes, plan)
    return replace(
        plan,
        budget=config.budget,
        target=config.target,
        removed_param_fraction=params.removed_fraction,
        removed_mac_fraction=removed_macs,
    )


def _groups_of(layer: str) -> str:
    return f"groups of {layer}"


def _channels_of(name: str) -> str:
    return f"channels of {name}"


def narrowing_choices(
    selection: Selection,
    states: Sequence[LayerState],
    size: WholeNetwork,
    config: SparsifyConfig,
    network: NarrowableNetwork,
) -> Choices:
    """Group levels of all layers and widths of all classes, with what they cost and which exclude each other."""
    options: dict[str, Sequence[Option]] = {}
    for layer, state in zip(selection.layers, states, strict=True):
        levels = [layer.fixed_level] if layer.fixed_level else range(1, layer.largest_level + 1)
        options[_groups_of(layer.name)] = [
            Option(
                value=level,
                share=1 / num_groups(level),
                loss=0.0 if layer.fixed_level else -math.log(max(state.kept_norm[level - 1], LEAST_KEPT)),
            )
            for level in levels
        ]
    options |= {_channels_of(name): widths for name, widths in network.widths.items()}
    products = list(_products(options, selection, size, config, network))
    whole = size.params if config.budget == "params" else size.macs or 0
    products.append(Product(whole - sum(product.cost for product in products)))
    conflicts = list(_conflicts(options, selection, config, network))
    return Choices(options=options, products=products, conflicts=conflicts)


def _products(
    options: Mapping[str, object],
    selection: Selection,
    size: WholeNetwork,
    config: SparsifyConfig,
    network: NarrowableNetwork,
) -> Iterator[Product]:
    """What the layers, norms and biases that may become smaller cost."""
    channels, counts_params = network.channels, config.budget == "params"
    selected = {layer.name: layer for layer in selection.layers}
    for name, layer in {**network.layers, **selected}.items():
        weights = layer.weight.numel()
        cost = weights if counts_params else size.layer_macs.get(layer.module, 0)
        groups = (_groups_of(name),) if name in selected else ()
        outputs, inputs = (list(_shares(each, options, channels)) for each in _both_sides(channels, name))
        for out_share, out_key in outputs:
            for in_share, in_key in inputs:
                yield Product(cost * out_share * in_share, (*groups, *out_key, *in_key))
        beside = sum(each.numel() for each in layer.module.parameters()) - weights
        if counts_params and beside:
            yield from (Product(beside * share, key) for share, key in outputs)
    for name, module in network.beside.items():
        own = sum(parameter.numel() for parameter in module.parameters(recurse=False))
        cost = own if counts_params else size.layer_macs.get(module, 0)
        for share, key in _shares(channels.modules[name].outputs, options, channels):
            yield Product(cost * share, key)


def _both_sides(channels: PrunableChannels, name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    sides = channels.modules.get(name)
    return ((), ()) if sides is None else (sides.outputs, sides.inputs)


def _shares(
    names: Sequence[str], options: Mapping[str, object], channels: PrunableChannels
) -> Iterator[tuple[float, tuple[str, ...]]]:
    """The share of a side that each of its classes has, and the choice of its width if there is one."""
    if not names:
        yield 1.0, ()
    whole = sum(channels.classes[name].width for name in names)
    for name in names:
        key = _channels_of(name)
        yield channels.classes[name].width / whole, (key,) if key in options else ()


def _conflicts(
    options: Mapping[str, Sequence[Option]], selection: Selection, config: SparsifyConfig, network: NarrowableNetwork
) -> Iterator[Conflict]:
    """Groups and widths of channels that do not go together."""
    channels, selected = network.channels, {layer.name for layer in selection.layers}
    for name, widths in network.widths.items():
        key, each = _channels_of(name), channels.classes[name]
        narrower = tuple((key, option.value) for option in widths[1:])
        sees_many = len(set(_orders_on(name, selection, network))) > 2
        for layer in dict.fromkeys((*each.writers, *each.readers)):
            if layer not in selected:
                continue
            levels = [option.value for option in options[_groups_of(layer)] if option.value > 1]
            if sees_many or reason_beside_groups(channels, name, {layer}):
                yield Conflict((*((_groups_of(layer), level) for level in levels), *narrower))
                continue
            for _, width in narrower:
                uneven = [
                    (_groups_of(layer), level)
                    for level in levels
                    if width % num_groups(level) or width // num_groups(level) < config.min_channels_per_group
                ]
                if uneven:
                    yield Conflict((*uneven, (key, width)))


def _orders_on(name: str, selection: Selection, network: NarrowableNetwork) -> Iterator[object]:
    """The orders in which layers that may have groups see a class; shared ones are equal."""
    each, shared = network.channels.classes[name], None if selection.orders is None else selection.orders.sides
    selected = {layer.name for layer in selection.layers}
    for place, layers in enumerate((each.writers, each.readers)):
        for layer in layers:
            if layer in network.channels.own_groups:
                yield "natural"
            elif layer in selected:
                yield (layer, place) if shared is None or layer not in shared else shared[layer][place]


def _out_of_reach(most: float, config: SparsifyConfig, network: NarrowableNetwork) -> str:
    """Why a target cannot be met, and what could be done."""
    remedies = ["lower the target"]
    remedies += ["set narrow='all'"] if config.narrow == "inside" else []
    remedies += ["lower width_multiple"] if config.width_multiple > 1 else []
    remedies += ["lower min_channels_per_group"] if config.min_channels_per_group > 1 else []
    widest = sorted(network.reasons.items(), key=lambda each: -network.channels.classes[each[0]].width)[:3]
    stay = "; ".join(f"channels of {name!r} stay: {reason}" for name, reason in widest)
    return (
        f"target {config.target:g} cannot be reached: the most that groups and fewer channels can remove is "
        f"{reachable_target(most)} of all {config.budget}; {' or '.join(remedies)}{f'; {stay}' if stay else ''}"
    )


def find_prunable_channels(
    model: nn.Module, config: SparsifyConfig, example_inputs: ExampleInputs | None
) -> PrunableChannels:
    """The classes of a network's channels, where the options ask for fewer of them."""
    if example_inputs is None:
        raise ValueError(
            f"narrow={config.narrow!r} needs example_inputs, to see which layers share channels; give a batch of images"
        )
    return prunable_channels(model, example_inputs)
