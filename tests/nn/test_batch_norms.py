from typing import Any

import pytest
import torch
from timm.layers.norm_act import BatchNormAct2d, FrozenBatchNormAct2d
from torch import nn
from torchvision.ops import FrozenBatchNorm2d

from strucspars.nn.batch_norms import is_batch_norm, modules_after_norm


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
    others = (FrozenBatchNorm2d, FrozenBatchNormAct2d, BatchNormAct2d)
    assert (modules_after_norm(norm) is not None) == (type(norm) in others)


@pytest.mark.parametrize("module", [nn.LayerNorm(4), nn.InstanceNorm2d(4), nn.Conv2d(4, 4, 1)])
def test_other_modules_are_no_batch_norms(module: nn.Module) -> None:
    assert not is_batch_norm(module)
    assert modules_after_norm(module) is None


@pytest.mark.parametrize("kind", [FrozenBatchNormAct2d, BatchNormAct2d])
def test_what_follows_a_norm_is_called_in_the_order_of_its_library(kind: Any) -> None:
    norm = kind(4, act_layer=nn.Tanh, drop_layer=nn.Dropout)
    # The two orders differ: dropout doubles what it lets through, before or after the tanh.
    features = torch.randn(2, 4, 3, 3)
    torch.manual_seed(0)
    expected = norm(features)
    torch.manual_seed(0)
    following = modules_after_norm(norm)
    assert following is not None
    if kind is BatchNormAct2d:
        features = nn.BatchNorm2d(4)(features)
    for module in following.values():
        features = module(features)
    torch.testing.assert_close(features, expected, rtol=1e-4, atol=1e-4)
    assert modules_after_norm(FrozenBatchNorm2d(4)) == {}
