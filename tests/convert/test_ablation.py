from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal
from torch import nn

import strucspars as ss
from strucspars.convert.ablation import Shuffle, reordered_plan, rescale_fresh_weights_
from strucspars.convert.conversion import convert_, mask_


def learned_plan() -> ss.GroupingPlan:
    generator = np.random.default_rng(0)
    layer = ss.LayerPlan(
        group_level=3, out_perm=generator.permutation(24), in_perm=generator.permutation(8), weight_shape=(24, 8, 1, 1)
    )
    return ss.GroupingPlan({"0": layer}, target=0.5, removed_param_fraction=0.6)


def test_shufflenet_reads_inputs_in_order_and_interleaves_the_groups() -> None:
    plan = reordered_plan(learned_plan(), "shufflenet")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(8, 24, 1))
    convert_(model, plan)
    features = torch.randn(2, 8, 3, 3)
    # The rows of the weight are in the order of the outputs: the groups follow each other in turn.
    rows = model.get_parameter("0.weight").view(6, 4, 2, 1, 1).transpose(0, 1).flatten(0, 1)
    by_hand = nn.functional.conv2d(features, rows, groups=4)
    by_hand = by_hand.view(2, 4, 6, 3, 3).transpose(1, 2).flatten(1, 2)
    torch.testing.assert_close(model(features), by_hand + model.get_parameter("0.bias").view(-1, 1, 1))


def test_no_shuffle_changes_no_order() -> None:
    layer = reordered_plan(learned_plan(), "no-shuffle").layers["0"]
    assert_array_equal(layer.out_perm, np.arange(24))
    assert_array_equal(layer.in_perm, np.arange(8))


def test_random_orders_follow_the_seed() -> None:
    first, second, other = (reordered_plan(learned_plan(), "random", seed=seed) for seed in (1, 1, 2))
    assert first == second != other
    assert first.layers["0"] != learned_plan().layers["0"]


@pytest.mark.parametrize("shuffle", ["shufflenet", "random", "no-shuffle"])
def test_levels_and_fractions_stay(shuffle: Shuffle) -> None:
    plan = reordered_plan(learned_plan(), shuffle)
    assert plan.layers["0"].group_level == 3
    assert (plan.target, plan.removed_param_fraction) == (0.5, 0.6)


@pytest.mark.parametrize("shuffle", ["shufflenet", "random", "no-shuffle"])
def test_what_was_removed_is_told_but_no_norm_that_other_orders_did_not_keep(shuffle: Shuffle) -> None:
    learned = replace(learned_plan(), budget="macs", min_kept_norm=0.8, removed_mac_fraction=0.7)
    plan = reordered_plan(learned, shuffle)
    assert (plan.budget, plan.removed_mac_fraction) == ("macs", 0.7)
    assert plan.min_kept_norm is None


def test_an_unknown_shuffle_is_named() -> None:
    with pytest.raises(ValueError, match="shuffle must be one of shufflenet, random, no-shuffle, got 'none'"):
        reordered_plan(learned_plan(), "none")  # type: ignore[arg-type]  # the bad value is the point


def fresh_tower() -> nn.Sequential:
    """Ten wide layers after He: the mean square of the activations is the same all the way."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(10):
        convolution = nn.Conv2d(128, 128, 3, padding=1, padding_mode="circular")
        nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu")
        nn.init.zeros_(convolution.get_parameter("bias"))
        layers += [convolution, nn.ReLU()]
    return nn.Sequential(*layers)


def random_plan(model: nn.Module, level: int) -> ss.GroupingPlan:
    generator = np.random.default_rng(0)
    layers = {
        layer.name: ss.LayerPlan(
            group_level=level,
            out_perm=generator.permutation(layer.weight_shape[0]),
            in_perm=generator.permutation(layer.weight_shape[1]),
            weight_shape=layer.weight_shape,
        )
        for layer in ss.select_layers(model).layers
    }
    return ss.GroupingPlan(layers)


def gain(model: nn.Module) -> float:
    """Mean square of what comes out, where what goes in has 1."""
    features = torch.randn(4, 128, 6, 6, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return float(model(features).square().mean())


def test_fresh_grouped_layers_pass_signals_on_as_dense_ones_do_once_they_are_rescaled() -> None:
    dense, small, rescaled = fresh_tower(), fresh_tower(), fresh_tower()
    plan = random_plan(dense, level=3)
    convert_(small, plan)
    convert_(rescaled, plan)
    rescale_fresh_weights_(rescaled, plan)
    assert 0.5 < gain(dense) < 2
    assert 0.5 < gain(rescaled) < 2
    assert gain(small) == pytest.approx(gain(rescaled) / 4**10, rel=1e-3)


def test_rescaling_is_the_same_before_and_after_conversion_masked_and_converted() -> None:
    towers = [fresh_tower() for _ in range(3)]
    plan = random_plan(towers[0], level=2)
    before, after, masked = towers
    rescale_fresh_weights_(before, plan)
    convert_(before, plan)
    convert_(after, plan)
    rescale_fresh_weights_(after, plan)
    mask_(masked, plan)
    rescale_fresh_weights_(masked, plan)
    convert_(masked, plan)
    for other in (after, masked):
        torch.testing.assert_close(other.state_dict(), before.state_dict(), rtol=0, atol=0)


def test_rescaling_gives_the_variance_of_a_group_convolutions_own_fan_in() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(128, 128, 3), nn.Conv2d(128, 128, 3))
    plan = random_plan(model, level=4)
    first_only = ss.GroupingPlan({"0": plan.layers["0"]})
    bias, untouched = model.get_parameter("0.bias").clone(), model.get_parameter("1.weight").clone()
    rescale_fresh_weights_(model, first_only)
    own = nn.Conv2d(128, 128, 3, groups=8).weight.std()
    torch.testing.assert_close(model.get_parameter("0.weight").std(), own, rtol=0.02, atol=0)
    assert torch.equal(model.get_parameter("0.bias"), bias)
    assert torch.equal(model.get_parameter("1.weight"), untouched)


def test_rescaling_by_the_plan_of_another_network_changes_nothing() -> None:
    model = fresh_tower()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    planned = random_plan(model, level=3).layers["0"]
    with pytest.raises(ValueError, match="layer 'conv' of the plan is not in the network"):
        rescale_fresh_weights_(model, ss.GroupingPlan({"0": planned, "conv": planned}))
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
