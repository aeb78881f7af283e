"""ResNets for CIFAR images, both in three stages of 16, 32 and 64 channels.

`PreactivationResNet` (He et al., 2016, identity mappings): the networks of Table 1. `CifarResNet` (He et al., 2016,
deep residual learning), whose shortcuts have no parameters: the networks that most other papers report on.
"""

import torch
from torch import nn
from torch.nn import functional

STAGE_WIDTHS = (16, 32, 64)
EXPANSION = 4


class ZeroPaddedShortcut(nn.Module):
    """Option A of He et al.: every `stride`-th pixel, and zeros for the channels that the input does not have."""

    def __init__(self, extra_channels: int, stride: int) -> None:
        super().__init__()
        self.extra_channels = extra_channels
        self.stride = stride

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """The input, smaller and with more channels."""
        return functional.pad(features[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.extra_channels))


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions, each followed by batch norm; the input is added before the last ReLU."""

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, width, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != width:
            self.shortcut = ZeroPaddedShortcut(width - in_channels, stride)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Residual block."""
        branch = self.relu(self.bn1(self.conv1(features)))
        branch = self.bn2(self.conv2(branch))
        output: torch.Tensor = self.relu(branch + self.shortcut(features))
        return output


class PreactivationBottleneck(nn.Module):
    """1 x 1, 3 x 3, 1 x 1, each after batch norm and ReLU; the input is added to the output."""

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        out_channels = EXPANSION * width
        self.bn1 = nn.BatchNorm2d(in_channels)
        self.conv1 = nn.Conv2d(in_channels, width, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn3 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, out_channels, 1, bias=False)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Residual block."""
        branch = self.conv1(self.relu(self.bn1(features)))
        branch = self.conv2(self.relu(self.bn2(branch)))
        branch = self.conv3(self.relu(self.bn3(branch)))
        output: torch.Tensor = branch + self.shortcut(features)
        return output


def _stages(block: type[nn.Module], blocks: int, expansion: int) -> list[nn.Sequential]:
    """Three stages; the first block of the second and the third halves the image."""
    in_channels, stages = STAGE_WIDTHS[0], []
    for width in STAGE_WIDTHS:
        stage = []
        for place in range(blocks):
            stage.append(block(in_channels, width, 2 if place == 0 and width > STAGE_WIDTHS[0] else 1))
            in_channels = expansion * width
        stages.append(nn.Sequential(*stage))
    return stages


def _initialise_(model: nn.Module) -> None:
    """He initialisation by fan-out, as is usual for these networks."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


class CifarResNet(nn.Module):
    """Three stages of basic blocks; the depth is 6 n + 2.

    >>> model = CifarResNet(20)
    >>> sum(parameter.numel() for parameter in model.parameters())
    269722
    >>> model(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """

    def __init__(self, depth: int, num_classes: int = 10) -> None:
        super().__init__()
        blocks, rest = divmod(depth - 2, 6)
        if rest or blocks < 1:
            raise ValueError(f"depth must be 6 n + 2, such as 20, 32, 56 or 110, got {depth}")
        self.conv1 = nn.Conv2d(3, STAGE_WIDTHS[0], 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(STAGE_WIDTHS[0])
        self.relu = nn.ReLU(inplace=True)
        self.layer1, self.layer2, self.layer3 = _stages(BasicBlock, blocks, expansion=1)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(STAGE_WIDTHS[-1], num_classes)
        _initialise_(self)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Class scores `(N, num_classes)` of images `(N, 3, 32, 32)`."""
        features = self.relu(self.bn1(self.conv1(images)))
        features = self.layer3(self.layer2(self.layer1(features)))
        scores: torch.Tensor = self.fc(self.pool(features).flatten(1))
        return scores


class PreactivationResNet(nn.Module):
    """Three stages of pre-activation bottlenecks; the depth is 9 n + 2.

    >>> sum(parameter.numel() for parameter in PreactivationResNet(20).parameters())
    219482
    """

    def __init__(self, depth: int, num_classes: int = 10) -> None:
        super().__init__()
        blocks, rest = divmod(depth - 2, 9)
        if rest or blocks < 1:
            raise ValueError(f"depth must be 9 n + 2, such as 20, 56, 110 or 164, got {depth}")
        self.conv1 = nn.Conv2d(3, STAGE_WIDTHS[0], 3, padding=1, bias=False)
        self.layer1, self.layer2, self.layer3 = _stages(PreactivationBottleneck, blocks, EXPANSION)
        self.bn = nn.BatchNorm2d(EXPANSION * STAGE_WIDTHS[-1])
        self.relu = nn.ReLU(inplace=True)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(EXPANSION * STAGE_WIDTHS[-1], num_classes)
        _initialise_(self)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Class scores `(N, num_classes)` of images `(N, 3, 32, 32)`."""
        features = self.layer3(self.layer2(self.layer1(self.conv1(images))))
        scores: torch.Tensor = self.fc(self.pool(self.relu(self.bn(features))).flatten(1))
        return scores
