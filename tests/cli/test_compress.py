"""`strucspars compress`: a smaller file, of the layers that were asked for."""

import json
import os
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import strucspars as ss
from strucspars.cli.main import app
from strucspars.models.catalogue import build_model
from strucspars.nn.groupable import select_layers
from strucspars.nn.importance import importance_matrix
from strucspars.report.contents import run_contents
from strucspars.report.reading import read_run
from strucspars.train.recipe_reading import read_recipe
from strucspars.train.run_folder import RunFolder

SMALL = "tiny_networks:small"


SHAPE = ("--image-shape", "3x16x16")


@pytest.fixture
def checkpoint(networks: Path) -> Path:
    path = Path("trained.pt")
    torch.save(build_model(SMALL, num_classes=7).state_dict(), path)
    return path


def test_compress_writes_a_smaller_network_that_loads(call: Any, checkpoint: Path) -> None:
    said = call("compress", str(checkpoint), "--model", SMALL, "--classes", "7", *SHAPE, "--target", "0.5")
    assert said.status == 0
    assert "loses" in said.err
    path = Path("tiny_networks-small-compressed.safetensors")
    small = ss.load(path, build_model(SMALL, num_classes=7))
    before = sum(parameter.numel() for parameter in build_model(SMALL, num_classes=7).parameters())
    assert sum(parameter.numel() for parameter in small.parameters()) <= before / 2
    assert said.err.count("one-shot grouping") == 1


def test_compress_also_removes_channels(call: Any, checkpoint: Path) -> None:
    arguments = ("--model", SMALL, "--classes", "7", *SHAPE, "--target", "0.3", "--narrow", "all")
    said = call("compress", str(checkpoint), *arguments, "--width-multiple", "2", "--out", "a.safetensors", "--json")
    assert said.status == 0
    assert "groups and fewer channels remove" in said.err
    small = ss.load("a.safetensors", build_model(SMALL, num_classes=7))
    document = json.loads(said.out)
    assert sum(map(torch.numel, small.parameters())) == document["params"]["after"]
    assert 0 < document["lost_norm"] < 1


def test_compress_as_json_tells_what_was_lost(call: Any, checkpoint: Path) -> None:
    arguments = ("--model", SMALL, "--classes", "7", *SHAPE, "--target", "0.3", "--budget", "macs")
    document = json.loads(call("compress", str(checkpoint), *arguments, "--out", "a.safetensors", "--json").out)
    assert 0 < document["lost_norm"] < 1
    assert 1 - document["macs"]["after"] / document["macs"]["before"] >= 0.3
    assert document["path"] == "a.safetensors"


def test_compress_does_not_overwrite(call: Any, checkpoint: Path) -> None:
    Path("a.safetensors").write_text("precious")
    arguments = ("--model", SMALL, "--classes", "7", *SHAPE, "--target", "0.3", "--out", "a.safetensors")
    said = call("compress", str(checkpoint), *arguments)
    assert said.status == 2
    assert "exists already" in said.err
    assert Path("a.safetensors").read_text() == "precious"


def test_compress_looks_for_the_folder_before_the_work(call: Any, networks: Path) -> None:
    # Were it later, the checkpoint that is not there would be missed first.
    arguments = ("compress", "nowhere.pt", "--model", SMALL, *SHAPE, "--target", "0.3", "--out")
    said = call(*arguments, "no/such/a.safetensors")
    assert said.status == 2
    assert said.err.startswith("error: no/such/a.safetensors: the folder no/such does not exist")
    Path("file").touch()
    assert "the folder file does not exist" in call(*arguments, "file/a.safetensors").err


def test_compress_tries_the_folder_before_the_work(call: Any, networks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Not by taking the right away: the administrator may write anywhere.
    monkeypatch.setattr("os.access", lambda path, mode: not mode & os.W_OK)
    said = call("compress", "nowhere.pt", "--model", SMALL, *SHAPE, "--target", "0.3", "--out", "a.safetensors")
    assert said.status == 2
    assert said.err.startswith("error: a.safetensors: you may not write to the folder .")
    assert said.err.count("\n") == 1


def test_compress_refuses_a_classifier_of_other_classes(call: Any, checkpoint: Path) -> None:
    said = call("compress", str(checkpoint), "--model", SMALL, "--classes", "9", *SHAPE, "--target", "0.3")
    assert said.status == 2
    assert "are for 7 classes, not 9" in said.err
    assert "--classes 7" in said.err
    assert said.err.count("\n") == 1


def test_a_compressed_file_and_a_plain_one_are_described(call: Any, checkpoint: Path) -> None:
    arguments = ("--model", SMALL, "--classes", "7", *SHAPE, "--target", "0.5", "--out", "a.safetensors", "--json")
    compressed = json.loads(call("compress", str(checkpoint), *arguments).out)
    described = json.loads(call("summary", "a.safetensors", "--model", SMALL, *SHAPE, "--json").out)
    assert described["params"] == compressed["params"]
    said = call("summary", "a.safetensors", "--model", "cifar-resnet20")
    assert said.status == 2
    assert "--model" in said.err


def test_the_lost_norm_is_what_lies_outside_of_the_groups(call: Any, checkpoint: Path) -> None:
    options = ("--classes", "7", *SHAPE, "--target", "0.3", "--json")
    document = json.loads(call("compress", str(checkpoint), "--model", SMALL, *options).out)
    model = build_model(SMALL, num_classes=7)
    model.load_state_dict(torch.load(checkpoint))
    before = {layer.name: importance_matrix(layer.weight).sum() for layer in select_layers(model).layers}
    small = ss.load(document["path"], build_model(SMALL, num_classes=7))
    after = {name: module.weight.abs().sum().item() for name, module in small.named_modules() if name in before}
    assert document["lost_norm"] == pytest.approx(1 - sum(after.values()) / sum(before.values()), rel=1e-4)
    assert document["lost_norm"] > 0.05


def test_the_shape_of_an_image_is_what_macs_are_counted_with(call: Any, checkpoint: Path) -> None:
    arguments = ("compress", str(checkpoint), "--model", SMALL, "--classes", "7", "--target", "0.3", "--json")
    square = json.loads(call(*arguments, *SHAPE, "--out", "a.safetensors").out)
    wide = json.loads(call(*arguments, "--image-shape", "3x16x32", "--out", "b.safetensors").out)
    # All but the classifier's, which sees no pixels.
    classifier = 16 * 7
    assert wide["macs"]["before"] - classifier == 2 * (square["macs"]["before"] - classifier)


@pytest.mark.parametrize("command", ["compress", "summary", "export", "bench"])
def test_an_images_shape_is_told_in_one_way_by_every_command(call: Any, command: str) -> None:
    assert "--image-shape" in CliRunner().invoke(app, [command, "--help"], terminal_width=200).stdout
    said = call(command, "resnet18", "--image-size", "16")
    assert said.status == 2
    assert said.err.startswith("error: No such option: --image-size (Possible options: --image-shape")


def test_compress_overwrites_by_force(call: Any, checkpoint: Path) -> None:
    Path("a.safetensors").write_text("former")
    arguments = ("--model", SMALL, "--classes", "7", *SHAPE, "--target", "0.3", "--out", "a.safetensors", "--force")
    assert call("compress", str(checkpoint), *arguments).status == 0
    assert ss.load("a.safetensors", build_model(SMALL, num_classes=7))


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
        (
            ("--layer-type", "Linear", "--target", "0.5"),
            "; layer_types adds types (sparsify.layer_types",
        ),
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


def test_the_report_s_command_has_what_was_asked_for(call: Any, arguments: tuple[str, ...]) -> None:
    layers = ("--include", "*", "--include", "3", "--exclude", "6", "--layer-type", "Conv2d", "--layer-type", "Linear")
    options = ("--target", "0.25", "--budget", "macs", "--min-channels-per-group", "2", *layers)
    said = call(*[each for each in arguments if each != "--json"], *options, "--run", "runs/first")
    # Without labelled images there is no command that could be pasted.
    assert "strucspars compress" not in said.out
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


def test_compress_keeps_groups_as_wide_as_asked(call: Any, arguments: tuple[str, ...]) -> None:
    # The layer of 16 x 8 channels is too narrow for two groups of 8, and is left whole.
    said = call(*arguments, "--target", "0.29", "--min-channels-per-group", "8")
    assert said.status == 0, said.err
    document = json.loads(said.out)
    assert document["min_channels_per_group"] == 8
    assert 0 < document["lost_norm"] < 1
    plan = ss.model_plan(ss.load(document["path"], build_model(SMALL, num_classes=8)))
    assert [(layer.weight_shape[:2], layer.num_groups) for layer in plan.layers.values()] == [((16, 16), 2)]
    assert plan.removed_param_fraction >= 0.29


def test_compress_has_no_minimum_width_unless_asked(call: Any, arguments: tuple[str, ...]) -> None:
    document = json.loads(call(*arguments, "--target", "0.7").out)
    assert document["min_channels_per_group"] == 1
    plan = ss.model_plan(ss.load(document["path"], build_model(SMALL, num_classes=8)))
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
