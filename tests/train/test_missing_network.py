"""A finished run whose network is gone is refused, and written again once its summary is deleted."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from strucspars.train.pipeline import run_pipeline
from strucspars.train.recipe import Recipe
from strucspars.train.run_folder import RunFolder

Recipes = Callable[..., Recipe]
KINDS = {
    "strucspars": (),
    "dense": ("kind=dense",),
    "slimming": ("kind=slimming", "model.name=small_networks:slimmable", "slimming.target=0.5"),
    "averaged": ("stage2.ema=0.8", "finetune.form=grouped"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_network_is_refused_then_written_again_as_it_was(
    kind: str, small_recipe: Recipes, tmp_path: Path, assert_same_outcome: Callable[..., None]
) -> None:
    recipe = small_recipe("stage1.epochs=1", *KINDS[kind])
    summary = run_pipeline(recipe, tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    folder = RunFolder(tmp_path / "copy")
    folder.model_path.unlink()
    before = {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()}
    with pytest.raises(
        ValueError, match=r"model\.safetensors is missing, .*restore it from a copy, or delete .*summary"
    ):
        run_pipeline(recipe, folder.path)
    assert {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()} == before
    folder.summary_json_path.unlink()
    assert run_pipeline(recipe, folder.path) == summary
    assert_same_outcome(tmp_path / "run", tmp_path / "copy")
