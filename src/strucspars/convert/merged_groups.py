"""Merge narrow groups into wider ones with zeros between them.

The function stays exactly the same at the cost of more multiply-accumulates. Runtimes that are slow on narrow groups
become faster nevertheless.
"""

from collections.abc import Iterable
from typing import cast

import torch
from torch import nn

from strucspars.channels.tracing import has_plain_forward
from strucspars.cost.counting import BeforeAfter
from strucspars.cost.gathers import WidenedLayer
from strucspars.nn.groupable import is_plain
from strucspars.nn.layers import (
    DENSE_AND_GROUPED_TYPES,
    channel_orders,
    channels,
    forms_of,
    groups_of_weight,
    is_grouped,
    like_memory_format,
)


def wide_enough_groups(num_groups: int, narrower_side: int, widen_groups_below: int) -> int:
    """The largest divisor of the number of groups that makes them wide enough; one if none does."""
    fitting = (groups for groups in range(num_groups, 1, -1) if num_groups % groups == 0)
    return next((groups for groups in fitting if narrower_side // groups >= widen_groups_below), 1)


def merged_weight(weight: torch.Tensor, num_groups: int, merged_groups: int) -> torch.Tensor:
    """The weight `(C_out, C_in / G', *kernel)` of fewer groups G' in place of `(C_out, C_in / G, *kernel)`."""
    together = num_groups // merged_groups
    out_width, in_width, *kernel = weight.shape[0] // num_groups, *weight.shape[1:]
    blocks = weight.reshape(merged_groups, together, out_width, in_width, *kernel)
    merged = weight.new_zeros(merged_groups, together, out_width, together, in_width, *kernel)
    for place in range(together):
        merged[:, place, :, place] = blocks[:, place]
    return like_memory_format(merged.reshape(weight.shape[0], together * in_width, *kernel), weight)


def merge_groups_(layer: nn.Module, merged_groups: int) -> None:
    """Let a layer run with fewer groups, in place. A shuffled layer that is left with one group becomes dense."""
    weight, groups = layer.get_parameter("weight").data, groups_of_weight(layer)
    if is_grouped(layer):
        orders = channel_orders(layer)
        merged = merged_weight(weight[torch.argsort(orders["out_inverse"])], groups, merged_groups)
        merged = merged[orders["out_inverse"]]
        if merged_groups == 1:
            merged = merged[:, torch.argsort(orders["in_perm"])]
    else:
        merged = merged_weight(weight, groups, merged_groups)
    # A new parameter: another layer may hold the old one.
    layer.weight = nn.Parameter(like_memory_format(merged, weight), requires_grad=False)
    cast(nn.Conv2d, layer).groups = merged_groups
    if merged_groups == 1 and is_grouped(layer):
        del layer.in_perm, layer.out_inverse
        forms = forms_of(layer)
        assert forms is not None
        layer.__class__ = forms.dense
        if isinstance(layer, nn.Linear):
            del layer.groups


def widen_groups_(model: nn.Module, names: Iterable[str], *, widen_groups_below: int) -> tuple[WidenedLayer, ...]:
    """Widen the narrow groups of the named modules, in place; returns the layers that changed.

    Depthwise convolutions stay: runtimes have fast kernels for them. So do layers with hooks that may read the weight.
    """
    widened = []
    for name in dict.fromkeys(names):
        layer = model.get_submodule(name)
        if type(layer) not in DENSE_AND_GROUPED_TYPES or not has_plain_forward(layer):
            continue
        weight, groups = layer.get_parameter("weight"), groups_of_weight(layer)
        is_depthwise = not is_grouped(layer) and weight.shape[1] == 1
        merged_groups = wide_enough_groups(groups, min(channels(layer)), widen_groups_below)
        if is_plain(weight) and not is_depthwise and merged_groups < groups:
            merge_groups_(layer, merged_groups)
            widened.append(WidenedLayer(layer=name, groups=BeforeAfter(groups, merged_groups)))
    return tuple(widened)
