import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import strucspars as ss
from strucspars.nn.names import copied


class Remembering(nn.Module):
    """Keeps what it computed, as networks with auxiliary losses do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(4, 4, 1)
        self.kept: dict[str, list[torch.Tensor]] = {}

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor = self.layer(images)
        self.kept["features"] = [features]
        return features.mean((2, 3))


def weight_normed() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the form that is going away is the one in question
        return nn.Sequential(nn.utils.weight_norm(nn.Conv2d(4, 4, 1)), nn.Conv2d(4, 4, 1))


@pytest.mark.parametrize("build", [Remembering, weight_normed])
def test_networks_that_pytorch_does_not_copy_are_copied_and_folded(build: type[nn.Module]) -> None:
    model, images = build(), torch.randn(1, 4, 3, 3)
    outputs = model(images)
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.deepcopy(model)
    twin = copied(model)
    assert torch.equal(twin(images), outputs)
    assert torch.allclose(ss.fold(model.eval(), images)(images), outputs, atol=1e-6)


@pytest.mark.parametrize("container", [list, tuple, lambda tensors: {"features": [tuple(tensors)]}])
def test_what_a_network_computed_may_be_in_a_container(container: Callable[[list[torch.Tensor]], Any]) -> None:
    model = nn.Conv2d(4, 4, 1)
    model.kept = container([model(torch.ones(1, 4, 3, 3))])
    twin = copied(model)
    assert type(twin.kept) is type(model.kept)
    assert torch.equal(twin.weight, model.weight)


def test_a_copy_shares_nothing() -> None:
    model = Remembering()
    model(torch.ones(1, 4, 3, 3))
    twin = copied(model)
    with torch.no_grad():
        twin.layer.weight.zero_()
        twin.kept["features"][0].zero_()
    assert model.layer.weight.abs().sum() > 0
    assert model.kept["features"][0].abs().sum() > 0


def test_tensors_that_several_names_hold_stay_one() -> None:
    model = Remembering()
    model(torch.ones(1, 4, 3, 3))
    model.kept["again"] = model.kept["features"]
    model.tied = model.layer
    twin = copied(model)
    assert twin.kept["again"][0] is twin.kept["features"][0]
    assert twin.tied is twin.layer
