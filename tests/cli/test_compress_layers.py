"""Which layers `strucspars compress` groups."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

import strucspars as ss
from strucspars.models.catalogue import build_model
from strucspars.report.contents import run_contents
from strucspars.report.reading import read_run
from strucspars.train.recipe_reading import read_recipe
from strucspars.train.run_folder import RunFolder

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


def test_narrow_layers_are_noted_in_the_summary_of_the_folder_too(call: Any, arguments: tuple[str, ...]) -> None:
    width = ("--min-channels-per-group", "8", "--target", "0.2", "--run", "runs/one-shot")
    compressed = json.loads(call(*arguments, *width).out)
    described = json.loads(call("summary", "runs/one-shot", "--model", SMALL, "--json").out)["network"]
    notes = [{row["name"]: row["note"] for row in document["rows"]} for document in (compressed, described)]
    assert notes[0] == notes[1]
    assert notes[0]["3"] == "16 x 8 channels: min_channels_per_group=8 allows one group only"


def test_commands_that_are_named_have_what_was_asked_for(call: Any, arguments: tuple[str, ...]) -> None:
    layers = ("--include", "*", "--include", "3", "--exclude", "6", "--layer-type", "Conv2d", "--layer-type", "Linear")
    options = ("--target", "0.25", "--budget", "macs", "--min-channels-per-group", "2", *layers)
    said = call(*[each for each in arguments if each != "--json"], *options, "--run", "runs/first")
    (advice,) = (line for line in said.out.splitlines() if line.startswith("strucspars run RECIPE"))
    assert shlex.split(advice)[5:] == [
        "sparsify.include=['*', '3']",
        "sparsify.exclude=['6']",
        "sparsify.layer_types=[Conv2d, Linear]",
        "sparsify.min_channels_per_group=2",
        "sparsify.target=0.25",
        "sparsify.budget=macs",
    ]
    folder = RunFolder("runs/first")
    command = shlex.split(run_contents(read_run(folder.path)).command)
    assert call(*command[1:]).status == 0
    assert Path("runs/first-again/plan.json").read_text() == Path("runs/first/plan.json").read_text()
    again = read_recipe("runs/first-again/recipe.yaml").sparsify
    assert again == read_recipe(folder.recipe_path).sparsify


@pytest.mark.parametrize("kind", ["dense", "slimming"])
def test_other_kinds_do_not_read_the_rules(kind: str, call: Any, tiny: tuple[str, ...]) -> None:
    overrides = (*tiny, "model.name=cifar-resnet8", f"kind={kind}", "slimming.target=0.2", "--quiet")
    assert call("run", "demo", *overrides, "sparsify.exclude=[nothing]").status == 0
    assert call("summary", "runs/demo").status == 0
    # And make no other run.
    assert call("run", "demo", *overrides, "sparsify.layer_types=[Linear]").status == 0
