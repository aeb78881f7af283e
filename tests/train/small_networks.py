"""Networks and data for the tests of the pipeline, named in recipes as `small_networks:NAME`."""

import time
from dataclasses import replace

import torch
from torch import nn

from strucspars.data.catalogue import load_data
from strucspars.data.image_set import ImageSet, ResidentData
from strucspars.models.cifar import CifarResNet

CHANNELS = 16
PADDING_NUMBERS = 1_000_000
# Every network that was built in this process, in order.
built: list[nn.Module] = []


def _convolution(in_channels: int, *, stride: int = 1) -> list[nn.Module]:
    convolution = nn.Conv2d(in_channels, CHANNELS, 3, stride=stride, padding=1, bias=False)
    return [convolution, nn.BatchNorm2d(CHANNELS), nn.ReLU()]


def _head(num_classes: int, *, dropout: float = 0.0) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(dropout), nn.Linear(CHANNELS, num_classes)]


def _remembered(model: nn.Module) -> nn.Module:
    built.append(model)
    return model


def plain(num_classes: int) -> nn.Module:
    """Three convolutions with batch norm."""
    body = [*_convolution(3, stride=4), *_convolution(CHANNELS), *_convolution(CHANNELS)]
    return _remembered(nn.Sequential(*body, *_head(num_classes)))


def hard_to_repeat(num_classes: int) -> nn.Module:
    """With dropout, and a buffer that makes writing a checkpoint take a moment."""
    model = nn.Sequential(*_convolution(3, stride=4), *_convolution(CHANNELS), *_convolution(CHANNELS))
    model.extend(_head(num_classes, dropout=0.3))
    model.register_buffer("padding", torch.rand(PADDING_NUMBERS))
    return _remembered(model)


def with_dropout(num_classes: int) -> nn.Module:
    """The same function without the ballast."""
    body = [*_convolution(3, stride=4), *_convolution(CHANNELS), nn.Dropout(0.2), *_convolution(CHANNELS)]
    return _remembered(nn.Sequential(*body, *_head(num_classes, dropout=0.3)))


def without_norm(num_classes: int) -> nn.Module:
    """No batch norm: the mean gradient of two half batches is that of the whole."""
    layers: list[nn.Module] = []
    for in_channels, stride in ((3, 4), (CHANNELS, 1), (CHANNELS, 1)):
        layers += [nn.Conv2d(in_channels, CHANNELS, 3, stride=stride, padding=1), nn.ReLU()]
    return _remembered(nn.Sequential(*layers, *_head(num_classes)))


def slimmable(num_classes: int) -> nn.Module:
    """Of a type whose channels slimming knows; on small feature maps."""
    model = CifarResNet(8, num_classes)
    model.conv1.stride = (4, 4)
    return _remembered(model)


def slowly_built(num_classes: int) -> nn.Module:
    """Takes its time between its layers, while which other runs go on."""
    body = []
    for in_channels in (3, CHANNELS, CHANNELS):
        body += _convolution(in_channels, stride=2)
        time.sleep(0.15)
    return _remembered(nn.Sequential(*body, *_head(num_classes)))


class _WithUnusedLayer(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(*_convolution(3, stride=4), *_convolution(CHANNELS), *_head(num_classes))
        self.unused = nn.Conv2d(CHANNELS, CHANNELS, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.body(images)
        return scores


def with_unused_layer(num_classes: int) -> nn.Module:
    """One of its convolutions takes no part, and never has a gradient."""
    return _remembered(_WithUnusedLayer(num_classes))


def three_digits(root: str | None) -> ResidentData:
    """The digits, of which only the first three are to be learned."""
    digits = load_data("digits", None)
    assert isinstance(digits, ResidentData)
    chosen = digits.train.labels < 3
    return replace(digits, train=ImageSet(images=digits.train.images[chosen], labels=digits.train.labels[chosen]))
