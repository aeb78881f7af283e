"""The FLOPs of Table 1, from the paper's CIFAR networks; those of frozen batch norms."""

from collections.abc import Callable

import pytest
import timm
import torch
from timm.layers.norm_act import FrozenBatchNormAct2d, freeze_batch_norm_2d
from torch import nn
from torchvision.ops import FrozenBatchNorm2d

from strucspars.cost.counting import count_macs


class PreActivationBottleneck(nn.Module):
    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            *(nn.BatchNorm2d(in_channels), nn.ReLU(), nn.Conv2d(in_channels, channels, 1, bias=False)),
            *(nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, channels, 3, stride, 1, bias=False)),
            *(nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, 4 * channels, 1, bias=False)),
        )
        self.shortcut: nn.Module = nn.Identity()
        if in_channels != 4 * channels:
            self.shortcut = nn.Conv2d(in_channels, 4 * channels, 1, stride, bias=False)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.path(features) + self.shortcut(features)
        return output


def cifar_resnet(depth: int) -> nn.Module:
    """The paper's CIFAR network: depth 9n + 2, pre-activation bottlenecks."""
    blocks: list[nn.Module] = []
    in_channels = 16
    for channels in (16, 32, 64):
        for block in range((depth - 2) // 9):
            blocks.append(PreActivationBottleneck(in_channels, channels, 2 if block == 0 and channels > 16 else 1))
            in_channels = 4 * channels
    head = (nn.BatchNorm2d(256), nn.ReLU(), nn.AvgPool2d(8), nn.Flatten(), nn.Linear(256, 10))
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), *blocks, *head)


@pytest.mark.parametrize(
    ("depth", "params", "paper_flops"),
    [(20, 219_482, "3.53e+07"), (56, 590_426, "9.16e+07"), (110, 1_146_842, "1.759e+08")],
)
def test_paper_flops_are_those_of_table_1(depth: int, params: int, paper_flops: str) -> None:
    with torch.device("meta"):
        count = count_macs(cifar_resnet(depth), torch.empty(1, 3, 32, 32))
    assert count.params == params
    digits = len(paper_flops.split("e")[0]) - 2
    assert f"{count.paper_flops:.{digits}e}" == paper_flops
    assert f"{count.macs:.{digits}e}" != paper_flops


class ByKeyword(nn.Sequential):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        layer, norm = self
        output: torch.Tensor = norm(x=layer(input=input))
        return output


@pytest.mark.parametrize("frozen", [FrozenBatchNorm2d, FrozenBatchNormAct2d])
@pytest.mark.parametrize("network", [nn.Sequential, ByKeyword])
def test_frozen_batch_norms_count_like_others(
    frozen: Callable[[int], nn.Module], network: Callable[..., nn.Module]
) -> None:
    images = torch.zeros(2, 3, 8, 8)
    plain = count_macs(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), images)
    count = count_macs(network(nn.Conv2d(3, 4, 3), frozen(4)), images)
    assert count.batch_norm_elements == plain.batch_norm_elements == 2 * 4 * 6 * 6
    assert count.paper_flops == plain.paper_flops


def test_freezing_a_network_does_not_change_its_flops() -> None:
    images = torch.zeros(1, 3, 64, 64)
    plain, frozen = (timm.create_model("resnet18", pretrained=False) for _ in range(2))
    frozen = freeze_batch_norm_2d(frozen)  # type: ignore[no-untyped-call]  # untyped in timm
    assert not any(isinstance(module, nn.BatchNorm2d) for module in frozen.modules())
    assert count_macs(frozen, images).paper_flops == count_macs(plain, images).paper_flops
