"""Which layers `strucspars compress` groups."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import strucspars as ss
from strucspars.models.catalogue import build_model
from strucspars.runs.folder import RunFolder
from strucspars.training.recipe_reading import read_recipe

SMALL = "tiny_networks:small"


@pytest.fixture
def arguments(networks: Path) -> tuple[str, ...]:
    torch.manual_seed(0)
    torch.save(build_model(SMALL, num_classes=8).state_dict(), "weights.pt")
    return (
        "compress",
        "weights.pt",
        "--model",
        SMALL,
        "--classes",
        "8",
        "--image-shape",
        "3x16x16",
        "--json",
        "--force",
    )


def grouped_layers(document: dict[str, Any]) -> dict[str, int]:
    plan = ss.model_plan(ss.load(document["path"], build_model(SMALL, num_classes=8)))
    return {name: layer.num_groups for name, layer in plan.layers.items() if layer.num_groups > 1}


def test_convolutions_in_two_dimensions_are_grouped_unless_other_types_are_named(
    call: Any, arguments: tuple[str, ...]
) -> None:
    usual = json.loads(call(*arguments, "--target", "0.8").out)
    assert usual["layer_types"] == ["Conv2d"]
    assert set(grouped_layers(usual)) == {"3", "6"}
    linear = json.loads(call(*arguments, "--target", "0.02", "--layer-type", "Linear").out)
    assert linear["layer_types"] == ["Linear"]
    assert set(grouped_layers(linear)) == {"11"}


def test_layers_are_included_and_excluded_by_name(call: Any, arguments: tuple[str, ...]) -> None:
    types = ("--layer-type", "Conv2d", "--layer-type", "Linear")
    included = json.loads(call(*arguments, *types, "--target", "0.8", "--include", "6", "--include", "3").out)
    assert set(grouped_layers(included)) == {"3", "6"}
    excluded = json.loads(call(*arguments, *types, "--target", "0.02", "--exclude", "3", "--exclude", "6").out)
    assert set(grouped_layers(excluded)) == {"11"}
    assert (included["include"], excluded["exclude"]) == (["6", "3"], ["3", "6"])


def test_the_run_folder_says_which_layers_and_so_does_its_summary(call: Any, arguments: tuple[str, ...]) -> None:
    layers = ("--layer-type", "Conv2d", "--layer-type", "Linear", "--exclude", "6")
    said = call(*arguments, *layers, "--target", "0.2", "--run", "runs/one-shot")
    assert said.status == 0, said.err
    sparsify = read_recipe(RunFolder("runs/one-shot").recipe_path).sparsify
    assert (sparsify.layer_types, sparsify.include, sparsify.exclude) == (("Conv2d", "Linear"), ("*",), ("6",))
    described = json.loads(call("summary", "runs/one-shot", "--model", SMALL, "--json").out)["network"]
    for document in (json.loads(said.out), described):
        assert {row["name"]: row["note"] for row in document["rows"]} == {
            "0": "8 x 3 channels: an odd width has one group only",
            "3": "",
            "6": "excluded",
            "11": "",
        }


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--layer-type", "Linar"), "error: layer_types may hold Conv1d, Conv2d, Conv3d, Linear; got 'Linar'"),
        (("--exclude", "7*"), "error: exclude: '7*' matches no layer of the model"),
        (("--layer-type", "Linear", "--target", "0.5"), "with compress --layer-type Conv2d --layer-type Linear"),
        (("--target", "1.5"), "error: target is a removed fraction"),
    ],
)
def test_what_cannot_be_done_is_refused_in_a_line(
    options: tuple[str, ...], complaint: str, call: Any, arguments: tuple[str, ...]
) -> None:
    said = call(*arguments, "--target", "0.1", *options)
    assert said.status == 2
    assert complaint in said.err
    assert said.err.count("\n") == 1
    assert not list(Path().glob("*.safetensors"))


def test_a_run_groups_the_types_of_its_recipe(call: Any, tiny: tuple[str, ...]) -> None:
    types = ("sparsify.layer_types=[Conv2d,Linear]", "sparsify.exclude=['3']", "sparsify.target=0.5")
    said = call("run", "demo", *tiny, *types, "--quiet")
    assert said.status == 0, said.err
    plan = RunFolder("runs/demo").load_plan()
    assert plan is not None
    assert list(plan.layers) == ["6", "11"]
