"""A finished run whose network is gone: written again where there is a checkpoint, refused where there is none."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from strucspars.train import pipeline
from strucspars.train.pipeline import run_pipeline
from strucspars.train.recipe import Recipe
from strucspars.train.run_folder import RunFolder

Recipes = Callable[..., Recipe]
KINDS = {
    "strucspars": (),
    "dense": ("kind=dense",),
    "slimming": ("kind=slimming", "model.name=cifar-resnet8", "slimming.target=0.5"),
    "averaged": ("stage2.ema=0.8", "finetune.form=grouped"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_network_is_written_again_as_it_was(
    kind: str,
    small_recipe: Recipes,
    tmp_path: Path,
    assert_same_outcome: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    recipe = small_recipe("stage1.epochs=1", *KINDS[kind])
    summary = run_pipeline(recipe, tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    folder = RunFolder(tmp_path / "copy")
    folder.model_path.unlink()
    assert run_pipeline(recipe, folder.path) == summary
    assert_same_outcome(tmp_path / "run", tmp_path / "copy")
    assert f"{folder.model_path} is missing; it is written again from the last checkpoint" in caplog.text


def test_a_network_that_is_not_written_again_well_leaves_the_run_unfinished(
    small_recipe: Recipes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, folder = small_recipe("kind=dense", "stage2.epochs=1"), RunFolder(tmp_path / "run")
    summary = run_pipeline(recipe, folder.path)
    folder.model_path.unlink()
    with monkeypatch.context() as patched:
        patched.setattr(pipeline, "ROUNDING_OF_LOSS", -1.0)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="is not the network that was trained"):
                run_pipeline(recipe, folder.path)
    assert run_pipeline(recipe, folder.path).finetuned == summary.finetuned


def test_without_network_and_checkpoint_a_finished_run_is_refused_and_stays_as_it_is(
    small_recipe: Recipes, tmp_path: Path
) -> None:
    recipe = small_recipe("kind=dense", "stage2.epochs=1")
    run_pipeline(recipe, tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    folder.model_path.unlink()
    for checkpoint in folder.checkpoints.glob("*.pt"):
        checkpoint.unlink()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.name != ".lock"}
    with pytest.raises(ValueError, match=r"model\.safetensors is missing, .*no checkpoint.*; restore it from a copy"):
        run_pipeline(recipe, folder.path)
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.name != ".lock"}
    assert before == after
    folder.summary_json_path.unlink()
    run_pipeline(recipe, folder.path)
    assert folder.model_path.is_file()
