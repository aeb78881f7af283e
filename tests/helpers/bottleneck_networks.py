"""Small residual networks of bottleneck blocks, grouped in random orders, with every kind of seam between blocks."""

import torch
from random_networks import random_scales_
from torch import nn
from torch.nn import functional

import strucspars as ss
from strucspars.bench.networks import random_plan
from strucspars.nn.groupable import select_layers
from strucspars.sparsify.config import SparsifyConfig
from strucspars.sparsify.orders import with_network_orders

IMAGE = (3, 17, 17)


class Bottleneck(nn.Module):
    """Two 1x1 convolutions around a 3x3 one; additions and activations as networks of several libraries write them."""

    def __init__(self, in_channels: int, out_channels: int, stride: int, style: int) -> None:
        super().__init__()
        narrow = out_channels // 4
        self.style = style
        self.conv1 = nn.Conv2d(in_channels, narrow, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(narrow)
        self.conv2 = nn.Conv2d(narrow, narrow, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(narrow)
        self.conv3 = nn.Conv2d(narrow, out_channels, 1)
        self.bn3 = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU(inplace=style % 2 == 0)
        self.downsample: nn.Module = nn.Identity()
        if stride > 1 or in_channels != out_channels:
            conv = nn.Conv2d(in_channels, out_channels, 1, stride, bias=False)
            self.downsample = nn.Sequential(conv, nn.BatchNorm2d(out_channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = functional.relu(self.bn2(self.conv2(y))) if self.style == 1 else self.bn2(self.conv2(y)).relu_()
        y = self.bn3(self.conv3(y))
        if self.style == 0:
            y += self.downsample(x)
        elif self.style == 1:
            y = self.downsample(x) + y
        else:
            y = torch.add(y, self.downsample(x))
        relu: torch.Tensor = self.relu(y)
        return relu


def bottleneck_network(width: int = 64) -> nn.Sequential:
    """A stem with pooling, four blocks of two widths, and a classifier; random norms."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 5, 2, 2, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
        Bottleneck(16, width, 1, 0),
        Bottleneck(width, width, 1, 1),
        Bottleneck(width, 2 * width, 2, 2),
        Bottleneck(2 * width, 2 * width, 1, 0),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * width, 10),
    )
    random_scales_(model)
    return model.eval()


def grouped_bottleneck_network(orders: str, *, level: int = 2, pieces: int = 1) -> nn.Sequential:
    """The same with all its layers grouped, in random orders of a policy."""
    model = bottleneck_network()
    config = SparsifyConfig(orders=orders, pieces=pieces)
    example = torch.randn(1, *IMAGE, generator=torch.Generator().manual_seed(0))
    selection = with_network_orders(select_layers(model), model, config, example)
    levels = {layer.name: min(level, layer.largest_level) for layer in selection.layers}
    ss.convert_(model, random_plan(selection.layers, levels, selection.orders, seed=0))
    return model
