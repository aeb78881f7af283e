"""`strucspars eval`: the accuracy that was recorded, and data that are not those of the run."""

import json
from pathlib import Path
from typing import Any

import pytest
from table2_recipes import write_image_folder

from strucspars.cli.evaluate import accuracy_text
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
