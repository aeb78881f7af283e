"""What a target fails for: the layers that are left out."""

import logging
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

import strucspars as ss

CONFIG = ss.SparsifyConfig(target=0.6, epochs=8, lambda_warmup=1 / 8)


def classifier() -> nn.Sequential:
    """10 % of its weights in a convolution, 90 % in a linear layer; of the MACs, it is the other way round."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(8, 8, 1, bias=False), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 72, bias=False)
    )


@pytest.mark.parametrize(
    "refuse",
    [
        lambda: ss.one_shot_plan(classifier(), 0.6),
        lambda: ss.Sparsifier(classifier(), CONFIG),
        lambda: ss.one_shot_plan(ss.mask_(classifier(), ss.one_shot_plan(classifier(), 0.05)), 0.6),
    ],
)
def test_a_target_out_of_reach_names_what_is_left_out_and_the_types_that_help(refuse: Callable[[], object]) -> None:
    complaint = (
        r"target 0\.6 cannot be reached: .* 0\.0875 of all params; lower the target; "
        r"of all params, 90 % \(Linear is not among the types to group\) are left out; "
        r"layer_types adds types \(sparsify\.layer_types in a recipe, --layer-type of compress\)$"
    )
    with pytest.raises(ValueError, match=complaint):
        refuse()
    rules = ss.SparsifyConfig(target=0.6, layer_types=("Conv2d", "Linear"))
    assert ss.one_shot_plan(classifier(), rules).removed_param_fraction >= 0.6


def test_a_narrow_width_does_not_hide_what_is_left_out() -> None:
    with pytest.raises(ValueError, match=r"min_channels_per_group=4 is 0\.05.*; of all params, 90 % \(Linear is not"):
        ss.one_shot_plan(classifier(), ss.SparsifyConfig(target=0.6, min_channels_per_group=4))


def test_a_reason_that_no_type_removes_comes_without_the_option() -> None:
    rules = ss.SparsifyConfig(target=0.6, layer_types=("Conv2d", "Linear"), exclude=("3",))
    with pytest.raises(ValueError, match=r"lower the target; of all params, 90 % \(excluded\) are left out$"):
        ss.one_shot_plan(classifier(), rules)


def test_macs_are_left_out_by_their_own_numbers() -> None:
    images = torch.zeros(1, 8, 8, 8)
    with pytest.raises(ValueError, match=r"of all macs; lower the target; of all macs, 12 % ") as refusal:
        ss.one_shot_plan(classifier(), ss.SparsifyConfig(target=0.9, budget="macs"), example_inputs=images)
    assert "; layer_types adds types" in str(refusal.value)
    with pytest.raises(ValueError, match=r"of all macs; lower the target$"):
        ss.Sparsifier(
            classifier(), replace(CONFIG, target=0.9, budget="macs"), example_inputs=torch.zeros(1, 8, 32, 32)
        )


def test_parameters_that_layers_share_are_left_out_once() -> None:
    model = nn.Sequential(nn.Conv2d(8, 8, 1, bias=False), *(nn.Conv2d(8, 8, 1, bias=False) for _ in range(2)))
    model[2].weight = model[1].weight
    with pytest.raises(ValueError, match=r"of all params, 50 % \(its weight is shared with '2'\) are left out$"):
        ss.one_shot_plan(model, 0.9)


def test_little_that_is_left_out_is_not_mentioned() -> None:
    model = nn.Sequential(nn.Conv2d(32, 32, 3, bias=False), nn.Conv2d(32, 3, 1))
    with pytest.raises(ValueError, match=r"of all params; lower the target$"):
        ss.one_shot_plan(model, 0.99)


def test_a_type_that_would_add_little_is_not_offered() -> None:
    model = nn.Sequential(*(nn.Conv2d(32, 32, 3, bias=False) for _ in range(2)), nn.Linear(8, 8))
    with pytest.raises(ValueError, match=r"of all params, 50 % \(excluded\) are left out$"):
        ss.one_shot_plan(model, ss.SparsifyConfig(target=0.9, exclude=("1",)))


def test_a_network_of_zeros_has_no_norm_to_lose(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Conv2d(8, 8, 1, bias=False))
    nn.init.zeros_(model.get_parameter("0.weight"))
    with caplog.at_level(logging.WARNING):
        ss.one_shot_plan(model, 0.5)
    assert "loses 0.0 % of the grouped layers' norm" in caplog.text
