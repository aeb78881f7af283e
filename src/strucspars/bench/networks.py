"""What the bench runs: a network dense, compressed, and compressed without any shuffle.

Speed does not depend on the weights' values, so that nothing has to be trained: weights, statistics of the batch norms
and channel orders are random. Random orders are the hardest case for folding.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
import torch
from torch import nn

from strucspars.bench.group_counts import conv_params, group_levels
from strucspars.convert.conversion import convert_
from strucspars.core.plan import GroupingPlan, LayerPlan
from strucspars.measure.counting import undisturbed
from strucspars.models.catalogue import build_model
from strucspars.nn.copying import copied
from strucspars.nn.selection import select_layers
from strucspars.nn.shuffled import channel_orders, is_grouped

ImageShape = tuple[int, int, int]
Form = Literal["dense", "compressed", "bound"]
Model = TypeVar("Model", bound=nn.Module)

# A batch norm needs more than one value per channel, also where the image has shrunk to one pixel.
_IMAGES_FOR_STATISTICS = 2
_BATCH_NORMS = nn.modules.batchnorm._BatchNorm


@dataclass(frozen=True, kw_only=True, eq=False)
class BenchNetwork:
    """One network to time.

    Attributes:
        rate: fraction of the convolutions' weights that was to go; None for the dense one.
        form: `dense`; `compressed`; or `bound`, the compressed one with all channel orders the identity. That is
            another function, and no network anyone would use: it shows what no gather at all would bring.
        model: in eval mode.
        removed_conv_fraction: fraction of the convolutions' weights that is gone.
    """

    rate: float | None
    form: Form
    model: nn.Module
    removed_conv_fraction: float


def random_networks(
    name: str,
    rates: Sequence[float],
    *,
    image_shape: ImageShape = (3, 224, 224),
    num_classes: int = 1000,
    min_channels_per_group: int = 1,
    seed: int = 0,
) -> list[BenchNetwork]:
    """A network by name with random weights, dense and at every rate.

    Args:
        name: as in `build_model`.
        rates: fractions of the convolutions' weights to remove; `group_levels` says how.
        image_shape: channels, height and width.
        num_classes: outputs.
        min_channels_per_group: no group narrower than this.
        seed: of weights, statistics and orders.

    Raises:
        ValueError: there is no such network, or a rate cannot be reached.

    >>> networks = random_networks("cifar-resnet8", [0.5], image_shape=(3, 32, 32), num_classes=10)
    >>> [(network.form, network.rate) for network in networks]
    [('dense', None), ('compressed', 0.5), ('bound', 0.5)]
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        dense = build_model(name, num_classes=num_classes, image_shape=image_shape).eval()
    example = torch.zeros(1, *image_shape)
    all_levels = [
        group_levels(dense, example, name=name, rate=rate, min_channels_per_group=min_channels_per_group)
        for rate in rates
    ]
    compressed = [
        with_random_norms(convert_(copied(dense), _random_plan(dense, levels, seed)), image_shape, seed=seed)
        for levels in all_levels
    ]
    networks = [_dense_network(with_random_norms(dense, image_shape, seed=seed))]
    for rate, model in zip(rates, compressed, strict=True):
        networks += _with_bound(model, conv_params(dense), rate=rate)
    return networks


def networks_of_run(dense: nn.Module, compressed: nn.Module, image_shape: ImageShape) -> list[BenchNetwork]:
    """A trained network beside the dense one that it was made from; alone if it is dense itself.

    Args:
        dense: with any weights.
        compressed: the same network, converted, slimmed or still dense; its rate is what it has removed.
        image_shape: channels, height and width.
    """
    whole = conv_params(dense)
    if conv_params(compressed) == whole and not any(is_grouped(module) for module in compressed.modules()):
        return [_dense_network(compressed.eval())]
    removed = 1 - conv_params(compressed) / whole
    return [
        _dense_network(with_random_norms(dense.eval(), image_shape, seed=0)),
        *_with_bound(compressed.eval(), whole, rate=round(removed, 4)),
    ]


def without_shuffles(model: Model) -> Model:
    """A copy whose channel orders are all the identity: same sizes, no gathers, another function.

    >>> import strucspars as ss
    >>> layer = ss.ShuffledGroupConv2d(4, 4, 1, groups=2)
    >>> layer.in_perm.copy_(torch.tensor([2, 0, 1, 3]))
    tensor([2, 0, 1, 3])
    >>> without_shuffles(layer).in_perm
    tensor([0, 1, 2, 3])
    """
    twin = copied(model)
    for module in twin.modules():
        if is_grouped(module):
            for order in channel_orders(module).values():
                order.copy_(torch.arange(len(order)))
    return twin


def with_random_norms(model: Model, image_shape: ImageShape, *, seed: int) -> Model:
    """Give the batch norms of a model random parameters, and statistics near those of random images, in place.

    Statistics from nowhere would let activations grow or vanish over the layers: numbers so small that processors
    slow down, and rounding errors that hide a real difference.
    """
    generator = torch.Generator().manual_seed(seed)
    norms = [
        module for module in model.modules() if isinstance(module, _BATCH_NORMS) and module.running_var is not None
    ]
    with undisturbed(model):
        for norm in norms:
            if norm.weight is not None and norm.bias is not None:
                norm.weight.copy_(torch.empty_like(norm.weight).uniform_(0.5, 1.5, generator=generator))
                norm.bias.copy_(torch.empty_like(norm.bias).normal_(0, 0.3, generator=generator))
        _take_statistics_(model, norms, torch.randn(_IMAGES_FOR_STATISTICS, *image_shape, generator=generator))
        for norm in norms:
            assert norm.running_mean is not None
            assert norm.running_var is not None
            norm.running_mean.add_(torch.empty_like(norm.running_mean).normal_(0, 0.1, generator=generator))
            norm.running_var.mul_(torch.empty_like(norm.running_var).uniform_(0.8, 1.25, generator=generator))
            # A channel that is always zero would be divided by next to nothing.
            norm.running_var.clamp_(min=1e-2)
    return model


def _take_statistics_(model: nn.Module, norms: Sequence[_BATCH_NORMS], images: torch.Tensor) -> None:
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.training, norm.momentum = True, 1.0
    try:
        model(images)
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.training, norm.momentum = False, momentum


def _random_plan(model: nn.Module, levels: dict[str, int], seed: int) -> GroupingPlan:
    random = np.random.default_rng(seed)
    layers = {}
    for layer in select_layers(model).layers:
        if levels.get(layer.name, 1) > 1:
            out_channels, in_channels = layer.weight_shape[:2]
            layers[layer.name] = LayerPlan(
                group_level=levels[layer.name],
                out_perm=random.permutation(out_channels),
                in_perm=random.permutation(in_channels),
                weight_shape=layer.weight_shape,
            )
    return GroupingPlan(layers)


def _dense_network(model: nn.Module) -> BenchNetwork:
    return BenchNetwork(rate=None, form="dense", model=model, removed_conv_fraction=0.0)


def _with_bound(model: nn.Module, dense_conv_params: int, *, rate: float) -> list[BenchNetwork]:
    """A compressed network, and its bound where it has shuffles at all."""
    removed = 1 - conv_params(model) / dense_conv_params
    forms: list[tuple[Form, nn.Module]] = [("compressed", model)]
    if any(is_grouped(module) for module in model.modules()):
        forms.append(("bound", without_shuffles(model)))
    return [BenchNetwork(rate=rate, form=form, model=each, removed_conv_fraction=removed) for form, each in forms]
