"""`strucspars compress` with a minimum width of groups."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import strucspars as ss
from strucspars.models.catalogue import build_model
from strucspars.train.run_folder import RunFolder

SMALL = "tiny_networks:small"


@pytest.fixture
def arguments(networks: Path) -> tuple[str, ...]:
    torch.manual_seed(0)
    torch.save(build_model(SMALL, num_classes=7).state_dict(), "weights.pt")
    return ("compress", "weights.pt", "--model", SMALL, "--classes", "7", "--image-shape", "3x16x16", "--json")


def test_compress_keeps_groups_as_wide_as_asked(call: Any, arguments: tuple[str, ...]) -> None:
    # The layer of 16 x 8 channels is too narrow for two groups of 8, and is left whole.
    said = call(*arguments, "--target", "0.29", "--min-channels-per-group", "8")
    assert said.status == 0, said.err
    document = json.loads(said.out)
    assert document["min_channels_per_group"] == 8
    assert 0 < document["lost_norm"] < 1
    plan = ss.model_plan(ss.load(document["path"], build_model(SMALL, num_classes=7)))
    assert [(layer.weight_shape[:2], layer.num_groups) for layer in plan.layers.values()] == [((16, 16), 2)]
    assert plan.removed_param_fraction >= 0.29


def test_compress_has_no_minimum_width_unless_asked(call: Any, arguments: tuple[str, ...]) -> None:
    document = json.loads(call(*arguments, "--target", "0.7").out)
    assert document["min_channels_per_group"] == 1
    plan = ss.model_plan(ss.load(document["path"], build_model(SMALL, num_classes=7)))
    assert min(min(layer.weight_shape[:2]) // layer.num_groups for layer in plan.layers.values()) < 8


def test_compress_names_the_width_that_rules_out_a_target(call: Any, arguments: tuple[str, ...]) -> None:
    said = call(*arguments, "--target", "0.7", "--min-channels-per-group", "8")
    assert said.status == 2
    assert "the most that can be removed with min_channels_per_group=8 is 0." in said.err
    assert said.err.count("\n") == 1
    assert not list(Path().glob("*.safetensors"))


def test_compress_refuses_a_width_of_nothing(call: Any, arguments: tuple[str, ...]) -> None:
    said = call(*arguments, "--target", "0.3", "--min-channels-per-group", "0")
    assert said.status == 2
    assert "min-channels-per-group" in said.err


def test_a_run_keeps_the_width_of_its_recipe(call: Any, tiny: tuple[str, ...]) -> None:
    width = ("sparsify.min_channels_per_group=8", "sparsify.target=0.25")
    said = call("run", "demo", *tiny, *width, "--quiet")
    assert said.status == 0, said.err
    plan = RunFolder("runs/demo").load_plan()
    assert plan is not None
    assert {name: layer.num_groups for name, layer in plan.layers.items()} == {"6": 2}
