"""How many groups the layers of a benched network get."""

import math

import pytest
import torch
from torch import nn

from strucspars.bench.networks import PAPER_GROUPS, conv_params, group_levels
from strucspars.core.hierarchy import num_groups
from strucspars.cost.counting import count_macs
from strucspars.models.catalogue import build_model
from strucspars.nn.groupable import select_layers

# Table 2 of the paper.
PAPER_GFLOPS = {
    ("resnet50", 0.35): 3.12,
    ("resnet50", 0.65): 1.67,
    ("resnet50", 0.85): 0.90,
    ("resnet101", 0.40): 5.05,
    ("resnet101", 0.65): 2.98,
    ("resnet101", 0.80): 1.70,
    ("densenet201", 0.38): 3.53,
    ("densenet201", 0.60): 2.10,
}


def small() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.Conv2d(16, 32, 3), nn.Conv2d(32, 32, 1), nn.Conv2d(32, 64, 1))


def removed_fraction(model: nn.Module, levels: dict[str, int]) -> float:
    shapes = {layer.name: layer.weight_shape for layer in select_layers(model).layers}
    removed = sum(math.prod(shapes[name]) * (1 - 1 / num_groups(level)) for name, level in levels.items())
    return removed / conv_params(model)


@pytest.mark.parametrize(("name", "rate"), PAPER_GFLOPS)
def test_the_tables_have_the_papers_rates_and_operations(name: str, rate: float) -> None:
    with torch.device("meta"):
        model, images = build_model(name, num_classes=1000).eval(), torch.zeros(1, 3, 224, 224)
    levels = group_levels(model, images, name=name, rate=rate)
    count = count_macs(model, images)
    macs = sum(layer.macs / num_groups(levels.get(name, 1)) for name, layer in count.layers.items())
    assert removed_fraction(model, levels) == pytest.approx(rate, abs=0.015)
    assert macs / 1e9 == pytest.approx(PAPER_GFLOPS[name, rate], rel=0.02)


def test_every_network_of_the_papers_tables_is_there() -> None:
    assert {(name, rate) for name, counts in PAPER_GROUPS.items() for rate in counts} == set(PAPER_GFLOPS)


def test_resnet50_has_the_groups_of_its_table() -> None:
    with torch.device("meta"):
        model, images = build_model("resnet50", num_classes=1000), torch.zeros(1, 3, 224, 224)
    levels = group_levels(model, images, name="resnet50", rate=0.85)
    groups = {name: num_groups(level) for name, level in levels.items()}
    assert "conv1" not in groups
    assert (groups["layer1.0.conv1"], groups["layer1.0.conv2"], groups["layer1.0.downsample.0"]) == (2, 8, 2)
    assert (groups["layer4.2.conv3"], groups["layer4.2.conv2"]) == (8, 8)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.85])
def test_the_rule_removes_as_much_as_asked_and_hardly_more(rate: float) -> None:
    model = small()
    removed = removed_fraction(model, group_levels(model, torch.zeros(1, 3, 16, 16), name="own", rate=rate))
    assert rate <= removed < rate + 0.4


def test_the_layer_that_holds_and_computes_most_is_halved_first() -> None:
    # The second layer has more weights, the first nearly all operations.
    model = nn.Sequential(nn.Conv2d(8, 32, 3, padding=1), nn.Conv2d(32, 96, 1, stride=8))
    assert group_levels(model, torch.zeros(1, 8, 16, 16), name="own", rate=0.1) == {"0": 2, "1": 1}


def test_what_is_left_of_a_halved_layer_counts_and_not_what_it_was() -> None:
    model = nn.Sequential(nn.Conv2d(32, 32, 1), nn.Conv2d(32, 24, 1))
    assert group_levels(model, torch.zeros(1, 32, 4, 4), name="own", rate=0.4) == {"0": 2, "1": 2}


def test_a_rate_that_is_reached_exactly_is_not_exceeded() -> None:
    assert group_levels(nn.Sequential(nn.Conv2d(8, 8, 1)), torch.zeros(1, 8, 4, 4), name="own", rate=0.5) == {"0": 2}


def test_convolutions_of_any_dimension_count() -> None:
    assert conv_params(nn.Sequential(nn.Conv1d(3, 8, 3), nn.ConvTranspose2d(2, 4, 2), nn.Linear(8, 2))) == 72 + 32


def test_another_rate_of_a_network_with_a_table_follows_the_rule() -> None:
    with torch.device("meta"):
        model, images = build_model("resnet50", num_classes=1000), torch.zeros(1, 3, 64, 64)
    removed = removed_fraction(model, group_levels(model, images, name="resnet50", rate=0.5))
    assert 0.5 <= removed < 0.53


def test_no_group_is_narrower_than_allowed() -> None:
    model = small()
    levels = group_levels(model, torch.zeros(1, 3, 16, 16), name="own", rate=0.5, min_channels_per_group=8)
    for layer in select_layers(model).layers:
        assert min(layer.weight_shape[:2]) // num_groups(levels.get(layer.name, 1)) >= 8


def test_a_table_gives_way_to_the_width_of_groups() -> None:
    with torch.device("meta"):
        model, images = build_model("resnet50", num_classes=1000), torch.zeros(1, 3, 64, 64)
    levels = group_levels(model, images, name="resnet50", rate=0.85, min_channels_per_group=32)
    assert num_groups(levels["layer1.0.conv2"]) == 2
    assert num_groups(levels["layer4.0.conv2"]) == 8


def test_a_rate_out_of_reach_is_an_error_that_names_the_limit() -> None:
    with pytest.raises(ValueError, match=r"rate 0\.95 cannot be reached.*0\.\d{4} of .*lower the rate"):
        group_levels(small(), torch.zeros(1, 3, 16, 16), name="own", rate=0.95, min_channels_per_group=8)


def test_a_network_without_groupable_layers_is_an_error() -> None:
    with pytest.raises(ValueError, match="cannot be reached"):
        group_levels(nn.Sequential(nn.Conv2d(3, 7, 1)), torch.zeros(1, 3, 4, 4), name="own", rate=0.5)
