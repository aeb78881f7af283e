"""`strucspars summary`: networks by name, from files and from run folders."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import fx, nn

import strucspars as ss
from strucspars.cli.networks import find_target
from strucspars.models.catalogue import build_model
from strucspars.train.recipe_reading import read_recipe, recipe_yaml
from strucspars.train.run_folder import RunFolder

SMALL = "tiny_networks:small"


SHAPE = ("--image-shape", "3x16x16")


RECORDED = Path(__file__).parents[2] / "results/cifar10/cifar10-resnet20-40/summary.json"


GOOD_ROW = {"stage": "sparsify", "epoch": 1, "test_top1": 0.5, "test_top5": 0.9, "seconds": 2.0}


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


def test_a_folder_without_a_run_is_an_error(call: Any) -> None:
    Path("empty").mkdir()
    said = call("summary", "empty")
    assert said.status == 2
    assert "not a run folder" in said.err


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


@pytest.mark.parametrize("command", ["eval", "summary"])
def test_code_that_a_folder_names_is_not_run(call: Any, finished: Path, command: str) -> None:
    text = (finished / "recipe.yaml").read_text()
    (finished / "recipe.yaml").write_text(text.replace(SMALL, "os:mkdir"))
    said = call(command, str(finished))
    assert said.status == 2
    assert "os:mkdir; code that a folder names is run only if you name it too" in said.err


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


def test_a_damaged_file_is_an_error(call: Any) -> None:
    Path("a.safetensors").write_bytes(b"nonsense")
    said = call("summary", "a.safetensors", "--model", SMALL)
    assert said.status == 2
    assert "damaged" in said.err


def test_every_kind_of_saved_network_is_read_back(call: Any, tiny: tuple[str, ...], networks: Path) -> None:
    overrides = [each for each in tiny if not each.startswith("model.")] + ["model.name=cifar-resnet8"]
    said = call("run", "demo", *overrides, "kind=slimming", "slimming.target=0.2", "--quiet", "--json")
    (run,) = json.loads(said.out)["runs"]
    file = f"{run['folder']}/model.safetensors"
    for target in (find_target(run["folder"], model=None), find_target(file, model="cifar-resnet8")):
        params = sum(parameter.numel() for parameter in target.network().parameters())
        assert params == run["summary"]["params"]["after"]


def test_a_plain_file_is_read_with_its_weights(networks: Path) -> None:
    model = build_model(SMALL, num_classes=7)
    save_file(model.state_dict(), "plain.safetensors")
    read = find_target("plain.safetensors", model=SMALL).network().state_dict()
    assert all(torch.equal(read[key], value) for key, value in model.state_dict().items())


def test_the_summary_of_an_unfinished_run_has_the_last_epoch_and_the_time_of_every_stage(call: Any) -> None:
    folder = RunFolder("runs/begun")
    folder.create()
    folder.write_recipe(recipe_yaml(read_recipe("demo", ["stage1.epochs=2", "stage2.epochs=9"])))
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


HARD = """
from tiny_networks import small
from torch import nn


class Hard(nn.Module):
    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, images):
        return self.layers(images) if images.mean() >= 0 else -self.layers(images)


def hard(num_classes: int) -> nn.Module:
    return Hard(small(num_classes))
"""


def saved(name: str) -> Path:
    model: nn.Module = build_model(name, num_classes=7)
    plan = ss.one_shot_plan(model, target=0.3)
    path = Path("small.safetensors")
    ss.save(ss.convert_(model, plan), path, plan=plan)
    return path


def test_the_summary_of_a_converted_network_says_what_remains_after_folding(call: Any, networks: Path) -> None:
    arguments = ("summary", str(saved(SMALL)), "--model", SMALL, "--image-shape", "3x16x16")
    document = json.loads(call(*arguments, "--json").out)
    model = ss.load("small.safetensors", build_model(SMALL, num_classes=7))
    report = ss.fold_report(ss.fold(model, torch.zeros(1, 3, 16, 16)))
    assert document["after_fold"] == {
        "gathers": len(report.gathers),
        "gathered_bytes": report.gathered_bytes,
        "untraced_reason": "",
    }
    lines = call(*arguments).out.splitlines()
    assert len(document["gathers"]) > len(report.gathers)
    assert any(line.startswith(f"after fold: {len(report.gathers)} gather") for line in lines)


def test_a_network_that_cannot_be_traced_keeps_its_gathers_after_folding(call: Any, networks: Path) -> None:
    (networks / "hard_networks.py").write_text(HARD)
    arguments = ("summary", str(saved("hard_networks:hard")), "--model", "hard_networks:hard")
    said = call(*arguments, "--image-shape", "3x16x16")
    assert said.status == 0
    last = said.out.rstrip().splitlines()[-1]
    assert "bytes; the network could not be traced: TraceError: symbolically traced variables cannot be used" in last


def test_a_network_that_is_not_known_is_not_blamed_on_the_file(call: Any, networks: Path) -> None:
    said = call("summary", str(saved(SMALL)), "--model", "resnet-50")
    assert said.status == 2
    assert "there is no network 'resnet-50'; did you mean 'resnet50'?" in said.err
    assert "safetensors" not in said.err


def test_a_network_is_folded_with_an_image_that_is_not_blank(
    call: Any, networks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fold, examples = ss.fold, list[torch.Tensor]()

    def watched(model: nn.Module, example: torch.Tensor) -> fx.GraphModule:
        examples.append(example)
        return fold(model, example)

    monkeypatch.setattr("strucspars.convert.fold.fold", watched)
    assert call("summary", str(saved(SMALL)), "--model", SMALL, "--image-shape", "3x16x16").status == 0
    assert [float(example.std()) > 0.5 for example in examples] == [True]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--classes", "7"), "--classes: the run in runs/begun has its own; leave it out"),
        (SHAPE, "--image-shape: the run in runs/begun has its own; leave it out"),
        (("--classes", "7", *SHAPE), "--classes and --image-shape: the run in runs/begun has its own; leave them out"),
    ],
)
def test_a_run_is_not_described_with_options_that_would_be_ignored(
    call: Any, options: tuple[str, ...], complaint: str
) -> None:
    folder = RunFolder("runs/begun")
    folder.create()
    folder.write_recipe("base: demo")
    assert call("summary", "runs/begun").status == 0
    said = call("summary", "runs/begun", *options)
    assert (said.status, said.err) == (2, f"error: {complaint}\n")


def test_the_classes_of_a_file_are_not_given(call: Any, networks: Path) -> None:
    said = call("summary", str(saved(SMALL)), "--model", SMALL, *SHAPE, "--classes", "7")
    assert (said.status, said.err) == (
        2,
        "error: --classes: the number of classes is read from small.safetensors; leave it out\n",
    )


@pytest.mark.parametrize("target", ["runs/nosuch", "nosuch.pt", "~/nosuch.pth", "cifar-resnet20"])
def test_weights_that_are_not_there_are_named(call: Any, target: str) -> None:
    said = call("summary", target, "--model", "cifar-resnet56")
    assert said.status == 2
    assert said.err.startswith("error: weights '")
    assert "there is no such file" in said.err


@pytest.mark.parametrize("target", ["runs/nosuch", "nosuch.pt", "~/nosuch.pth"])
def test_a_path_to_nothing_is_not_taken_for_the_name_of_a_network(call: Any, target: str) -> None:
    said = call("summary", target)
    assert said.status == 2
    assert said.err.startswith(f"error: there is no file or folder {target}; give the folder of a run, ")


def test_every_kind_of_checkpoint_is_described(call: Any, networks: Path) -> None:
    state = build_model(SMALL, num_classes=7).state_dict()
    torch.save(state, "weights.pt")
    save_file(state, "weights.safetensors")
    named = ("--model", SMALL, *SHAPE)
    documents = [
        call("summary", *target, "--json").out
        for target in (("weights.pt", *named, "--classes", "7"), ("weights.safetensors", *named))
    ]
    assert documents[0] == documents[1]
    assert json.loads(documents[0])["params"]["after"] > 0


def test_the_name_of_a_network_wins_over_a_file_of_that_name(call: Any, networks: Path) -> None:
    Path("cifar-resnet20").touch()
    assert call("summary", "cifar-resnet20").status == 0


def test_weights_without_a_name_for_their_network_come_with_the_option_that_gives_it(call: Any) -> None:
    Path("weights.pt").touch()
    assert "weights.pt holds weights but no network; name the network with --model" in call("summary", "weights.pt").err


def test_the_summary_of_a_dense_network_says_nothing_of_folding(call: Any) -> None:
    assert "after fold" not in call("summary", SMALL, *SHAPE).out


MAPS = """
from torch import nn


def maps(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, num_classes, 1))
"""


def test_networks_that_are_no_classifiers_are_described_compressed_and_exported(call: Any, networks: Path) -> None:
    (networks / "score_maps.py").write_text(MAPS)
    torch.save(build_model("score_maps:maps", num_classes=2).state_dict(), "maps.pt")
    options = ("--classes", "2", "--image-shape", "3x8x8")
    assert call("summary", "score_maps:maps", *options).status == 0
    ss.save(build_model("score_maps:maps", num_classes=2), "maps.safetensors")
    said = call("summary", "maps.safetensors", "--model", "score_maps:maps", "--image-shape", "1x8x8")
    assert said.status == 2
    assert "cannot take images of shape (1, 8, 8)" in said.err
    named = ("maps.pt", "--model", "score_maps:maps", *options)
    assert call("compress", *named, "--target", "0.01").status == 0
    assert call("export", *named, "--format", "onnx").status == 0


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
    folder.write_recipe(recipe_yaml(read_recipe("demo", ["stage1.epochs=15", "stage2.epochs=9"])))
    folder.append_metrics({"stage": stage, "epoch": epoch, "test_top1": 0.875, "test_top5": 1.0, "seconds": 2.0})
    said = call("summary", "runs/begun")
    assert said.status == 0
    assert words in said.out
    assert "87.50%" in said.out
    assert json.loads(call("summary", "runs/begun", "--json").out)["state"] == words
