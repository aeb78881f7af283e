"""A run that cannot begin leaves the disk as it was."""

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from strucspars.data.catalogue import load_data
from strucspars.train.outcome import RunSummary
from strucspars.train.pipeline import run_pipeline
from strucspars.train.recipe import Recipe
from strucspars.train.run import RunInterrupted
from strucspars.train.run_folder import RunFolder, RunFolderBusy
from strucspars.train.side_by_side import run_side_by_side

Recipes = Callable[..., Recipe]
REFUSED = {
    "data": ("data.name=cifar10", "data.root=/nowhere"),
    "batch": ("data.batch_size=1348",),
    "batch beyond all memory": ("data.batch_size=1000000000000",),
    "network": ("model.name=no-such-network",),
    "weights": ("model.weights=/nowhere.pt",),
    "teacher": ("finetune.teacher=/nowhere",),
    "first stage": ("sparsify.from_run=/nowhere",),
    "target": ("sparsify.target=0.99",),
    "layers": ("sparsify.include=['no-such-layer']",),
    "slimming": ("kind=slimming",),
    "dense": ("kind=dense", "model.weights=/nowhere.pt"),
    "batch norms": ("kind=slimming", "model.name=small_networks:slimmable", "slimming.target=0.99"),
}


def contents(place: Path) -> dict[Path, bytes | None]:
    """All that is there; but for a lock file that was there, whose number of a process nobody minds."""
    return {
        path: path.read_bytes() if path.is_file() and path.name != ".lock" else None
        for path in sorted(place.rglob("*"))
    }


@pytest.fixture(scope="module")
def stopped(small_recipe: Recipes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped in its first epoch."""
    path = tmp_path_factory.mktemp("stopped") / "run"
    with pytest.raises(RunInterrupted):
        run_pipeline(small_recipe("stage1.epochs=1", "stage2.epochs=1"), path, should_stop=lambda: True)
    return path


@pytest.fixture(scope="module")
def finished(small_recipe: Recipes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("finished") / "run"
    run_pipeline(small_recipe("kind=dense", "stage2.epochs=1"), path)
    return path


@pytest.mark.parametrize("cause", REFUSED)
def test_where_nothing_was_nothing_is(cause: str, small_recipe: Recipes, tmp_path: Path) -> None:
    with pytest.raises((ValueError, OSError)):
        run_pipeline(small_recipe(*REFUSED[cause]), tmp_path / "deep" / "run")
    assert contents(tmp_path) == {}


def test_the_first_stage_of_another_recipe_leaves_nothing(stopped: Path, small_recipe: Recipes, tmp_path: Path) -> None:
    origin = tmp_path / "origin"
    run_pipeline(small_recipe("stage1.epochs=1", "stage2.epochs=1"), shutil.copytree(stopped, origin))
    recipe = small_recipe("stage2.epochs=1", f"sparsify.from_run={origin}")
    with pytest.raises(ValueError, match="another first stage"):
        run_pipeline(recipe, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("entry", [None, ".lock", "checkpoints", ".unfinished-x1"])
def test_a_folder_without_a_run_stays_as_it_was(entry: str | None, small_recipe: Recipes, tmp_path: Path) -> None:
    if entry in ("checkpoints", ".unfinished-x1"):
        (tmp_path / entry).mkdir()
    elif entry is not None:
        (tmp_path / entry).touch()
    before = contents(tmp_path)
    with pytest.raises(ValueError, match="train the teacher first"):
        run_pipeline(small_recipe(*REFUSED["teacher"]), tmp_path)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("with_lock", [True, False])
def test_a_stopped_run_keeps_all_that_it_has(
    with_lock: bool, stopped: Path, small_recipe: Recipes, tmp_path: Path
) -> None:
    run = shutil.copytree(stopped, tmp_path / "run")
    if not with_lock:  # a copy may leave out what is hidden
        (run / ".lock").unlink()
    before = contents(tmp_path)
    with pytest.raises((ValueError, OSError)):
        run_pipeline(small_recipe("stage1.epochs=1", "stage2.epochs=1", "data.name=cifar10", "data.root=/nowhere"), run)
    assert contents(tmp_path) == before
    assert run_pipeline(small_recipe("stage1.epochs=1", "stage2.epochs=1"), run).name == "small"


def test_a_finished_run_without_a_lock_file_is_read_and_gets_none(
    finished: Path, small_recipe: Recipes, tmp_path: Path
) -> None:
    run = shutil.copytree(finished, tmp_path / "run", ignore=shutil.ignore_patterns(".lock", "tensorboard", "dynamics"))
    before = contents(tmp_path)
    assert run_pipeline(small_recipe("kind=dense", "stage2.epochs=1"), run).kind == "dense"
    assert contents(tmp_path) == before


@pytest.mark.parametrize("is_stopped", [True, False])
def test_of_two_that_begin_at_once_the_later_is_refused_and_disturbs_nothing(
    is_stopped: bool, small_recipe: Recipes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, left = small_recipe("kind=dense", "stage2.epochs=1"), {}

    def overtaken(*arguments: Any, **options: Any) -> Any:
        monkeypatch.undo()
        with contextlib.suppress(RunInterrupted):
            run_pipeline(recipe, tmp_path / "run", should_stop=lambda: is_stopped)
        left.update(contents(tmp_path))
        return load_data(*arguments, **options)

    monkeypatch.setattr("strucspars.train.run.load_data", overtaken)
    with pytest.raises(RunFolderBusy, match=f"another process has just begun a run in {tmp_path / 'run'}; wait for it"):
        run_pipeline(recipe, tmp_path / "run")
    assert contents(tmp_path) == left != {}
    assert isinstance(run_pipeline(recipe, tmp_path / "run"), RunSummary)


def test_a_busy_folder_is_refused_before_data_and_networks_take_up_memory(
    small_recipe: Recipes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    monkeypatch.setattr("strucspars.train.run.load_data", None)
    with folder.locked(), pytest.raises(RunFolderBusy):
        run_pipeline(small_recipe(), folder.path)


def test_a_place_that_cannot_be_written_is_refused_before_the_data_are_read(
    small_recipe: Recipes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Not by taking the right away: the administrator may write anywhere.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setattr("strucspars.train.run.load_data", None)
    with pytest.raises(PermissionError, match=r"cannot make the run folder .*run: Permission denied; change its"):
        run_pipeline(small_recipe(), tmp_path / "run")


def test_beside_a_run_that_is_refused_another_goes_on(small_recipe: Recipes, tmp_path: Path) -> None:
    good = small_recipe("kind=dense", "stage2.epochs=1")
    recipes = {tmp_path / "runs" / "refused": small_recipe(*REFUSED["teacher"]), tmp_path / "runs" / "good": good}
    outcomes = run_side_by_side(recipes, jobs=2)
    assert [type(outcome) for outcome in outcomes.values()] == [ValueError, RunSummary]
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["good"]
