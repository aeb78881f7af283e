"""The commands that look at networks and runs: summary, eval, compress."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import strucspars as ss
from strucspars.cli.main import app
from strucspars.cli.networks import network_of_file, saved_network
from strucspars.models.catalogue import build_model
from strucspars.nn.groupable import select_layers
from strucspars.nn.importance import importance_matrix
from strucspars.train.recipe_reading import read_recipe
from strucspars.train.run_folder import RunFolder

SMALL = "tiny_networks:small"
SHAPE = ("--image-shape", "3x16x16")
RECORDED = Path(__file__).parents[2] / "results/cifar10/cifar10-resnet20-40/summary.json"
GOOD_ROW = {"stage": "sparsify", "epoch": 1, "test_top1": 0.5, "test_top5": 0.9, "seconds": 2.0}


@pytest.fixture
def finished(call: Any, tiny: tuple[str, ...]) -> Path:
    assert call("run", "demo", *tiny, "--quiet").status == 0
    return Path("runs/demo")


@pytest.fixture
def checkpoint(networks: Path) -> Path:
    path = Path("trained.pt")
    torch.save(build_model(SMALL, num_classes=7).state_dict(), path)
    return path


def test_the_summary_of_a_finished_run_has_its_layers_and_its_outcome(call: Any, finished: Path) -> None:
    said = call("summary", str(finished), "--model", SMALL)
    assert said.status == 0
    assert "ShuffledGroupConv2d" in said.out
    assert (finished / "summary.txt").read_text() in said.out


def test_the_summary_of_a_finished_run_as_json(call: Any, finished: Path) -> None:
    document = json.loads(call("summary", str(finished), "--model", SMALL, "--json").out)
    assert document["state"] == "finished"
    assert document["network"]["params"] == document["summary"]["params"]
    assert document["network"]["image_shape"] == [3, 16, 16]


@pytest.mark.parametrize(
    ("stage", "epoch", "words"),
    [
        ("sparsify", 3, "sparsify, epoch 3 of 15 done"),
        ("compress", 0, "compressed, not finetuned yet"),
        ("finetune", 2, "finetune, epoch 2 of 9 done"),
    ],
)
def test_the_summary_of_an_unfinished_run_tells_how_far_it_is(call: Any, stage: str, epoch: int, words: str) -> None:
    folder = RunFolder("runs/begun")
    folder.create()
    folder.write_recipe("base: demo\nstage1: {epochs: 15}\nstage2: {epochs: 9}\n")
    folder.append_metrics({"stage": stage, "epoch": epoch, "test_top1": 0.875, "test_top5": 1.0, "seconds": 2.0})
    said = call("summary", "runs/begun")
    assert said.status == 0
    assert words in said.out
    assert "87.50%" in said.out
    assert json.loads(call("summary", "runs/begun", "--json").out)["state"] == words


def test_a_folder_without_a_run_is_an_error(call: Any) -> None:
    Path("empty").mkdir()
    said = call("summary", "empty")
    assert said.status == 2
    assert "no run folder" in said.err


def test_the_summary_of_a_name_counts_for_the_given_images(call: Any) -> None:
    document = json.loads(call("summary", "cifar-resnet20", "--classes", "100", "--json").out)
    assert document["image_shape"] == [3, 32, 32]
    assert document["rows"][-1]["weight_shape"] == [100, 64]
    small = json.loads(call("summary", "cifar-resnet20", *SHAPE, "--json").out)
    assert small["macs"]["after"] < document["macs"]["after"]


def test_an_unknown_name_gets_a_suggestion(call: Any) -> None:
    said = call("summary", "resnet-50")
    assert said.status == 2
    assert "resnet50" in said.err


def test_eval_finds_the_recorded_accuracy_again(call: Any, finished: Path) -> None:
    said = call("eval", str(finished), f"model.name={SMALL}")
    assert said.status == 0
    assert "the same" in said.out
    document = json.loads(call("eval", str(finished), f"model.name={SMALL}", "data.batch_size=50", "--json").out)
    assert document["top1"] == pytest.approx(document["recorded_top1"])
    assert document["top5"] >= document["top1"]


def test_eval_does_not_change_the_network(call: Any, finished: Path) -> None:
    said = call("eval", str(finished), "sparsify.target=0.9")
    assert said.status == 2
    assert "only data.* and engine.*" in said.err


@pytest.mark.parametrize("command", ["eval", "summary"])
def test_code_that_a_folder_names_is_not_run(call: Any, finished: Path, command: str) -> None:
    text = (finished / "recipe.yaml").read_text()
    (finished / "recipe.yaml").write_text(text.replace(SMALL, "os:mkdir"))
    said = call(command, str(finished))
    assert said.status == 2
    assert "os:mkdir; code that a folder names is run only if you name it too" in said.err


def test_a_network_named_for_eval_must_be_the_one_of_the_run(call: Any, finished: Path) -> None:
    said = call("eval", str(finished), "model.name=resnet18")
    assert said.status == 2
    assert SMALL in said.err


@pytest.mark.parametrize("command", ["eval", "summary"])
@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"seconds": 3}, "seconds: must be a mapping, got 3"),
        ({"converted_top1": "abc"}, "converted_top1: must be a finite number, got 'abc'"),
        ({"finetuned": None}, "finetuned: must be an object, got None"),
    ],
)
def test_a_damaged_summary_is_one_line_that_names_the_file(
    call: Any, command: str, change: dict[str, Any], complaint: str
) -> None:
    folder = RunFolder("runs/damaged")
    folder.create()
    folder.write_recipe("base: demo")
    values = json.loads(RECORDED.read_text())
    folder.write_json(folder.summary_json_path, values | change)
    said = call(command, "runs/damaged")
    assert said.status == 2
    assert said.err == f"error: runs/damaged/summary.json: {complaint}\n"


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"stage": 5}, "stage: must be text (numbers in quotes), got 5"),
        ({"stage": "sparsify"}, "epoch: must be a whole number, got None"),
        ({"stage": "sparsify", "epoch": 1, "test_top1": "high"}, "test_top1: must be a finite number, got 'high'"),
    ],
)
@pytest.mark.parametrize("command", [("summary", "runs/demo"), ("run", "demo"), ("reproduce", "table1", "--list")])
def test_a_damaged_row_is_one_line_that_names_the_file(
    call: Any, command: tuple[str, ...], row: dict[str, Any], complaint: str
) -> None:
    path = "runs/cifar10-resnet20-dense" if command[0] == "reproduce" else "runs/demo"
    folder = RunFolder(path)
    folder.create()
    folder.write_recipe("base: demo")
    folder.append_metrics(GOOD_ROW)
    folder.append_metrics(row)
    said = call(*command)
    assert said.status == 2
    assert said.err == f"error: {path}/metrics.jsonl, line 2: {complaint}\n"


def test_eval_of_an_unfinished_run_is_an_error(call: Any, finished: Path) -> None:
    (finished / "summary.json").unlink()
    said = call("eval", str(finished))
    assert said.status == 2
    assert "not finished" in said.err


def test_compress_writes_a_smaller_network_that_loads(call: Any, checkpoint: Path) -> None:
    said = call("compress", str(checkpoint), "--model", SMALL, "--classes", "7", *SHAPE, "--target", "0.5")
    assert said.status == 0
    assert "of the norm of the layers that can be grouped is lost" in said.out
    path = Path("tiny_networks-small-compressed.safetensors")
    small = ss.load(path, build_model(SMALL, num_classes=7))
    before = sum(parameter.numel() for parameter in build_model(SMALL, num_classes=7).parameters())
    assert sum(parameter.numel() for parameter in small.parameters()) <= before / 2
    assert said.err.count("one-shot grouping") == 0


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
    assert "there already" in said.err
    assert Path("a.safetensors").read_text() == "precious"


def test_compress_looks_for_the_folder_before_the_work(call: Any, networks: Path) -> None:
    # Were it later, the checkpoint that is not there would be missed first.
    arguments = ("compress", "nowhere.pt", "--model", SMALL, *SHAPE, "--target", "0.3", "--out")
    said = call(*arguments, "no/such/a.safetensors")
    assert said.status == 2
    assert said.err.startswith("error: no/such/a.safetensors cannot be written: there is no folder no/such")
    Path("file").touch()
    assert "there is no folder file" in call(*arguments, "file/a.safetensors").err


def test_compress_tries_the_folder_before_the_work(call: Any, networks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Not by taking the right away: the administrator may write anywhere.
    monkeypatch.setattr("os.access", lambda path, mode: not mode & os.W_OK)
    said = call("compress", "nowhere.pt", "--model", SMALL, *SHAPE, "--target", "0.3", "--out", "a.safetensors")
    assert said.status == 2
    assert said.err.startswith("error: a.safetensors cannot be written: the folder . is not writable")
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


def test_a_damaged_file_is_an_error(call: Any) -> None:
    Path("a.safetensors").write_bytes(b"nonsense")
    said = call("summary", "a.safetensors", "--model", SMALL)
    assert said.status == 2
    assert "damaged" in said.err


def test_every_kind_of_saved_network_is_read_back(call: Any, tiny: tuple[str, ...], networks: Path) -> None:
    overrides = [each for each in tiny if not each.startswith("model.")] + ["model.name=cifar-resnet8"]
    said = call("run", "demo", *overrides, "kind=slimming", "slimming.target=0.2", "--quiet", "--json")
    (run,) = json.loads(said.out)["runs"]
    folder = RunFolder(run["folder"])
    recipe = read_recipe(folder.recipe_path)
    for network in (saved_network(folder, recipe), network_of_file(folder.model_path, "cifar-resnet8")):
        params = sum(parameter.numel() for parameter in network.parameters())
        assert params == run["summary"]["params"]["after"]


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
    assert said.err == "error: No such option: --image-size (Possible options: --image-shape); --help tells more\n"


def test_compress_overwrites_by_force(call: Any, checkpoint: Path) -> None:
    Path("a.safetensors").write_text("former")
    arguments = ("--model", SMALL, "--classes", "7", *SHAPE, "--target", "0.3", "--out", "a.safetensors", "--force")
    assert call("compress", str(checkpoint), *arguments).status == 0
    assert ss.load("a.safetensors", build_model(SMALL, num_classes=7))


def test_the_library_is_heard_again_after_compress(call: Any, checkpoint: Path, caplog: Any) -> None:
    arguments = ("compress", str(checkpoint), "--model", SMALL, "--classes", "7", *SHAPE, "--target")
    assert call(*arguments, "1.5").status == 2
    assert call(*arguments, "0.99").status == 2
    assert call(*arguments, "0.3").status == 0
    ss.one_shot_plan(build_model(SMALL, num_classes=7), target=0.3)
    assert "one-shot grouping removes" in caplog.text


def test_a_plain_file_is_read_with_its_weights(networks: Path) -> None:
    model = build_model(SMALL, num_classes=7)
    save_file(model.state_dict(), "plain.safetensors")
    read = network_of_file(Path("plain.safetensors"), SMALL).state_dict()
    assert all(torch.equal(read[key], value) for key, value in model.state_dict().items())


def test_the_summary_of_an_unfinished_run_has_the_last_epoch_and_the_time_of_every_stage(call: Any) -> None:
    folder = RunFolder("runs/begun")
    folder.create()
    folder.write_recipe("base: demo\nstage1: {epochs: 2}\nstage2: {epochs: 9}\n")
    for stage, epoch, top1, removed in (
        ("sparsify", 1, 0.25, 0.125),
        ("sparsify", 2, 0.5, 0.375),
        ("finetune", 1, 0.75, None),
    ):
        row = {"stage": stage, "epoch": epoch, "test_top1": top1, "test_top5": 1.0, "seconds": 100.0}
        folder.append_metrics(row | ({} if removed is None else {"removed_fraction": removed}))
    lines = [line.split() for line in call("summary", "runs/begun").out.splitlines()]
    assert ["sparsify", "2", "50.00%", "37.50%", "3", "min", "20", "s"] in lines
    assert ["finetune", "1", "75.00%", "1", "min", "40", "s"] in lines
