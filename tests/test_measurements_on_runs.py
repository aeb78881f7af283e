"""The scripts that measure recorded runs once more, on a small run whose accuracies are known."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import deployed_accuracy
import numpy as np
import pytest
import recalibration
import torch
from inference_layers import kind
from over_runs import measure_runs, measured_rows, read_sittings

from strucspars.nn.layers import is_grouped
from strucspars.train.outcome import RunSummary, read_summary
from strucspars.train.pipeline import run_pipeline
from strucspars.train.recipe_reading import read_recipe
from strucspars.train.run import Run
from strucspars.train.run_folder import RunFolder

OVERRIDES = (
    "model.name=cifar-resnet8",
    "stage1.epochs=1",
    "stage2.epochs=1",
    "sparsify.target=0.3",
    "finetune.recalibrate_bn=true",
    "engine.device=cpu",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "small"
    run_pipeline(read_recipe("demo", OVERRIDES), path)
    return path


def summary_of(run: Path) -> RunSummary:
    summary = read_summary(RunFolder(run))
    assert summary is not None
    return summary


def test_the_accuracies_without_finetuning_are_those_of_the_run(run: Path) -> None:
    row, summary = recalibration.without_finetuning(run, "nowhere"), summary_of(run)
    assert (row["run"], row["row"], row["seed"]) == ("small", "demo", 0)
    assert row["before_top1"] == summary.before_compression_top1
    assert row["compressed_top1"] == summary.compressed_top1
    assert row["recalibrated_top1"] == summary.recalibrated_top1
    assert row["finetuned_top1"] == summary.finetuned.last_top1
    # After one epoch the statistics are far behind the weights, so that recomputing them cannot go unnoticed.
    assert row["before_recalibrated_top1"] != row["before_top1"]
    assert row["recalibrated_top1"] != row["compressed_top1"]


def test_the_deployed_network_predicts_what_the_masked_one_does(run: Path) -> None:
    row, summary = deployed_accuracy.deployed(run, "nowhere"), summary_of(run)
    assert row["equal_to_masked"] == dict.fromkeys(("masked", "converted", "onnxruntime"), row["images"])
    assert row["top1"] == dict.fromkeys(("masked", "converted", "onnxruntime"), summary.converted_top1)
    assert (row["recorded_top1"], row["params"]) == (summary.converted_top1, summary.params.after)
    assert row["grouped_layers"] > 0


def test_the_masked_network_is_dense_with_zeros_where_connections_are_gone(run: Path) -> None:
    recipe = read_recipe("demo", OVERRIDES)
    this_run = Run(recipe, RunFolder(run))
    masked = deployed_accuracy.masked_network(this_run, RunFolder(run).model_path)
    plan = RunFolder(run).load_plan()
    assert plan is not None
    assert not any(is_grouped(module) for module in masked.modules())
    for name, layer in plan.layers.items():
        zeros = (masked.get_parameter(f"{name}.weight") == 0).all(dim=(2, 3)).double().mean().item()
        assert zeros == pytest.approx(1 - 1 / layer.num_groups)
    images, labels = deployed_accuracy.test_images(this_run)
    assert len(images) == len(labels) == 450  # of the digits, without what fills the last batch
    expected = masked(images).argmax(dim=1).numpy()
    np.testing.assert_array_equal(deployed_accuracy.predictions(masked, images), expected)


@pytest.mark.parametrize("measure", [recalibration.without_finetuning, deployed_accuracy.deployed])
def test_a_run_that_is_not_finished_is_refused_by_name(measure: Callable[[Path, str], object], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"unfinished is no finished run"):
        measure(tmp_path / "unfinished", "nowhere")


def test_what_was_measured_is_added_to_the_file_without_the_place_of_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "measured.json"
    accuracies = {"b": 1.0, "a": 2.0}

    def measured(*names: str) -> None:
        paths = [f"/secret/runs/{name}" for name in names]
        monkeypatch.setattr(sys, "argv", ["measure.py", "/secret/data", *paths, "--out", str(out)])
        measure_runs(
            lambda run, data: {"run": run.name, "data": data == "/secret/data", "top1": accuracies[run.name]},
            text="",
            packages=("torch",),
            out=tmp_path / "another.json",
        )

    measured("b", "a")
    accuracies["a"] = 3.0
    measured("a")
    assert [(row["run"], row["top1"], row["data"]) for row in measured_rows(out)] == [
        ("a", 3.0, True),
        ("b", 1.0, True),
    ]
    first, second = read_sittings(out)
    assert first["environment"]["command"].endswith("CIFAR10 b a")
    assert second["environment"]["versions"]["torch"] == torch.__version__.split("+")[0]
    assert "secret" not in json.dumps([first, second])
    assert str(out) in capsys.readouterr().out
    assert not (tmp_path / "another.json").exists()


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        ("Conv", "3 x 3 convolutions"),
        ("FusedConv", "3 x 3 convolutions"),
        ("Gather", "gathers"),
        ("ReorderOutput", "changes of layout"),
        ("Softmax", "the rest"),
    ],
)
def test_operations_of_a_profile_are_sorted_by_kind(operation: str, expected: str) -> None:
    shapes = [{"float": [1, 8, 14, 14]}, {"float": [16, 8, 3, 3]}]
    event = {"args": {"op_name": operation, "input_type_shape": shapes}}
    assert kind(event, {(16, 8, 3, 3): "3 x 3"}) == expected
