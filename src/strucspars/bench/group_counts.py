"""How many groups the layers of a network get when no training has chosen them.

The paper's networks have a table: groups per stage, of the 1x1 convolutions and of the wider ones. Among the counts
that never fall from stage to stage and are at least as large for wider kernels, these come nearest to the paper's rate
and GFLOPs together (Table 2). The first convolution stays dense; shortcuts and transitions count as 1x1.

Any other network or rate follows a rule: the layer that holds most is halved, again and again, until enough is gone.
"""

import math
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from torch import nn

from strucspars.core.checks import checked_target
from strucspars.core.hierarchy import num_groups
from strucspars.measure.counting import ExampleInputs, count_macs
from strucspars.nn.selection import LayerRules, SelectedLayer, select_layers

# Groups of the 1x1 convolutions, and of the wider ones, by stage.
StageCounts = tuple[tuple[int, int], ...]

PAPER_GROUPS: Mapping[str, Mapping[float, StageCounts]] = MappingProxyType(
    {
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
)
_STAGE = re.compile(r"(?:layer|denseblock|transition)([1-4])\.")


def conv_params(model: nn.Module) -> int:
    """Weights of all convolutions: what the rates of the paper's Table 2 count.

    >>> conv_params(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Linear(8, 2)))
    216
    """
    return sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.modules.conv._ConvNd))


def group_levels(
    model: nn.Module, example_inputs: ExampleInputs, *, name: str, rate: float, min_channels_per_group: int = 1
) -> dict[str, int]:
    """Group level of every groupable convolution, by name.

    Args:
        model: dense.
        example_inputs: of one image, to count multiply-accumulates with.
        name: of the network: those of the paper have tables.
        rate: fraction of the convolutions' weights to remove. A table may miss it by a point or two, the rule never
            stays below.
        min_channels_per_group: no group narrower than this. A table's counts are lowered to it, and less is removed.

    Raises:
        ValueError: the rate cannot be reached.

    >>> import torch
    >>> model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Conv2d(8, 8, 1))
    >>> group_levels(model, torch.zeros(1, 4, 8, 8), name="own", rate=0.4)
    {'0': 2, '1': 1}
    """
    checked_target(rate)
    layers = select_layers(model, LayerRules(min_channels_per_group=min_channels_per_group)).layers
    counts = PAPER_GROUPS.get(name, {}).get(rate)
    if counts is not None:
        return {layer.name: _table_level(layer, counts) for layer in layers}
    return _halved_levels(model, layers, example_inputs, rate)


def _table_level(layer: SelectedLayer, counts: StageCounts) -> int:
    stage = _STAGE.search(layer.name)
    if stage is None:
        return 1
    # Kernel area is read off the weight: layer names lie.
    is_wide = math.prod(layer.weight_shape[2:]) > 1
    wanted = counts[int(stage[1]) - 1][is_wide].bit_length()
    return min(wanted, layer.largest_level)


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
