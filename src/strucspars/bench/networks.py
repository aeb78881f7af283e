"""The networks that the bench times: dense, compressed, and compressed without any shuffle.

Speed does not depend on the values of weights, so nothing is trained: weights and statistics of the batch norms are
random. So are channel orders, the hardest case for folding, unless trained weights are given to learn them from.
"""

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from strucspars.convert.compress import recalibrate_
from strucspars.convert.conversion import convert_
from strucspars.core.hierarchy import num_groups
from strucspars.core.plan import GroupingPlan, LayerPlan
from strucspars.core.shared_orders import NetworkOrders, joined_order
from strucspars.cost.counting import ExampleInputs, count_macs
from strucspars.models.catalogue import build_model
from strucspars.nn.groupable import LayerRules, SelectedLayer, Selection, select_layers
from strucspars.nn.layers import channel_orders, is_grouped
from strucspars.nn.names import copied
from strucspars.sparsify.config import SparsifyConfig
from strucspars.sparsify.extensions import DEFAULT_ORDERS, importance_of
from strucspars.sparsify.orders import planned_layers, with_network_orders
from strucspars.sparsify.planning import learned_states, orders_at_levels

ImageShape = tuple[int, int, int]
BenchForm = Literal["dense", "compressed", "bound"]
Model = TypeVar("Model", bound=nn.Module)

# A batch norm needs more than one value per channel, also where the image has shrunk to one pixel.
_IMAGES_FOR_STATISTICS = 2

# Groups of the 1x1 convolutions and of the wider ones, for each of the four stages.
StageCounts = tuple[tuple[int, int], ...]

PAPER_GROUPS: Mapping[str, Mapping[float, StageCounts]] = {
    "resnet50": {
        0.35: ((1, 1), (1, 2), (1, 4), (1, 4)),
        0.65: ((2, 2), (2, 4), (2, 4), (2, 8)),
        0.85: ((2, 8), (4, 8), (4, 8), (8, 8)),
    },
    "resnet101": {
        0.40: ((1, 2), (1, 4), (1, 4), (1, 8)),
        0.65: ((2, 4), (2, 4), (2, 4), (2, 8)),
        0.80: ((2, 4), (4, 8), (4, 8), (4, 8)),
    },
    "densenet201": {
        0.38: ((1, 1), (1, 4), (1, 4), (4, 4)),
        0.60: ((2, 2), (2, 2), (2, 2), (4, 8)),
    },
}
_STAGE = re.compile(r"(?:layer|denseblock|transition)([1-4])\.")


def conv_params(model: nn.Module) -> int:
    """Weights of all convolutions: what the rates of the paper's Table 2 count."""
    return sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.modules.conv._ConvNd))


def group_levels(
    model: nn.Module, example_inputs: ExampleInputs, *, name: str, rate: float, min_channels_per_group: int = 1
) -> dict[str, int]:
    """Group level of every groupable convolution that removes this rate of the convolutions' weights, by name.

    The networks of the paper have tables for its rates, which may miss a rate by a point or two, and are lowered to
    `min_channels_per_group`; then less is removed. The rule for all other networks never removes less than the rate.
    """
    layers = select_layers(model, LayerRules(min_channels_per_group=min_channels_per_group)).layers
    table = PAPER_GROUPS.get(name, {}).get(rate)
    if table is None:
        return _halved_levels(model, layers, example_inputs, rate)
    levels = {}
    for layer in layers:
        stage = _STAGE.search(layer.name)
        # Kernel area is read off the weight: layer names lie.
        is_wide = math.prod(layer.weight_shape[2:]) > 1
        wanted = 1 if stage is None else table[int(stage[1]) - 1][is_wide].bit_length()
        levels[layer.name] = min(wanted, layer.largest_level)
    return levels


def _halved_levels(
    model: nn.Module, layers: Sequence[SelectedLayer], example_inputs: ExampleInputs, rate: float
) -> dict[str, int]:
    """Halve the layer with the largest share of parameters and MACs together until the rate is reached."""
    whole, count = conv_params(model), count_macs(model, example_inputs)
    params = {layer.name: math.prod(layer.weight_shape) for layer in layers}
    share = {name: params[name] / whole + count.layers[name].macs / max(count.macs, 1) for name in params}
    levels = dict.fromkeys(params, 1)
    removed = 0.0
    while removed < rate:
        open_layers = [layer.name for layer in layers if levels[layer.name] < layer.largest_level]
        if not open_layers:
            raise ValueError(
                f"rate {rate:g} cannot be reached: with every layer at its largest level, {removed:.4f} of the "
                "convolutions' weights would be removed; lower the rate or min_channels_per_group"
            )
        largest = max(open_layers, key=lambda name: share[name] / num_groups(levels[name]))
        removed += params[largest] / num_groups(levels[largest] + 1) / whole
        levels[largest] += 1
    return levels


@dataclass(frozen=True, kw_only=True, eq=False)
class BenchNetwork:
    """One network to time; `rate` is None for the dense one, `orders` for one that no policy of the bench ordered.

    The form `bound` is the compressed one with all channel orders the identity. That is another function, not usable as
    a network: it shows the gain of removing every gather.
    """

    rate: float | None
    form: BenchForm
    model: nn.Module
    orders: str | None = None


def random_networks(
    name: str,
    rates: Sequence[float],
    *,
    image_shape: ImageShape = (3, 224, 224),
    num_classes: int = 1000,
    min_channels_per_group: int = 1,
    orders: Sequence[str] = (DEFAULT_ORDERS,),
    pieces: int = 1,
    seed: int = 0,
) -> list[BenchNetwork]:
    """A network by name with random weights, dense and at every rate (`group_levels`) with every order policy."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        dense = build_model(name, num_classes=num_classes, image_shape=image_shape).eval()
    example = torch.zeros(1, *image_shape)
    selections = {policy: _selection(dense, policy, pieces, example) for policy in orders}

    def plan(levels: Mapping[str, int], policy: str) -> GroupingPlan:
        selection = selections[policy]
        return random_plan(selection.layers, levels, selection.orders, seed=seed)

    levels = _levels_by_rate(dense, example, name, rates, min_channels_per_group)
    return _dense_and_planned(dense, levels, orders, plan, image_shape, seed=seed)


def trained_networks(
    dense: nn.Module,
    name: str,
    rates: Sequence[float],
    *,
    image_shape: ImageShape,
    min_channels_per_group: int = 1,
    orders: Sequence[str] = (DEFAULT_ORDERS,),
    seed: int = 0,
) -> list[BenchNetwork]:
    """The same of a network with trained weights, with channel orders learned from them."""
    example = torch.zeros(1, *image_shape)
    selections = {policy: _selection(dense.eval(), policy, 1, example) for policy in orders}
    states = {
        policy: learned_states(selection.layers, SparsifyConfig(), None, network=selection.orders)
        for policy, selection in selections.items()
    }

    def plan(levels: Mapping[str, int], policy: str) -> GroupingPlan:
        selection, config = selections[policy], SparsifyConfig()
        levels = {layer.name: levels.get(layer.name, 1) for layer in selection.layers}
        importances = [importance_of(layer, config.importance) for layer in selection.layers]
        learned = orders_at_levels(selection, states[policy], config, levels, importances=importances)
        layers, shared = planned_layers(selection.layers, levels, learned, selection.orders)
        return GroupingPlan(layers, shared_orders=shared)

    levels = _levels_by_rate(dense, example, name, rates, min_channels_per_group)
    return _dense_and_planned(dense, levels, orders, plan, image_shape, seed=seed)


def _levels_by_rate(
    dense: nn.Module, example: torch.Tensor, name: str, rates: Sequence[float], min_channels_per_group: int
) -> dict[float, dict[str, int]]:
    # Of all rates at once, so that one out of reach fails before the slow part.
    return {
        rate: group_levels(dense, example, name=name, rate=rate, min_channels_per_group=min_channels_per_group)
        for rate in rates
    }


def _dense_and_planned(
    dense: nn.Module,
    levels: Mapping[float, Mapping[str, int]],
    orders: Sequence[str],
    plan: Callable[[Mapping[str, int], str], GroupingPlan],
    image_shape: ImageShape,
    *,
    seed: int,
) -> list[BenchNetwork]:
    """The dense network, and a copy for every rate and order policy with its plan, all with random batch norms."""
    networks = [BenchNetwork(rate=None, form="dense", model=with_random_norms(copied(dense), image_shape, seed=seed))]
    for rate, policy in itertools.product(levels, orders):
        model = convert_(copied(dense), plan(levels[rate], policy))
        found = _with_bound(with_random_norms(model, image_shape, seed=seed), rate, policy)
        # The bound is the same for all policies.
        networks += found if policy == orders[-1] else found[:1]
    return networks


def networks_of_run(dense: nn.Module, compressed: nn.Module, image_shape: ImageShape) -> list[BenchNetwork]:
    """A trained network beside the dense one it was made from; alone if it is dense. Its rate is what it removed."""
    whole = conv_params(dense)
    if conv_params(compressed) == whole and not any(is_grouped(module) for module in compressed.modules()):
        return [BenchNetwork(rate=None, form="dense", model=compressed.eval())]
    random_dense = with_random_norms(dense.eval(), image_shape, seed=0)
    rate = round(1 - conv_params(compressed) / whole, 4)
    return [BenchNetwork(rate=None, form="dense", model=random_dense), *_with_bound(compressed.eval(), rate, None)]


def with_random_norms(model: Model, image_shape: ImageShape, *, seed: int) -> Model:
    """Give the batch norms of a model random parameters, and the statistics of random images, in place.

    Arbitrary statistics would let activations grow or vanish over the layers: numbers so small that processors slow
    down, and rounding errors that hide a real difference.
    """
    generator = torch.Generator().manual_seed(seed)
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm) and module.running_var is not None]
    with torch.no_grad():
        for norm in norms:
            if norm.weight is not None and norm.bias is not None:
                norm.weight.uniform_(0.5, 1.5, generator=generator)
                norm.bias.normal_(0, 0.3, generator=generator)
        recalibrate_(model, [torch.randn(_IMAGES_FOR_STATISTICS, *image_shape, generator=generator)])
        for norm in norms:
            assert norm.running_var is not None
            # A channel that is always zero would be divided by almost zero.
            norm.running_var.clamp_(min=1e-2)
    return model


def _selection(model: nn.Module, policy: str, pieces: int, example_inputs: ExampleInputs) -> Selection:
    """All layers that can be grouped, with the orders that they share by a policy."""
    config = SparsifyConfig(orders=policy, pieces=pieces)
    return with_network_orders(select_layers(model), model, config, example_inputs)


def random_plan(
    groupable: Sequence[SelectedLayer], levels: Mapping[str, int], network: NetworkOrders | None, *, seed: int
) -> GroupingPlan:
    """Levels of layers with random channel orders, shared where the network's are."""
    random = np.random.default_rng(seed)
    shared = {}
    if network is not None:
        shared = {name: random.permutation(width) for name, width in network.widths.items()}
        for family in network.in_pieces:
            pieces_of_first = shared[family.names[0]].reshape(-1, family.piece)
            shared |= {name: random.permutation(pieces_of_first).ravel() for name in family.names[1:]}
        shared |= {name: np.arange(network.widths[name]) for name in network.fixed}
    layers = {}
    for layer in groupable:
        if network is None:
            perms = [random.permutation(width) for width in layer.weight_shape[:2]]
        else:
            perms = [joined_order(names, shared) for names in network.sides[layer.name]]
        if levels.get(layer.name, 1) > 1:
            layers[layer.name] = LayerPlan(
                group_level=levels[layer.name], out_perm=perms[0], in_perm=perms[1], weight_shape=layer.weight_shape
            )
    return GroupingPlan(layers)


def _with_bound(model: nn.Module, rate: float, orders: str | None) -> list[BenchNetwork]:
    """A compressed network; if it has shuffles, also a copy with the identity for all channel orders."""
    networks = [BenchNetwork(rate=rate, form="compressed", model=model, orders=orders)]
    if any(is_grouped(module) for module in model.modules()):
        bound = copied(model)
        for module in filter(is_grouped, bound.modules()):
            for order in channel_orders(module).values():
                order.copy_(torch.arange(len(order)))
        networks.append(BenchNetwork(rate=rate, form="bound", model=bound))
    return networks
