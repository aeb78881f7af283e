"""`stage1.epochs=0`: trained weights are grouped as they are, then finetuned."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import strucspars as ss
from strucspars.models.catalogue import build_model
from strucspars.report.reading import read_run
from strucspars.train.checkpoint import load_named
from strucspars.train.outcome import RunSummary, read_summary
from strucspars.train.pipeline import run_pipeline
from strucspars.train.recipe import ModelRecipe, Recipe, StageRecipe
from strucspars.train.run import RunInterrupted
from strucspars.train.run_folder import RunFolder

Recipes = Callable[..., Recipe]


@pytest.fixture(scope="module")
def dense(small_recipe: Recipes, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    folder = tmp_path_factory.mktemp("dense") / "run"
    run_pipeline(small_recipe("kind=dense"), folder)
    return RunFolder(folder)


@pytest.fixture(scope="module")
def recipe(dense: RunFolder, small_recipe: Recipes) -> Recipe:
    return small_recipe("stage1.epochs=0", f"model.weights={dense.model_path}")


@pytest.fixture(scope="module")
def run(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    folder = tmp_path_factory.mktemp("one-shot") / "run"
    run_pipeline(recipe, folder)
    return RunFolder(folder)


def finished(folder: RunFolder) -> RunSummary:
    summary = read_summary(folder)
    assert summary is not None
    return summary


def test_the_plan_is_the_one_shot_plan_of_the_given_weights(dense: RunFolder, run: RunFolder) -> None:
    network = ss.load(dense.model_path, build_model("small_networks:plain", num_classes=10, image_shape=(3, 16, 16)))
    plan = run.load_plan()
    assert plan is not None
    assert plan.preprocessing is not None
    assert (
        replace(plan, preprocessing=None).to_json()
        == ss.one_shot_plan(
            network, ss.SparsifyConfig(target=0.4, seed=3), example_inputs=torch.zeros(1, 3, 16, 16)
        ).to_json()
    )
    saved = load_named(run.checkpoints, "sparsified")
    assert saved is not None
    assert all(torch.equal(saved["model"][name], value) for name, value in network.state_dict().items())


def test_only_the_compression_and_the_second_stage_have_rows(dense: RunFolder, run: RunFolder) -> None:
    assert [row["stage"] for row in run.metrics()] == ["compress", "finetune", "finetune"]
    summary = finished(run)
    assert summary.sparsified is None
    assert summary.before_compression_top1 == finished(dense).converted_top1
    assert summary.removed_param_fraction >= 0.4


def test_one_that_is_stopped_ends_as_if_it_had_not_been(
    recipe: Recipe,
    run: RunFolder,
    tmp_path: Path,
    stop_after: Callable[[int], Callable[[], bool]],
    assert_same_outcome: Callable[..., None],
) -> None:
    with pytest.raises(RunInterrupted):
        run_pipeline(recipe, tmp_path / "run", should_stop=stop_after(4))
    run_pipeline(recipe, tmp_path / "run")
    assert_same_outcome(tmp_path / "run", run.path)


def test_another_run_can_take_the_grouped_weights_over(
    recipe: Recipe, run: RunFolder, dense: RunFolder, small_recipe: Recipes, tmp_path: Path
) -> None:
    options = ("stage1.epochs=0", f"model.weights={dense.model_path}", f"sparsify.from_run={run.path}")
    again = run_pipeline(small_recipe(*options), tmp_path / "again")
    assert again.finetuned == finished(run).finetuned


def test_a_report_of_it_misses_nothing(run: RunFolder) -> None:
    assert read_run(run.path).is_finished


def test_warmups_of_a_stage_that_is_left_out_do_not_matter(small_recipe: Recipes) -> None:
    options = ("stage1.epochs=0", "model.weights=there.pt", "stage1.lr_warmup=0.5")
    recipe = small_recipe(*options, "sparsify.lambda_warmup=0.3")
    assert recipe.sparsify_config(steps_per_epoch=7).penalty_schedule.warmup_epochs == 0
    trained = ModelRecipe(weights="there.pt")
    assert Recipe(name="mine", model=trained, stage1=StageRecipe(epochs=0)).stage1.epochs == 0


def test_fresh_weights_are_not_worth_grouping(small_recipe: Recipes) -> None:
    with pytest.raises(ValueError, match=r"they are fresh; name trained ones with model\.weights, or train"):
        small_recipe("stage1.epochs=0")


def test_slimming_needs_a_first_stage(small_recipe: Recipes) -> None:
    with pytest.raises(ValueError, match=r"stage1\.epochs must be at least 1 with kind slimming, got 0"):
        small_recipe("kind=slimming", "stage1.epochs=0", "model.weights=there.pt")


@pytest.mark.parametrize("kind", ["dense", "slimming", "strucspars"])
def test_no_run_is_without_a_second_stage(kind: str, small_recipe: Recipes) -> None:
    with pytest.raises(ValueError, match=r"stage2\.epochs must be a whole number from 1 on, got 0"):
        small_recipe(f"kind={kind}", "stage2.epochs=0")


def test_a_compressed_file_is_finetuned_by_its_own_plan(run: RunFolder, small_recipe: Recipes, tmp_path: Path) -> None:
    options = (f"model.weights={run.model_path}", "sparsify.target=0.1")
    summary = run_pipeline(small_recipe(*options), tmp_path / "more")
    folder, plan = RunFolder(tmp_path / "more"), run.load_plan()
    assert plan is not None
    assert folder.load_plan() == plan
    assert [row["stage"] for row in folder.metrics()] == ["compress", "finetune", "finetune"]
    # It starts as the network that was saved: nothing is lost by taking it up again.
    assert summary.before_compression_top1 == summary.compressed_top1 == finished(run).converted_top1
    assert summary.target == 0.4


def test_a_compressed_file_trained_dense_would_not_stay_compressed(
    run: RunFolder, small_recipe: Recipes, tmp_path: Path
) -> None:
    for kind in ("dense", "slimming"):
        recipe = small_recipe(f"kind={kind}", f"model.weights={run.model_path}", "model.name=small_networks:plain")
        with pytest.raises(ValueError, match=f"compressed already, and a run of kind {kind} would fill its zeros"):
            run_pipeline(recipe, tmp_path / kind)
        assert not (tmp_path / kind).exists()


def test_calibration_refits_the_network_that_is_finetuned(
    dense: RunFolder, run: RunFolder, small_recipe: Recipes, tmp_path: Path, stop_after: Callable[[int], Any]
) -> None:
    options = ("stage1.epochs=0", f"model.weights={dense.model_path}", "sparsify.calibration=128")
    recipe = small_recipe(*options, "finetune.teacher=weights")
    with pytest.raises(RunInterrupted):
        run_pipeline(recipe, tmp_path / "run", should_stop=stop_after(3))
    summary = run_pipeline(recipe, tmp_path / "run")
    plain = finished(run)
    assert summary.removed_param_fraction >= 0.4
    assert summary.compressed_top1 is not None
    assert plain.compressed_top1 is not None
    assert summary.compressed_top1 > plain.compressed_top1
    assert summary.before_compression_top1 == plain.before_compression_top1
    plan = RunFolder(tmp_path / "run").load_plan()
    assert plan is not None
    assert plan.predicted_divergence is not None


def test_calibration_takes_the_place_of_a_first_stage(small_recipe: Recipes) -> None:
    with pytest.raises(ValueError, match=r"sparsify\.calibration 8 takes the place of the first stage"):
        small_recipe("sparsify.calibration=8")


def test_sparse_training_by_an_importance_of_data_resumes_exactly(
    small_recipe: Recipes, tmp_path: Path, stop_after: Callable[[int], Any]
) -> None:
    recipe = small_recipe("sparsify.importance=activation", "sparsify.calibration=64")
    summary = run_pipeline(recipe, tmp_path / "whole")
    with pytest.raises(RunInterrupted):
        run_pipeline(recipe, tmp_path / "stopped", should_stop=stop_after(3))
    run_pipeline(recipe, tmp_path / "stopped")
    whole, stopped = (RunFolder(tmp_path / name) for name in ("whole", "stopped"))
    assert summary.removed_param_fraction >= 0.4
    assert stopped.load_plan() == whole.load_plan()
    assert stopped.model_path.read_bytes() == whole.model_path.read_bytes()


def test_weights_that_are_no_dense_network_do_not_teach(run: RunFolder, small_recipe: Recipes, tmp_path: Path) -> None:
    recipe = small_recipe(f"model.weights={run.model_path}", "finetune.teacher=weights")
    with pytest.raises(ValueError, match=r"finetune\.teacher is weights, .* compressed already"):
        run_pipeline(recipe, tmp_path / "run")
    with pytest.raises(ValueError, match="but that is not named"):
        run_pipeline(small_recipe("finetune.teacher=weights"), tmp_path / "run")
