"""`strucspars compress --data`: calibrated, compared as files, or finetuned; and bad input, which loses nothing."""

import json
import logging
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from table2_recipes import write_image_folder

import strucspars as ss
from strucspars.bench import deployed
from strucspars.core.plan import Preprocessing
from strucspars.data.folder import FolderSplit
from strucspars.export.program import PREPROCESSING_KEY
from strucspars.export.storage import read_plan
from strucspars.models.catalogue import build_model

SMALL = "tiny_networks:small"
SHAPE = ("--image-shape", "3x28x28")
ARGUMENTS = ("compress", "weights.pt", "--model", SMALL, "--classes", "3", *SHAPE, "--data", "images")
CALIBRATED = (*ARGUMENTS, "--target", "0.3")
OUT = Path("tiny_networks-small-compressed.safetensors")
RUN = Path("runs/tiny_networks-small-0.3")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = replace(deployed.SITTING, seconds=0.01, visit_seconds=0.001, min_rounds=3, max_rounds=3)
    monkeypatch.setattr(deployed, "SITTING", rules)
    monkeypatch.setattr("strucspars.train.deploy.default_readers", lambda: 0)


@pytest.fixture
def images(networks: Path) -> Path:
    """Weights of three classes, and images of them to learn from and to test on."""
    torch.manual_seed(0)
    torch.save(build_model(SMALL, num_classes=3).state_dict(), "weights.pt")
    write_image_folder(Path("images"), num_classes=3, train_images=12, test_images=4)
    return Path("images")


def test_images_without_labels_and_training_give_a_network_and_a_table(call: Any, images: Path) -> None:
    said = call(*CALIBRATED, "--images", "20", "--json")
    assert said.status == 0, said.err
    document = json.loads(said.out)
    pair = document["comparison"]
    assert document["path"] == str(OUT)
    assert pair["images"] == 12
    assert pair["compressed"]["params"] == document["params"]["after"] < 0.7 * pair["dense"]["params"]
    assert pair["compressed"]["file_bytes"] == OUT.with_suffix(".onnx").stat().st_size
    assert min(pair["dense"]["ms"], pair["compressed"]["ms"]) > 0
    # What is scored is the file, on images prepared as the plan says.
    plan = read_plan(OUT)
    assert plan is not None
    assert plan.preprocessing == Preprocessing(size=28, resize=32)
    assert plan.predicted_divergence is not None
    model = ss.load(OUT, build_model(SMALL, num_classes=3)).eval()
    split = FolderSplit(images / "val", plan.preprocessing, random=False, seed=0)
    samples = [split[0, index] for index in range(len(split))]
    with torch.no_grad():
        guesses = model(torch.stack([image for image, _ in samples])).argmax(1)
    assert pair["compressed"]["top1"] == (guesses == torch.tensor([label for _, label in samples])).float().mean()
    metadata = {entry.key: entry.value for entry in onnx.load(OUT.with_suffix(".onnx")).metadata_props}
    assert json.loads(metadata[PREPROCESSING_KEY])["size"] == 28


def test_the_text_has_the_prediction_first_and_a_next_command_that_runs(call: Any, images: Path) -> None:
    said = call(*CALIBRATED, "--images", "20", "--min-channels-per-group", "2", "--include", "*")
    assert said.status == 0, said.err
    assert said.out.startswith("predicted: without training, the predictions move by ")
    assert "top-1 on 12 images" in said.out
    assert "x as fast" in said.out
    (advice,) = (line for line in said.out.splitlines() if line.startswith("  strucspars compress "))
    words = shlex.split(advice)
    assert words[-2:] == ["--epochs", "10"]
    again = call(*words[1:-1], "1", "--quiet", "--json")
    assert again.status == 0, again.err
    assert json.loads(again.out)["min_channels_per_group"] == 2


def test_images_without_labels_are_not_scored(call: Any, images: Path) -> None:
    shutil.copytree(images / "train" / "class0001", "flat")
    said = call(*CALIBRATED[:-4], "--data", "flat", "--target", "0.3", "--json")
    assert said.status == 0, said.err
    pair = json.loads(said.out)["comparison"]
    assert (pair["images"], pair["dense"]["top1"]) == (0, None)


def test_classes_that_are_not_asked_for_need_not_fit(call: Any, images: Path) -> None:
    shutil.rmtree(images / "val" / "class0002")
    said = call(*CALIBRATED)
    assert said.status == 0, said.err
    assert "the accuracy is not measured: images/val has 2 folders of classes" in said.out
    OUT.unlink()
    said = call(*CALIBRATED, "--val", "images/val", "--force")
    assert said.status == 2
    assert "has 2 folders of classes (class0000, class0001, ...), but the network has 3 outputs" in said.err
    assert not OUT.exists()


def test_a_score_on_some_of_the_classes_is_no_fair_comparison_and_says_so(call: Any, images: Path) -> None:
    for split in ("train", "val"):
        for number in range(3):
            (images / split / f"class000{number}").rename(images / split / str(number))
        shutil.rmtree(images / split / "1")
    said = call(*CALIBRATED, "--quiet")
    assert said.status == 0, said.err
    assert "the images to score on show 2 of the 3 classes" in said.err
    assert "top-1 on 8 images" in said.out


def test_a_network_that_no_file_can_hold_is_saved_all_the_same(
    call: Any, images: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ValueError("an operation has no ONNX form")

    monkeypatch.setattr(deployed, "export", refuse)
    with caplog.at_level(logging.WARNING):
        said = call(*CALIBRATED, "--json")
    assert said.status == 0
    assert "not compared as files: an operation has no ONNX form" in said.err
    assert json.loads(said.out)["comparison"] is None
    assert ss.load(OUT, build_model(SMALL, num_classes=3))


def test_a_run_folder_remembers_the_images_and_the_accuracy(call: Any, images: Path) -> None:
    assert call(*CALIBRATED, "--images", "20", "--run", "runs/one-shot").status == 0
    (told,) = json.loads(call("report", "runs/one-shot", "--json").out)["runs"]
    assert told["folder"] == "runs/one-shot"
    page = (Path("runs/one-shot/report/index.html")).read_text()
    assert "--data images --images 20" in page
    assert "not measured" not in page


def test_epochs_make_a_run_that_resumes_and_is_taught_by_the_dense_network(call: Any, images: Path) -> None:
    said = call(*CALIBRATED, "--epochs", "1", "--json")
    assert said.status == 0, said.err
    document = json.loads(said.out)
    assert (document["run"], document["path"]) == (str(RUN), str(RUN / "model.safetensors"))
    assert document["comparison"]["dense"]["top1"] is not None
    assert document["comparison"]["compressed"]["top1"] == pytest.approx(document["summary"]["converted_top1"])
    recipe = (RUN / "recipe.yaml").read_text()
    assert "teacher: weights" in recipe
    again = json.loads(call(*CALIBRATED, "--epochs", "1", "--json").out)
    assert again["summary"] == document["summary"]
    other = call(*CALIBRATED, "--epochs", "2")
    assert other.status == 2
    assert "holds a run with another recipe" in other.err
    assert call("report", str(RUN)).status == 0


def test_other_classes_get_a_new_classifier_and_no_teacher(call: Any, images: Path) -> None:
    torch.save(build_model(SMALL, num_classes=7).state_dict(), "weights.pt")
    arguments = [*CALIBRATED]
    arguments[arguments.index("--classes") + 1] = "7"
    said = call(*arguments, "--epochs", "1")
    assert said.status == 0, said.err
    assert "other classes than the 7 outputs of weights.pt" in said.out
    assert "not trained for these" in said.out
    assert "teacher: null" in (RUN / "recipe.yaml").read_text()


def spoil(name: str) -> None:
    state = torch.load("weights.pt")
    state[name].view(-1)[0] = float("nan")
    torch.save(state, "weights.pt")


def no_norms() -> None:
    code = "\n\ndef bare(num_classes):\n"
    code += "    layers = [nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU()]\n"
    code += "    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, num_classes))\n"
    Path("bare_networks.py").write_text(f"from torch import nn\n{code}")
    torch.manual_seed(0)
    torch.save(build_model("bare_networks:bare", num_classes=3).state_dict(), "weights.pt")


@pytest.mark.parametrize(
    ("options", "spoilt", "complaint"),
    [
        (("--target", "0.3", "--val", "images/train/class0000"), None, "must hold a folder of images for every class"),
        (("--target", "0.3", "--val", "nowhere"), None, "there is no folder nowhere"),
        (("--target", "0.3", "--data", "nowhere"), None, "there is no folder nowhere"),
        (("--target", "0.3", "--data", "empty"), None, "empty holds no image"),
        (("--target", "0.3", "--data", "images/train", "--epochs", "1"), None, "no image folders under"),
        (
            ("--target", "0.3", "--data", "flat", "--val", "images", "--epochs", "1"),
            None,
            "a folder of images for every",
        ),
        (("--target", "0.95"), None, "the most that can be removed"),
        (("--target", "0.3"), "0.weight", "weights.pt': 0.weight holds NaN or infinity"),
        (("--target", "0.3"), "1.running_var", "1.running_var holds NaN or infinity"),
        (("--target", "0.3", "--epochs", "1"), "0.weight", "0.weight holds NaN or infinity"),
        (("--target", "0.3", "--image-shape", "3x1x28"), None, "images of a folder are cropped to squares in RGB"),
        (("--target", "0.3", "--epochs", "1", "--out", "a.safetensors"), None, "--out: the network is written to"),
    ],
)
def test_bad_input_is_named_and_nothing_is_written(
    options: tuple[str, ...], spoilt: str | None, complaint: str, call: Any, images: Path
) -> None:
    Path("empty").mkdir()
    shutil.copytree(images / "train" / "class0001", "flat")
    if spoilt is not None:
        spoil(spoilt)
    before = sorted(Path().iterdir())
    said = call(*ARGUMENTS, *options)
    assert said.status == 2, said.out
    assert complaint in said.err
    assert said.err.count("\n") == 1, said.err
    assert sorted(path for path in Path().iterdir() if path.name != "__pycache__") == before


def test_without_images_nothing_else_about_them_can_be_asked(call: Any, images: Path) -> None:
    said = call(*ARGUMENTS[:-2], "--target", "0.3", "--val", "images", "--epochs", "3")
    assert said.status == 2
    assert "--val and --epochs: there are no images without --data; leave them out" in said.err


def test_a_compressed_file_is_not_compressed_again(call: Any, images: Path) -> None:
    assert call(*CALIBRATED).status == 0
    said = call("compress", str(OUT), *CALIBRATED[2:], "--out", "b.safetensors")
    assert said.status == 2
    assert "compressed already; give dense weights, or finetune it with strucspars run" in said.err


@pytest.mark.parametrize("epochs", ["0", "1"])
def test_a_network_without_batch_norms_is_compressed_like_any_other(epochs: str, call: Any, images: Path) -> None:
    no_norms()
    arguments = [*CALIBRATED]
    arguments[arguments.index(SMALL)] = "bare_networks:bare"
    said = call(*arguments, "--epochs", epochs)
    assert said.status == 0, said.err
    assert "x as fast" in said.out
