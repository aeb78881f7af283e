"""`strucspars export`: runs and checkpoints become files that runtimes run."""

import json
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from PIL import Image

import strucspars as ss
from strucspars.export.checked import EXPORTERS
from strucspars.models.catalogue import build_model

SMALL = "tiny_networks:small"
SHAPE = ("--image-shape", "3x16x16")
ONNX = ("--format", "onnx")
RECORDED = Path(__file__).parents[2] / "results/cifar10/cifar10-resnet20-40"


@pytest.fixture
def compressed(networks: Path) -> Path:
    torch.manual_seed(0)
    model = build_model(SMALL, num_classes=7)
    ss.save(ss.convert_(model, ss.one_shot_plan(model, target=0.5)), "small.safetensors")
    return Path("small.safetensors")


def test_a_finished_run_gets_a_file_beside_its_network(call: Any, tiny: tuple[str, ...], finished: Path) -> None:
    said = call("export", "runs/demo", *ONNX)
    assert said.status == 2
    assert f"run only if you name it too: --model {SMALL}" in said.err
    said = call("export", "runs/demo", *ONNX, "--model", SMALL)
    assert (said.status, said.err) == (0, "")
    assert said.out.startswith("model.onnx")
    assert "checked in  ONNX Runtime" in said.out
    assert "batch sizes 1 and 3" in said.out
    (value,) = onnx.load("runs/demo/model.onnx").graph.input
    assert [size.dim_value for size in value.type.tensor_type.shape.dim][1:] == [3, 16, 16]
    # A file in its folder does not disturb a run.
    assert call("run", "demo", *tiny, "--quiet").status == 0


def test_a_saved_network_is_exported_and_computes_the_same(call: Any, compressed: Path) -> None:
    said = call("export", str(compressed), *ONNX, "--model", SMALL, *SHAPE, "--json")
    document = json.loads(said.out)
    assert document["path"] == "tiny_networks-small.onnx"
    assert document["format"] == "onnx"
    assert document["agreement"]["max_relative_error"] <= 1e-4
    assert document["nbytes"] == Path("tiny_networks-small.onnx").stat().st_size
    model = ss.load(compressed, build_model(SMALL, num_classes=7)).eval()
    images = torch.randn(3, 3, 16, 16)
    (scores,) = EXPORTERS.find("onnx").load(Path(document["path"]))((images,))
    torch.testing.assert_close(scores, model(images).detach(), rtol=1e-4, atol=1e-5)


def test_the_other_formats_and_wider_groups(call: Any, compressed: Path) -> None:
    arguments = (str(compressed), "--model", SMALL, *SHAPE, "--widen-groups-below", "16", "--json")
    openvino = json.loads(call("export", *arguments, "--format", "openvino").out)
    assert (openvino["path"], openvino["num_gathers"]) == ("tiny_networks-small.xml", 0)
    program = json.loads(call("export", *arguments, "--format", "torch").out)
    assert program["path"] == "tiny_networks-small.pt2"


def test_a_plain_checkpoint_is_exported(call: Any, networks: Path) -> None:
    torch.save(build_model(SMALL, num_classes=7).state_dict(), "trained.pt")
    arguments = ("export", "trained.pt", "--format", "torch", "--model", SMALL, *SHAPE, "--out", "out.pt2")
    assert call(*arguments, "--classes", "7").status == 0
    said = call(*arguments, "--classes", "9", "--force")
    assert said.status == 2
    assert "are for 7 classes, not 9" in said.err


@pytest.mark.parametrize("command", [("export", *ONNX, "--out", "a.onnx"), ("bench",), ("summary",), ("eval",)])
def test_a_run_of_another_network_than_the_one_named_is_refused(call: Any, command: tuple[str, ...]) -> None:
    said = call(command[0], str(RECORDED), "--model", "resnet50", *command[1:])
    assert said.status == 2
    assert f"--model resnet50: the run in {RECORDED} has the network preact-resnet20; leave it out" in said.err


def test_classes_are_refused_where_the_file_tells(call: Any, compressed: Path) -> None:
    said = call("export", str(compressed), *ONNX, "--model", SMALL, *SHAPE, "--classes", "7")
    assert said.status == 2
    assert said.err == f"error: --classes: the number of classes is read from {compressed}; leave it out\n"
    said = call("export", str(RECORDED), *ONNX, "--classes", "10", "--out", "a.onnx")
    assert (said.status, said.err) == (2, f"error: --classes: the run in {RECORDED} has its own; leave it out\n")
    assert not list(Path().glob("*.onnx"))


def test_a_file_that_is_there_is_replaced_only_by_force(call: Any, compressed: Path) -> None:
    arguments = ("export", str(compressed), "--format", "torch", "--model", SMALL, *SHAPE, "--out", "out.pt2")
    Path("out.pt2").write_text("precious")
    said = call(*arguments)
    assert said.status == 2
    assert said.err == "error: out.pt2 exists already; replace it with --force, or write elsewhere with --out\n"
    assert Path("out.pt2").read_text() == "precious"
    assert call(*arguments, "--force").status == 0
    assert Path("out.pt2").stat().st_size > 100


@pytest.mark.parametrize("force", [(), ("--force",)])
def test_a_file_of_the_name_of_the_weights_is_never_replaced_alone(
    call: Any, compressed: Path, force: tuple[str, ...]
) -> None:
    Path("a.bin").write_text("precious")
    said = call("export", str(compressed), "--format", "openvino", "--model", SMALL, *SHAPE, "--out", "a.xml", *force)
    assert said.status == 2
    assert "is there alone, so that it belongs to something else; move it away" in said.err
    assert Path("a.bin").read_text() == "precious"
    assert not Path("a.xml").exists()


def test_a_former_pair_of_files_is_replaced_by_force(call: Any, compressed: Path) -> None:
    arguments = ("export", str(compressed), "--format", "openvino", "--model", SMALL, *SHAPE, "--out", "a.xml")
    for name in ("a.xml", "a.bin"):
        Path(name).write_text("former")
    assert call(*arguments).status == 2
    assert call(*arguments, "--force").status == 0
    assert all(Path(name).stat().st_size > 100 for name in ("a.xml", "a.bin"))


def test_a_link_as_the_target_is_followed(call: Any, compressed: Path) -> None:
    Path("store").mkdir()
    Path("link.onnx").symlink_to("store/real.onnx")
    said = call("export", str(compressed), *ONNX, "--model", SMALL, *SHAPE, "--out", "link.onnx")
    assert said.status == 0
    assert Path("link.onnx").is_symlink()
    assert [file.name for file in Path("store").iterdir()] == ["real.onnx"]
    Path("lost.onnx").symlink_to("nowhere/real.onnx")
    said = call("export", str(compressed), *ONNX, "--model", SMALL, *SHAPE, "--out", "lost.onnx")
    assert said.status == 2
    assert "lost.onnx: the folder " in said.err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("small.safetensors", *ONNX), "small.safetensors holds weights but no network; name the network with --model"),
        (("nowhere.safetensors", *ONNX, "--model", SMALL), "there is no saved network at nowhere.safetensors"),
        (("small.safetensors", *ONNX, "--model", SMALL, "--out", "no/such.onnx"), "the folder no does not exist"),
        (("small.safetensors", *ONNX, "--model", SMALL, "--out", "."), ". is a folder; name a file with --out"),
        (("small.safetensors", "--model", SMALL, "--format", "tflite"), "tflite"),
        (("small.safetensors", *ONNX, "--model", SMALL, "--image-shape", "big"), "--image-shape must be channels"),
        (("small.safetensors", "--format", "openvino", "--model", SMALL, "--out", "a.onnx"), "write to a.xml"),
        (
            ("small.safetensors", *ONNX, "--model", SMALL, "--image-shape", "1x16x16"),
            "choose another shape (--image-shape",
        ),
        ((".", *ONNX), ". is not a run folder"),
        (("nosuch", *ONNX), "there is no file or folder nosuch; give the folder of a finished run"),
        (("nosuch.safetensors", *ONNX), "there is no file or folder nosuch.safetensors"),
        (("small.safetensors", "--format", "openvino", "--model", SMALL, "--out", "."), ". is a folder"),
    ],
)
def test_wrong_use_is_one_line(call: Any, compressed: Path, arguments: tuple[str, ...], complaint: str) -> None:
    said = call("export", *arguments)
    assert said.status == 2
    assert complaint in said.err
    assert said.err.count("\n") == 1
    assert not list(Path().glob("*.onnx"))


def test_a_run_is_exported_for_other_images_if_asked(call: Any, finished: Path) -> None:
    assert call("export", "runs/demo", *ONNX, "--model", SMALL, "--image-shape", "3x24x32").status == 0
    (value,) = onnx.load("runs/demo/model.onnx").graph.input
    assert [size.dim_value for size in value.type.tensor_type.shape.dim][1:] == [3, 24, 32]


def test_a_run_is_not_exported_for_images_that_its_network_cannot_take(call: Any, finished: Path) -> None:
    said = call("export", "runs/demo", *ONNX, "--model", SMALL, "--image-shape", "1x24x32")
    assert said.status == 2
    assert "network 'tiny_networks:small' cannot take images of shape (1, 24, 32)" in said.err


def test_a_run_in_int8_is_checked_on_its_own_test_images(call: Any, finished: Path) -> None:
    said = call("export", "runs/demo", *ONNX, "--model", SMALL, "--int8", "--max-drop", "20", "--json")
    assert said.status == 0, said.err
    found = json.loads(said.out)["int8"]
    assert found["images"] == 450
    assert found["float32_top1"] - found["top1"] <= 0.2
    operations = {node.op_type for node in onnx.load("runs/demo/model.onnx").graph.node}
    assert {"QuantizeLinear", "DequantizeLinear"} <= operations


def test_a_checkpoint_in_int8_needs_images(call: Any, compressed: Path) -> None:
    arguments = (str(compressed), *ONNX, "--model", SMALL, *SHAPE)
    said = call("export", *arguments, "--int8")
    assert said.status == 2
    assert "--int8 needs images to calibrate with" in said.err
    said = call("export", *arguments, "--calibrate", "photos", "--images", "40")
    assert said.status == 2
    assert "--calibrate and --images: without --int8 nothing is quantised; leave them out" in said.err
    said = call("export", *arguments, "--int8", "--calibrate", "photos")
    assert said.status == 2
    assert "there is no folder photos" in said.err


def test_a_checkpoint_in_int8_is_calibrated_with_a_folder(call: Any, compressed: Path) -> None:
    Path("photos").mkdir()
    for number in range(40):
        pixels = torch.randint(0, 256, (20, 20, 3), dtype=torch.uint8).numpy()
        Image.fromarray(pixels).save(f"photos/{number}.png")
    arguments = (str(compressed), *ONNX, "--model", SMALL, *SHAPE, "--int8", "--calibrate", "photos")
    said = call("export", *arguments)
    assert said.status == 0, said.err
    assert "same top class in" in said.out
    assert "of 8 images" in said.out
    said = call("export", *arguments, "--images", "20", "--force")
    assert said.status == 2
    assert "got 20 images to calibrate with; give at least 32" in said.err
