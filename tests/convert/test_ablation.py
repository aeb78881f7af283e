import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal
from torch import nn

import strucspars as ss
from strucspars.convert.ablation import Shuffle, reordered_plan
from strucspars.convert.conversion import convert_


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
    weight, bias = model.get_parameter("0.weight"), model.get_parameter("0.bias")
    by_hand = nn.functional.conv2d(features, weight, bias, groups=4)
    by_hand = by_hand.view(2, 4, 6, 3, 3).transpose(1, 2).flatten(1, 2)
    torch.testing.assert_close(model(features), by_hand)


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


def test_an_unknown_shuffle_is_named() -> None:
    with pytest.raises(ValueError, match="shuffle must be one of shufflenet, random, no-shuffle, got 'none'"):
        reordered_plan(learned_plan(), "none")  # type: ignore[arg-type]  # the bad value is the point
