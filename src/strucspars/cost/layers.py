"""The layers of a network before grouping and after."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from strucspars.core.plan import GroupingPlan, LayerPlan
from strucspars.nn.layers import LAYERS_WITH_CHANNELS, GroupLinear, dense_shape, forms_of, is_grouped
from strucspars.nn.names import bare_modules, under_first_names


@dataclass(frozen=True)
class BeforeAfter:
    """A number before grouping, and after.

    >>> BeforeAfter(before=400, after=100).removed_fraction
    0.75
    """

    before: int
    after: int

    @property
    def removed_fraction(self) -> float:
        """Fraction that grouping removes; 0 of nothing."""
        return (self.before - self.after) / self.before if self.before else 0.0


@dataclass(frozen=True)
class LayerSize:
    """One convolution or linear layer, before grouping and after.

    Attributes:
        module: the layer as it is now.
        weight_shape: shape of the weight before grouping.
        groups: number of groups.
        weight_params: parameters of the weight; each of them multiplies once at every output position.
        params: parameters of the whole layer, bias included.
    """

    module: nn.Module
    weight_shape: tuple[int, ...]
    groups: BeforeAfter
    weight_params: BeforeAfter
    params: BeforeAfter


def layer_sizes(model: nn.Module, plan: GroupingPlan | None = None) -> dict[str, LayerSize]:
    """Every convolution and linear layer by name; shared modules once, under their first name.

    A dense or masked layer that the plan names, by any of its names, is described as the grouped layer it would become.

    Raises:
        ValueError: a layer is lazy, or the plan belongs to another network.

    >>> layer_sizes(nn.Sequential(nn.Conv2d(8, 16, 3)))["0"].params
    BeforeAfter(before=1168, after=1168)
    """
    refuse_lazy_modules(model)
    modules = {name: module for name, module in bare_modules(model) if isinstance(module, LAYERS_WITH_CHANNELS)}
    plan = None if plan is None else under_first_names(model, plan)
    planned: Mapping[str, LayerPlan] = {} if plan is None else plan.layers
    for name in planned:
        if name in modules and forms_of(modules[name]) is None:
            raise ValueError(
                f"layer {name!r}: {type(modules[name]).__name__} cannot be grouped; leave it out of the plan"
            )
    sizes = {name: _layer_size(name, module, planned.get(name)) for name, module in modules.items()}
    if plan is not None:
        plan.check_matches({name: size.weight_shape for name, size in sizes.items()})
    return sizes


def weight_of(module: nn.Module) -> torch.Tensor:
    """The weight of a convolution or linear layer as it is now."""
    return cast(nn.Conv2d, module).weight


def network_params(model: nn.Module, sizes: Mapping[str, LayerSize]) -> BeforeAfter:
    """Parameters of the whole network, those of its layers before and after grouping; shared ones once."""
    removed = {name: size.params.before - size.params.after for name, size in sizes.items()}
    present = sum(parameter.numel() for parameter in model.parameters())
    before = present + sum(removed[name] for name, size in sizes.items() if is_grouped(size.module))
    return BeforeAfter(before, before - sum(removed.values()))


def _layer_size(name: str, module: nn.Module, layer: LayerPlan | None) -> LayerSize:
    weight = weight_of(module)
    if is_grouped(module):
        # Only these were dense once, not the network's own group convolutions.
        shape, groups = dense_shape(module, name), BeforeAfter(1, cast(nn.Conv2d, module).groups)
    else:
        is_one_group = isinstance(module, nn.Linear) and not isinstance(module, GroupLinear)
        present = 1 if is_one_group else cast(nn.Conv2d, module).groups
        shape, groups = tuple(weight.shape), BeforeAfter(present, present if layer is None else layer.num_groups)
    dense = math.prod(shape)
    weight_params = BeforeAfter(dense, dense * groups.before // groups.after)
    others = sum(parameter.numel() for parameter in module.parameters()) - weight.numel()
    params = BeforeAfter(others + weight_params.before, others + weight_params.after)
    return LayerSize(module, shape, groups, weight_params, params)


def refuse_lazy_modules(model: nn.Module) -> None:
    """Raise a `ValueError` that names the first module without a shape."""
    for name, module in bare_modules(model):
        if any(is_lazy(tensor) for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))):
            raise ValueError(f"layer {name!r}: {type(module).__name__} has no shape yet; run the model once first")
