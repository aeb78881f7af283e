"""A network of all kinds of layers, and random plans for it."""

import numpy as np
import torch
from torch import nn

import strucspars as ss
from strucspars.core.hierarchy import max_group_level
from strucspars.nn.groupable import select_layers


class Net(nn.Module):
    """Unequal widths, a residual, a bias, batch norms, strides, a grouped layer and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.expand = nn.Conv2d(16, 48, 1, bias=True)
        self.norm = nn.BatchNorm2d(48)
        self.depthwise = nn.Conv2d(48, 48, 3, padding=1, groups=48)
        self.project = nn.Conv2d(48, 16, 3, padding=1, padding_mode="circular", bias=False)
        self.reduce = nn.Conv2d(16, 32, 3, stride=2, padding=2, dilation=2)
        self.head = nn.Linear(32, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = self.stem(images).relu()
        block: torch.Tensor = self.project(self.depthwise(self.norm(self.expand(features)).relu()))
        scores: torch.Tensor = self.head(self.reduce(features + block).mean(dim=(-2, -1)))
        return scores


def random_network(seed: int = 0) -> Net:
    """Random weights, biases and batch-norm statistics: defaults would hide mistakes in order."""
    torch.manual_seed(seed)
    model = Net()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.copy_(torch.rand_like(tensor) + 0.5 if tensor.dim() == 1 else torch.randn_like(tensor) * 0.2)
    return model


def random_plan(model: nn.Module, seed: int = 0, level: int | None = None) -> ss.GroupingPlan:
    """Every groupable layer, in random orders, at a random level above 1."""
    generator = np.random.default_rng(seed)
    layers = {}
    for selected in select_layers(model).layers:
        out_channels, in_channels = selected.weight_shape[:2]
        top = max_group_level(out_channels, in_channels)
        layers[selected.name] = ss.LayerPlan(
            group_level=min(level, top) if level else int(generator.integers(2, top + 1)),
            out_perm=generator.permutation(out_channels),
            in_perm=generator.permutation(in_channels),
            weight_shape=selected.weight_shape,
        )
    assert layers
    return ss.GroupingPlan(layers)


def plan_for(model: nn.Module, *layers: str) -> ss.GroupingPlan:
    """Two groups in random orders for each of these layers."""
    generator = np.random.default_rng(3)
    shapes = {name: tuple(model.get_submodule(name).get_parameter("weight").shape) for name in layers}
    return ss.GroupingPlan(
        {
            name: ss.LayerPlan(
                group_level=2,
                out_perm=generator.permutation(shape[0]),
                in_perm=generator.permutation(shape[1]),
                weight_shape=shape,
            )
            for name, shape in shapes.items()
        }
    )


IMAGES = torch.randn(4, 3, 9, 9, generator=torch.Generator().manual_seed(1))
