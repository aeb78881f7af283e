"""`strucspars eval`: the accuracy that was recorded, and data that are not those of the run."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from table2_recipes import write_image_folder

import strucspars as ss
from strucspars.cli.evaluate import accuracy_text
from strucspars.core.plan import Preprocessing
from strucspars.data.folder import FolderSplit
from strucspars.models.catalogue import build_model
from strucspars.train.epochs import Accuracy

SMALL = "tiny_networks:small"


NAMED = ("--model", SMALL)


def test_eval_finds_the_recorded_accuracy_again(call: Any, finished: Path) -> None:
    said = call("eval", str(finished), *NAMED)
    assert said.status == 0
    assert "the same" in said.out
    document = json.loads(call("eval", str(finished), *NAMED, "data.batch_size=50", "--json").out)
    assert document["top1"] == pytest.approx(document["recorded_top1"])
    assert document["top5"] >= document["top1"]


def test_eval_does_not_change_the_network(call: Any, finished: Path) -> None:
    said = call("eval", str(finished), "sparsify.target=0.9")
    assert said.status == 2
    assert "only data.* and engine.*" in said.err


def test_a_network_named_for_eval_must_be_the_one_of_the_run(call: Any, finished: Path) -> None:
    said = call("eval", str(finished), "--model", "resnet18")
    assert said.status == 2
    assert SMALL in said.err


def test_eval_of_an_unfinished_run_is_an_error(call: Any, finished: Path) -> None:
    (finished / "summary.json").unlink()
    said = call("eval", str(finished))
    assert said.status == 2
    assert "not finished" in said.err


@pytest.fixture
def on_images(call: Any, tiny: tuple[str, ...]) -> Path:
    write_image_folder(Path("images"), num_classes=3, train_images=2)
    data = ("data.name=folder", "data.root=images", "data.image_size=28", "data.batch_size=4", "data.workers=0")
    assert call("run", "demo", *tiny, *data, "--quiet").status == 0
    return Path("runs/demo")


def test_eval_refuses_data_with_other_classes(call: Any, on_images: Path) -> None:
    assert "the same" in call("eval", str(on_images), *NAMED).out
    for split in ("train", "val"):
        Path("images", split, "class0002").rename(Path("images", split, "a"))
    said = call("eval", str(on_images), *NAMED)
    assert said.status == 2
    assert said.out == ""
    assert "output 0 means 'class0000' in the run, 'a' in the data; give the data of that run" in said.err
    assert "Traceback" not in said.err


def test_eval_of_a_run_of_before_classes_were_kept_compares_none(call: Any, on_images: Path) -> None:
    (on_images / "classes.json").unlink()
    assert "the same" in call("eval", str(on_images), *NAMED).out


def test_eval_takes_a_batch_size_beyond_the_images_and_all_memory(call: Any, on_images: Path) -> None:
    assert "the same" in call("eval", str(on_images), *NAMED, "data.batch_size=1000000000000").out


def test_the_text_tells_by_how_many_points_the_accuracy_is_another_now() -> None:
    text = accuracy_text(Path("model.safetensors"), "digits", Accuracy(top1=0.9, top5=0.99, loss=0.5), 0.925)
    assert [line.split() for line in text.splitlines()[1:]] == [
        ["top-1", "90.00%"],
        ["top-5", "99.00%"],
        ["loss", "0.5000"],
        ["recorded", "92.50%", "top-1:", "-2.50", "points", "now"],
    ]


def test_a_slimmed_network_has_its_recorded_accuracy_again(call: Any, tiny: tuple[str, ...]) -> None:
    overrides = [each for each in tiny if not each.startswith("model.")] + ["model.name=cifar-resnet8"]
    assert call("run", "demo", *overrides, "kind=slimming", "slimming.target=0.2", "--quiet").status == 0
    said = call("eval", "runs/demo")
    assert said.status == 0
    assert "the same" in said.out


def test_eval_compares_with_the_network_that_was_saved(call: Any, on_images: Path) -> None:
    # Of its last epoch a masked network may differ from what it was converted to.
    values = json.loads((on_images / "summary.json").read_text())
    saved = values["converted_top1"]
    for key in ("last_top1", "best_top1"):
        values["finetuned"][key] = 1 - saved
    (on_images / "summary.json").write_text(json.dumps(values))
    assert json.loads(call("eval", str(on_images), *NAMED, "--json").out)["recorded_top1"] == saved


SAVED = ("small.safetensors", "--model", SMALL)


@pytest.fixture
def saved(networks: Path) -> Path:
    """A compressed file of three classes, with its own preprocessing, and images for it."""
    torch.manual_seed(0)
    model = build_model(SMALL, num_classes=3)
    plan = replace(ss.one_shot_plan(model, target=0.3), preprocessing=Preprocessing(size=28, resize=32))
    ss.save(ss.convert_(model, plan), "small.safetensors", plan=plan)
    write_image_folder(Path("images"), num_classes=3, train_images=2, test_images=2)
    return Path("images")


def test_eval_scores_a_compressed_file_on_a_folder_prepared_as_it_says(call: Any, saved: Path) -> None:
    said = call("eval", *SAVED, "--data", "images", "--json")
    assert said.status == 0, said.err
    document = json.loads(said.out)
    model = ss.load("small.safetensors", build_model(SMALL, num_classes=3)).eval()
    split = FolderSplit(saved / "val", Preprocessing(size=28, resize=32), random=False, seed=0)
    images, labels = zip(*(split[0, index] for index in range(len(split))), strict=True)
    with torch.no_grad():
        right = model(torch.stack(images)).argmax(1) == torch.tensor(labels)
    assert document["top1"] == pytest.approx(right.float().mean().item())
    assert document == json.loads(call("eval", *SAVED, "--data", "images/val", "--json").out) | {"data": "images"}


def test_eval_of_a_file_says_what_it_lacks(call: Any, saved: Path) -> None:
    for arguments, words in (
        (SAVED, "--model NAME --data FOLDER"),
        (("small.safetensors",), "holds weights but no network; name the network with --model"),
        ((*SAVED, "--data", "nowhere"), "there is no folder nowhere"),
        ((*SAVED, "--data", "images/val/class0000"), "must hold a folder of images for every class"),
        ((*SAVED, "--data", "images", "data.workers=0"), "leave it out"),
    ):
        said = call("eval", *arguments)
        assert said.status == 2, said.err
        assert words in said.err


def test_eval_refuses_images_of_other_classes(call: Any, saved: Path) -> None:
    (saved / "val" / "one-more").mkdir()
    (saved / "val" / "class0000" / "0.png").rename(saved / "val" / "one-more" / "0.png")
    said = call("eval", *SAVED, "--data", "images")
    assert said.status == 2
    assert "has 4 folders of classes (class0000, class0001, class0002, ...), but the network has 3 outputs" in said.err


def test_data_of_a_function_are_made_only_if_it_is_named_again(
    call: Any, networks: Path, tiny: tuple[str, ...]
) -> None:
    code = "def digits(root):\n    from strucspars.data.catalogue import digits\n    return digits()\n"
    Path("own_data.py").write_text(code)
    data = "data.name=own_data:digits"
    assert call("run", "demo", *tiny, data, "--quiet").status == 0
    said = call("eval", "runs/demo", *NAMED)
    assert said.status == 2
    assert "takes its data from the function own_data:digits; code that a folder names is run only if" in said.err
    assert "the same" in call("eval", "runs/demo", *NAMED, data).out
    assert call("export", "runs/demo", *NAMED, "--json").status == 0
