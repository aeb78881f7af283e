"""What `strucspars summary` says about the shuffles of a network."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

import strucspars as ss
from strucspars.models.catalogue import build_model
from strucspars.train.run_folder import RunFolder

SMALL = "tiny_networks:small"
SHAPE = ("--image-shape", "3x16x16")
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
        "error: --classes: the classes are read off small.safetensors; leave it out\n",
    )


def test_a_network_by_name_is_not_named_twice(call: Any, networks: Path) -> None:
    said = call("summary", "cifar-resnet20", "--model", "cifar-resnet56")
    assert said.status == 2
    assert said.err == (
        "error: --model: it is for files and runs, and there is no file or folder 'cifar-resnet20'; leave it out\n"
    )


@pytest.mark.parametrize("target", ["runs/nosuch", "nosuch.pt", "~/nosuch.pth"])
@pytest.mark.parametrize("options", [(), ("--model", SMALL)])
def test_a_path_to_nothing_is_not_taken_for_the_name_of_a_network(
    call: Any, target: str, options: tuple[str, ...]
) -> None:
    said = call("summary", target, *options)
    assert said.status == 2
    assert said.err.startswith(f"error: there is no file or folder {target}; give the folder of a run, ")


@pytest.mark.parametrize("name", ["weights.pt", "weights.pth", "model.onnx"])
def test_a_file_that_is_not_read_here_comes_with_what_does(call: Any, networks: Path, name: str) -> None:
    Path(name).touch()
    said = call("summary", name, "--model", SMALL)
    assert said.status == 2
    assert said.err.startswith(f"error: {name} is no .safetensors file, and summary reads no other.")
    assert f"strucspars summary {SMALL}; export and compress read them, with --model {SMALL}\n" in said.err
    assert call("summary", SMALL, *SHAPE).status == 0


def test_the_name_of_a_network_wins_over_a_file_of_that_name(call: Any, networks: Path) -> None:
    Path("cifar-resnet20").touch()
    assert call("summary", "cifar-resnet20").status == 0


def test_weights_without_a_name_for_their_network_come_with_what_reads_them(call: Any, networks: Path) -> None:
    Path("weights.pt").touch()
    assert "strucspars summary NAME" in call("summary", "weights.pt").err


def test_the_summary_of_a_dense_network_says_nothing_of_folding(call: Any) -> None:
    assert "after fold" not in call("summary", SMALL, *SHAPE).out


MAPS = """
from torch import nn


def maps(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, num_classes, 1))
"""


def test_networks_that_are_no_classifiers_are_described_compressed_and_exported(call: Any, networks: Path) -> None:
    (networks / "own_maps.py").write_text(MAPS)
    torch.save(build_model("own_maps:maps", num_classes=2).state_dict(), "maps.pt")
    options = ("--classes", "2", "--image-shape", "3x8x8")
    assert call("summary", "own_maps:maps", *options).status == 0
    ss.save(build_model("own_maps:maps", num_classes=2), "maps.safetensors")
    said = call("summary", "maps.safetensors", "--model", "own_maps:maps", "--image-shape", "1x8x8")
    assert said.status == 2
    assert "cannot take images of shape (1, 8, 8)" in said.err
    named = ("maps.pt", "--model", "own_maps:maps", *options)
    assert call("compress", *named, "--target", "0.01").status == 0
    assert call("export", *named, "--format", "onnx").status == 0
