"""A minimum width of groups, from the options to the plan."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

import strucspars as ss

CONFIG = ss.SparsifyConfig(
    target=0.4, epochs=8, controller="paper", lambda_step=1e-3, lambda_warmup=1 / 8, min_channels_per_group=8
)
# Odd multiples too: 24 channels can be halved three times, but into two groups of at least 8 only.
WIDTHS = (3, 8, 16, 24, 32)


def chain(*widths: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Conv2d(inputs, outputs, 1, bias=False) for inputs, outputs in pairwise(widths)))


def group_widths(plan: ss.GroupingPlan) -> list[int]:
    """Channels per group, on the narrower side, of every layer that is divided."""
    return [min(layer.weight_shape[:2]) // layer.num_groups for layer in plan.layers.values() if layer.num_groups > 1]


def reachable_fraction(model: nn.Module, width: int) -> float:
    """What can be removed at most, counted layer by layer."""
    kept = 0.0
    for parameter in model.parameters():
        level = ss.core.max_group_level(*parameter.shape[:2], min_channels_per_group=width)
        kept += parameter.numel() / ss.core.num_groups(level)
    return 1 - kept / sum(parameter.numel() for parameter in model.parameters())


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from(WIDTHS), min_size=2, max_size=5), st.sampled_from([1, 2, 8, 16]), st.floats(0, 0.95))
@example([32, 32, 16], 2, 0.94)
def test_a_plan_meets_its_target_with_wide_groups_or_the_width_is_named(
    widths: list[int], width: int, target: float
) -> None:
    model = chain(*widths)
    if target <= reachable_fraction(model, width):
        plan = ss.one_shot_plan(model, ss.SparsifyConfig(target=target, min_channels_per_group=width))
        assert plan.removed_param_fraction >= target
        assert all(found >= width for found in group_widths(plan))
        return
    named = f"min_channels_per_group={width}" if width > 1 else "cannot be reached"
    words = f"{named}|no layer of the model can be grouped: .* an odd width has one group only"
    with pytest.raises(ValueError, match=words):
        ss.one_shot_plan(model, ss.SparsifyConfig(target=target, min_channels_per_group=width))


@pytest.mark.parametrize(
    "refuse",
    [
        lambda: ss.one_shot_plan(chain(32, 32, 16), ss.SparsifyConfig(target=0.7, min_channels_per_group=16)),
        lambda: ss.Sparsifier(chain(32, 32, 16), replace(CONFIG, target=0.7, min_channels_per_group=16)),
    ],
)
def test_a_target_out_of_reach_names_the_width_what_it_allows_and_the_remedy(refuse: Callable[[], object]) -> None:
    # 1024 + 512 weights, of which 512 can go.
    complaint = (
        r"target 0\.7 cannot be reached: the most that can be removed with min_channels_per_group=16 is 0\.3333 of all "
        "params; lower the target or lower min_channels_per_group"
    )
    with pytest.raises(ValueError, match=complaint):
        refuse()
    # Either remedy works.
    assert (
        ss.one_shot_plan(
            chain(32, 32, 16), ss.SparsifyConfig(target=0.3333, min_channels_per_group=16)
        ).removed_param_fraction
        >= 0.3333
    )
    assert (
        ss.one_shot_plan(
            chain(32, 32, 16), ss.SparsifyConfig(target=0.7, min_channels_per_group=4)
        ).removed_param_fraction
        >= 0.7
    )


def test_a_target_of_macs_is_limited_by_the_width_too() -> None:
    images = torch.zeros(1, 32, 4, 4)
    config = ss.SparsifyConfig(target=0.3, budget="macs", min_channels_per_group=16)
    plan = ss.one_shot_plan(chain(32, 32, 16), config, example_inputs=images)
    assert group_widths(plan) == [16]
    with pytest.raises(ValueError, match=r"min_channels_per_group=16 is 0\.3333 of all macs"):
        ss.one_shot_plan(chain(32, 32, 16), replace(config, target=0.4), example_inputs=images)


def test_a_network_of_narrow_layers_is_refused_with_the_width() -> None:
    with pytest.raises(ValueError, match="no layer of the model can be grouped: 8 x 8 channels: min_channels_per_gr"):
        ss.Sparsifier(chain(8, 8), CONFIG)


def test_the_penalty_does_not_push_towards_groups_that_are_too_narrow() -> None:
    model = chain(16, 32, 32, 32, 8)
    with torch.no_grad():
        # Of more groups than allowed; the third layer is of none, so that the target is missed and lambda rises.
        for index, groups in ((0, 4), (1, 8)):
            weight = model.get_parameter(f"{index}.weight")
            mask = torch.arange(32)[:, None] % groups == torch.arange(weight.shape[1]) % groups
            weight.copy_(mask[..., None, None])
    free = ss.Sparsifier(model, replace(CONFIG, min_channels_per_group=1)).end_epoch()
    assert [layer.group_level for layer in free.layers] == [3, 4, 1, 1]
    sparsifier = ss.Sparsifier(model, CONFIG)
    sparsifier.end_epoch()
    report = sparsifier.end_epoch()
    assert [layer.group_level for layer in report.layers] == [2, 3, 1]
    with torch.no_grad():
        # The penalty has no direction at zero.
        for parameter in model.parameters():
            parameter.fill_(1)
    torch.autograd.backward(sparsifier.penalty())
    for index, groups in ((0, 2), (1, 4), (2, 2)):
        gradient = model.get_parameter(f"{index}.weight").grad
        assert gradient is not None
        assert (gradient == 0).float().mean().item() == 1 / groups
    # Too narrow for two groups: not penalised at all.
    assert model.get_parameter("3.weight").grad is None


def test_the_width_survives_a_state_and_another_one_is_refused() -> None:
    sparsifier = ss.Sparsifier(chain(16, 32), CONFIG)
    sparsifier.end_epoch()
    resumed = ss.Sparsifier(chain(16, 32), CONFIG)
    resumed.load_state_dict(sparsifier.state_dict())
    assert resumed.plan() == sparsifier.plan()
    assert resumed.state_dict()["config"]["min_channels_per_group"] == 8
    other = ss.Sparsifier(chain(16, 32), replace(CONFIG, min_channels_per_group=4))
    with pytest.raises(ValueError, match="saved with other options: min_channels_per_group; use the same config"):
        other.load_state_dict(sparsifier.state_dict())


@pytest.mark.parametrize("width", [0, -1, 2.0, True])
def test_a_bad_width_is_named_by_one_shot(width: int) -> None:
    with pytest.raises(ValueError, match="min_channels_per_group must be a whole number from 1 on"):
        ss.one_shot_plan(chain(16, 16), ss.SparsifyConfig(target=0.3, min_channels_per_group=width))


def test_the_width_limits_macs_by_their_own_numbers() -> None:
    # Of 16 * 1024 + 512 MACs 8192 can go, of 1024 + 512 weights 512.
    model = nn.Sequential(nn.Conv2d(32, 32, 1, bias=False), nn.AvgPool2d(4), nn.Conv2d(32, 16, 1, bias=False))
    config, images = ss.SparsifyConfig(target=0.4, budget="macs", min_channels_per_group=16), torch.zeros(1, 32, 4, 4)
    plan = ss.one_shot_plan(model, config, example_inputs=images)
    assert plan.removed_mac_fraction == pytest.approx(8192 / 16896)
    with pytest.raises(ValueError, match=r"min_channels_per_group=16 is 0\.4848 of all macs"):
        ss.one_shot_plan(model, replace(config, target=0.5), example_inputs=images)
