import copy
import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import strucspars as ss
from strucspars.models.cifar import CifarResNet, PreactivationResNet
from strucspars.train.slimming import ChannelSelection, SlimmingPenalty, norm_sites, select_channels, slim_

Network = PreactivationResNet | CifarResNet


def num_params(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def slim_params(model: Network, selection: ChannelSelection) -> int:
    return num_params(slim_(copy.deepcopy(model), selection))


def with_random_scales(model: Network, seed: int = 0) -> Network:
    torch.manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight)
    return model


def scale_norms(model: nn.Module) -> list[nn.BatchNorm2d]:
    return [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]


def test_the_penalty_adds_strength_times_sign_to_every_scale() -> None:
    model = with_random_scales(PreactivationResNet(20))
    scale_norms(model)[0].weight.data[0] = 0
    torch.autograd.backward(model(torch.randn(2, 3, 32, 32)).square().mean())
    before = {
        name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    SlimmingPenalty(model, 0.125).add_gradient_()
    norms = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.BatchNorm2d)}
    assert len(norms) == 19
    for name, parameter in model.named_parameters():
        added = 0.125 * parameter.detach().sign() if name in norms else torch.zeros_like(parameter)
        gradient = before[name]
        assert gradient is not None
        torch.testing.assert_close(parameter.grad, gradient + added)
    assert scale_norms(model)[0].weight.sign()[0] == 0


def test_missing_gradients_are_made_once() -> None:
    norm = nn.BatchNorm2d(3)
    penalty = SlimmingPenalty(nn.Sequential(norm), 0.5)
    penalty.add_gradient_()
    gradient = norm.weight.grad
    penalty.add_gradient_()
    assert gradient is not None
    assert norm.weight.grad is gradient
    assert gradient.tolist() == [1, 1, 1]
    assert norm.bias.grad is None


def test_frozen_and_shared_scales_are_treated_with_care() -> None:
    frozen, first, second = nn.BatchNorm2d(2), nn.BatchNorm2d(2), nn.BatchNorm2d(2)
    second.weight = first.weight
    frozen.weight.requires_grad_(False)
    model = nn.Sequential(frozen, first, second, nn.BatchNorm2d(2, affine=False))
    SlimmingPenalty(model, 1.0).add_gradient_()
    assert frozen.weight.grad is None
    assert first.weight.grad is not None
    assert first.weight.grad.tolist() == [1, 1]


def test_where_every_scale_is_frozen_nothing_is_penalised() -> None:
    norm = nn.BatchNorm2d(2).requires_grad_(False)
    SlimmingPenalty(norm, 1.0).add_gradient_()
    assert norm.weight.grad is None


def test_a_penalty_of_no_strength_changes_no_gradient() -> None:
    norm = nn.BatchNorm2d(2)
    SlimmingPenalty(norm, 0).add_gradient_()
    assert norm.weight.grad is not None
    assert norm.weight.grad.tolist() == [0, 0]


def test_scales_that_are_replaced_are_penalised_in_their_place() -> None:
    model = nn.Sequential(nn.BatchNorm2d(2))
    penalty = SlimmingPenalty(model, 0.5)
    model.load_state_dict(nn.Sequential(nn.BatchNorm2d(2)).state_dict(), assign=True)
    penalty.add_gradient_()
    gradient = model.get_parameter("0.weight").grad
    assert gradient is not None
    assert gradient.tolist() == [0.5, 0.5]


def test_the_penalty_drives_useless_scales_to_zero() -> None:
    norm = nn.BatchNorm2d(4)
    penalty = SlimmingPenalty(norm, 0.1)
    optimizer = torch.optim.SGD(norm.parameters(), lr=0.5)
    for _ in range(30):
        optimizer.zero_grad()
        penalty.add_gradient_()
        optimizer.step()
    assert norm.weight.abs().max() <= 0.05


def test_a_network_without_scales_is_refused() -> None:
    with pytest.raises(ValueError, match="Linear has no BatchNorm2d with a scale"):
        SlimmingPenalty(nn.Linear(2, 2), 1e-5)


@pytest.mark.parametrize("strength", [-1e-5, math.nan, math.inf, "1e-5", None, True])
def test_a_bad_strength_is_named(strength: Any) -> None:
    message = f"slimming strength must be .* got {re.escape(repr(strength))}"
    with pytest.raises(ValueError, match=message):
        SlimmingPenalty(nn.BatchNorm2d(2), strength)


@pytest.mark.parametrize("depth", [20, 56])
@pytest.mark.parametrize("target", [0.0, 0.13, 0.38, 0.6, 0.7])
def test_the_target_is_met_from_just_above(depth: int, target: float) -> None:
    model = with_random_scales(PreactivationResNet(depth))
    whole = num_params(model)
    selection = select_channels(model, target=target)
    removed = 1 - slim_params(model, selection) / whole
    assert selection.removed_param_fraction == pytest.approx(removed)
    assert target <= removed < target + 0.01
    assert num_params(slim_(model, selection)) == round(whole * (1 - removed))


@pytest.mark.parametrize(("depth", "target"), [(20, 0.5), (56, 0.9)])
def test_the_standard_networks_meet_the_target_too(depth: int, target: float) -> None:
    model = with_random_scales(CifarResNet(depth))
    selection = select_channels(model, target=target)
    slim_params = num_params(slim_(copy.deepcopy(model), selection))
    assert target <= 1 - slim_params / num_params(model) < target + 0.01


@pytest.mark.parametrize("target", [0.05, 0.3, 0.55])
def test_one_channel_less_removed_would_miss_the_target(target: float) -> None:
    model = with_random_scales(CifarResNet(8))
    whole = num_params(model)
    selection = select_channels(model, target=target)
    removed = [
        (abs(model.get_parameter(f"{name}.weight")[channel].item()), name, channel)
        for name, width in selection.widths.items()
        for channel in np.setdiff1d(np.arange(width), selection.kept[name]).tolist()
    ]
    scale, name, channel = max(removed)
    assert selection.threshold == pytest.approx(scale)
    kept = {**selection.kept, name: np.sort(np.append(selection.kept[name], channel))}
    one_less = type(selection)(kept, selection.widths)
    assert 1 - slim_params(model, one_less) / whole < target


@pytest.mark.parametrize("target", [0.05, 0.3])
def test_a_target_that_is_met_exactly_needs_no_further_channel(target: float) -> None:
    model = with_random_scales(CifarResNet(8))
    selection = select_channels(model, target=target)
    assert selection.removed_param_fraction is not None
    assert select_channels(model, target=selection.removed_param_fraction) == selection


def test_the_largest_target_leaves_one_channel_in_every_norm() -> None:
    model = with_random_scales(CifarResNet(8))
    widths = {site.norm: site.width for site in norm_sites(model)}
    least = slim_params(model, ChannelSelection({name: np.array([0]) for name in widths}, widths))
    selection = select_channels(model, target=(num_params(model) - least) / num_params(model))
    assert selection.kept_channels == len(widths)


def test_where_nothing_goes_the_threshold_is_zero() -> None:
    selection = select_channels(with_random_scales(CifarResNet(8)), target=0)
    assert (selection.removed_channel_fraction, selection.threshold) == (0, 0)


def test_one_threshold_separates_kept_from_removed() -> None:
    model = with_random_scales(PreactivationResNet(20))
    selection = select_channels(model, target=0.5)
    assert selection.threshold is not None
    for name, kept in selection.kept.items():
        scales = model.get_parameter(f"{name}.weight").detach().abs().numpy()
        assert len(kept) == 1 or (scales[kept] > selection.threshold).all()
        assert (np.delete(scales, kept) <= selection.threshold).all()


def test_the_largest_scale_of_every_norm_stays() -> None:
    model = with_random_scales(PreactivationResNet(20))
    model.get_parameter("layer2.0.bn2.weight").data.mul_(1e-6)
    selection = select_channels(model, target=0.4)
    largest = int(model.get_parameter("layer2.0.bn2.weight").abs().argmax())
    assert selection.kept["layer2.0.bn2"].tolist() == [largest]


def test_signs_of_scales_do_not_matter() -> None:
    model = with_random_scales(CifarResNet(8))
    selection = select_channels(model, target=0.4)
    for norm in scale_norms(model):
        norm.weight.data.neg_()
    assert select_channels(model, target=0.4) == selection


@pytest.mark.parametrize("network", [PreactivationResNet(20), CifarResNet(20)])
def test_scales_of_zero_everywhere_thin_all_norms_alike(network: Network) -> None:
    for norm in scale_norms(network):
        nn.init.zeros_(norm.weight)
    selection = select_channels(network, target=0.5)
    fractions = [len(kept) / selection.widths[name] for name, kept in selection.kept.items()]
    assert max(fractions) - min(fractions) <= 1 / 16
    assert selection.removed_param_fraction == pytest.approx(0.5, abs=0.01)
    assert slim_(network, selection)(torch.zeros(2, 3, 32, 32)).isfinite().all()


@pytest.mark.parametrize("network", [PreactivationResNet(20), CifarResNet(20)])
def test_an_unreachable_target_names_the_largest_that_can_be_reached(network: Network) -> None:
    with pytest.raises(ValueError, match=r"target 0.999 cannot be reached") as error:
        select_channels(network, target=0.999)
    found = re.search(r"(0\.\d{4}) of all params", str(error.value))
    assert found
    largest = float(found[1])
    selection = select_channels(network, target=largest)
    assert largest <= 1 - num_params(slim_(network, selection)) / sum(
        parameter.numel() for parameter in type(network)(20).parameters()
    )
    assert selection.kept_channels <= 1.1 * len(selection.kept)


@pytest.mark.parametrize("target", [-0.1, 1.0, math.nan, "0.5"])
def test_a_target_that_is_no_fraction_is_refused(target: Any) -> None:
    with pytest.raises(ValueError, match="target is a removed fraction"):
        select_channels(CifarResNet(8), target=target)


@pytest.mark.parametrize("scale", [math.nan, -math.inf])
def test_scales_that_are_not_finite_are_named(scale: float) -> None:
    model = CifarResNet(8)
    model.get_parameter("layer2.0.bn1.weight").data[3] = scale
    with pytest.raises(ValueError, match=r"'layer2.0.bn1' has scales that are not finite"):
        select_channels(model, target=0.5)


def test_removed_macs_are_those_of_the_slim_network() -> None:
    images = torch.zeros(1, 3, 32, 32)
    model = with_random_scales(PreactivationResNet(20))
    assert select_channels(model, target=0.4).removed_mac_fraction is None
    selection = select_channels(model, target=0.4, example_inputs=images)
    before = ss.count_macs(model, images).macs
    after = ss.count_macs(slim_(model, selection), images).macs
    assert selection.removed_mac_fraction == pytest.approx(1 - after / before)


@pytest.mark.parametrize(
    ("depth", "params_e5"), [(20, 1.91), (20, 1.36), (56, 4.15), (56, 2.33), (110, 9.24), (110, 8.15)]
)
def test_the_sizes_of_slimming_in_table_1_can_be_had(depth: int, params_e5: float) -> None:
    model = with_random_scales(PreactivationResNet(depth))
    selection = select_channels(model, target=1 - params_e5 * 1e5 / num_params(model))
    assert params_e5 * 1e5 >= slim_params(model, selection) > params_e5 * 1e5 - 0.01 * num_params(model)
    assert set(selection.kept) == {site.norm for site in norm_sites(model)}
