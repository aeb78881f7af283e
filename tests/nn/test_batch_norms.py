import pytest
import torch
from timm.layers.norm_act import BatchNormAct2d, FrozenBatchNormAct2d
from torch import nn
from torchvision.ops import FrozenBatchNorm2d

from strucspars.nn.batch_norms import is_batch_norm, is_frozen_batch_norm


class WithActivation(FrozenBatchNorm2d):  # type: ignore[misc]  # torchvision has no types
    """More than a norm."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(super().forward(x))


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm1d(4),
        nn.SyncBatchNorm(4),
        BatchNormAct2d(4),
        FrozenBatchNorm2d(4),
        FrozenBatchNormAct2d(4),
        WithActivation(4),
    ],
)
def test_batch_norms_of_all_libraries_are_known(norm: nn.Module) -> None:
    assert is_batch_norm(norm)
    assert is_frozen_batch_norm(norm) == (type(norm) in (FrozenBatchNorm2d, FrozenBatchNormAct2d))


@pytest.mark.parametrize("module", [nn.LayerNorm(4), nn.InstanceNorm2d(4), nn.Conv2d(4, 4, 1)])
def test_other_modules_are_no_batch_norms(module: nn.Module) -> None:
    assert not is_batch_norm(module)
