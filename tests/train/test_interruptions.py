"""Stops, full disks, diverging losses and busy folders: a clear error each, and nothing lost."""

import errno
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from strucspars.io import files
from strucspars.nn.layers import kept_connections
from strucspars.train import checkpoint as checkpoints
from strucspars.train.engine import Engine
from strucspars.train.observer import RunObserver
from strucspars.train.pipeline import run_pipeline
from strucspars.train.recipe import Recipe
from strucspars.train.run import RunInterrupted, TrainingDiverged
from strucspars.train.run_folder import RunFolder, RunFolderBusy
from strucspars.train.stage import Stage

STEPS = 6
QUESTIONS_PER_EPOCH = STEPS + 1
Recipes = Callable[..., Recipe]
Comparison = Callable[..., None]
Stops = Callable[[int], Callable[[], bool]]


def hard(small_recipe: Recipes, form: str) -> Recipe:
    return small_recipe(
        "model.name=small_networks:with_dropout", "stage1.ema=0.8", "stage2.ema=0.8", f"finetune.form={form}"
    )


@pytest.fixture(scope="module")
def whole(small_recipe: Recipes, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of either form that nobody stopped."""
    paths = {form: tmp_path_factory.mktemp("whole") / form for form in ("masked", "grouped")}
    for form, path in paths.items():
        run_pipeline(hard(small_recipe, form), path)
    return paths


@pytest.mark.parametrize(
    ("form", "stops"),
    [
        ("masked", [1]),
        ("masked", [STEPS]),
        ("masked", [QUESTIONS_PER_EPOCH]),
        ("masked", [QUESTIONS_PER_EPOCH + 4]),
        ("masked", [2 * QUESTIONS_PER_EPOCH]),
        ("masked", [2 * QUESTIONS_PER_EPOCH + 3]),
        ("grouped", [3 * QUESTIONS_PER_EPOCH + STEPS - 1]),
        ("grouped", [3, 2, 8, 1, 9, 1, 1]),
    ],
)
def test_a_run_that_was_stopped_goes_on_to_the_same_end(
    form: str,
    stops: list[int],
    small_recipe: Recipes,
    whole: dict[str, Path],
    tmp_path: Path,
    assert_same_outcome: Comparison,
    stop_after: Stops,
) -> None:
    recipe = hard(small_recipe, form)
    for questions in stops:
        with pytest.raises(RunInterrupted, match=r"stopped (in|after) epoch [12] of (sparsify|finetune)"):
            run_pipeline(recipe, tmp_path / "run", should_stop=stop_after(questions))
    run_pipeline(recipe, tmp_path / "run")
    assert_same_outcome(whole[form], tmp_path / "run")


@pytest.mark.parametrize("form", ["masked", "grouped"])
def test_adamw_goes_on_exactly_and_leaves_pruned_weights_at_zero(
    form: str, small_recipe: Recipes, tmp_path: Path, assert_same_outcome: Comparison, stop_after: Stops
) -> None:
    adamw = ("stage2.optimizer=adamw", "stage2.lr=0.003", "stage2.weight_decay=0.01", f"finetune.form={form}")
    recipe = small_recipe(*adamw)
    for questions in (2 * QUESTIONS_PER_EPOCH + 3, 2, 4):
        with pytest.raises(RunInterrupted, match=r"stopped (in|after) epoch [12] of finetune"):
            run_pipeline(recipe, tmp_path / "stopped", should_stop=stop_after(questions))
    for name in ("stopped", "whole"):
        run_pipeline(recipe, tmp_path / name)
    assert_same_outcome(tmp_path / "whole", tmp_path / "stopped")
    if form == "masked":
        saved, plan = RunFolder(tmp_path / "whole").load_checkpoint(), RunFolder(tmp_path / "whole").load_plan()
        assert saved is not None
        assert plan is not None
        for name, layer in plan.layers.items():
            assert not saved["model"][f"{name}.weight"][~kept_connections(layer)].any()


def test_a_stop_in_the_middle_of_an_epoch_is_saved_to_the_step(
    small_recipe: Recipes, tmp_path: Path, stop_after: Stops
) -> None:
    with pytest.raises(RunInterrupted, match="stopped in epoch 2 of sparsify"):
        run_pipeline(hard(small_recipe, "masked"), tmp_path / "run", should_stop=stop_after(QUESTIONS_PER_EPOCH + 4))
    saved = RunFolder(tmp_path / "run").load_checkpoint()
    assert saved is not None
    assert (saved["stage"], saved["done_epochs"], saved["done_steps"], saved["metrics_rows"]) == ("sparsify", 1, 4, 1)


def test_a_run_that_goes_on_elsewhere_says_where_it_was_before(
    small_recipe: Recipes, tmp_path: Path, stop_after: Stops
) -> None:
    recipe, folder = small_recipe("kind=dense"), RunFolder(tmp_path / "run")
    with pytest.raises(RunInterrupted):
        run_pipeline(recipe, folder.path, should_stop=stop_after(QUESTIONS_PER_EPOCH))
    here = folder.read_json(folder.environment_path)
    elsewhere = here | {"device": "another GPU"}
    folder.write_json(folder.environment_path, elsewhere)
    run_pipeline(recipe, folder.path)
    assert folder.read_json(folder.environment_path) == here | {"earlier": [elsewhere]}


def test_a_run_goes_on_without_knowing_where_it_was_before(
    small_recipe: Recipes, tmp_path: Path, stop_after: Stops, caplog: pytest.LogCaptureFixture
) -> None:
    recipe, folder = small_recipe("kind=dense"), RunFolder(tmp_path / "run")
    with pytest.raises(RunInterrupted):
        run_pipeline(recipe, folder.path, should_stop=stop_after(QUESTIONS_PER_EPOCH))
    folder.environment_path.write_text("{")
    run_pipeline(recipe, folder.path)
    assert "environment.json: is not valid JSON" in caplog.text
    assert "the machine that the run began on is not known" in caplog.text
    assert "earlier" not in folder.read_json(folder.environment_path)


class Diary(RunObserver):
    """Notes where stages go on from, and how runs end."""

    def __init__(self) -> None:
        self.entries: list[str] = []

    def stage_started(self, run: str, stage: str, *, epochs: int, steps: int, done_epochs: int) -> None:
        self.entries.append(f"{run}: {stage}, {done_epochs} of {epochs} epochs are done")

    def run_ended(self, run: str, words: str) -> None:
        self.entries.append(f"{run}: {words}")


def test_observers_are_told_where_a_run_goes_on_and_how_it_ends(
    small_recipe: Recipes, tmp_path: Path, stop_after: Stops
) -> None:
    recipe, diary = small_recipe("kind=dense"), Diary()
    with pytest.raises(RunInterrupted, match="after epoch 1"):
        run_pipeline(recipe, tmp_path / "run", observers=[diary], should_stop=stop_after(QUESTIONS_PER_EPOCH))
    summary = run_pipeline(recipe, tmp_path / "run", observers=[diary])
    with pytest.raises(ValueError, match="another recipe"):
        run_pipeline(small_recipe("kind=dense", "seed=4"), tmp_path / "run", observers=[diary])
    assert diary.entries == [
        "run: train, 0 of 2 epochs are done",
        "run: stopped",
        "run: train, 1 of 2 epochs are done",
        f"run: finished, accuracy {summary.converted_top1:.2%}",
        "run: failed",
    ]


@pytest.mark.parametrize("fatal_write", [1, 2, 3])
def test_a_full_disk_keeps_the_checkpoint_before_and_the_run_goes_on_later(
    fatal_write: int,
    small_recipe: Recipes,
    whole: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    assert_same_outcome: Comparison,
) -> None:
    writes = 0
    replace = files.replace_file

    @contextmanager
    def replace_until_full(path: Path, *, former: Path | None) -> Iterator[Path]:
        nonlocal writes
        writes += path.name == "last.pt"
        with replace(path, former=former) as unfinished:
            yield unfinished
            if writes >= fatal_write:
                unfinished.write_bytes(unfinished.read_bytes()[:40])
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    recipe = hard(small_recipe, "masked")
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "replace_file", replace_until_full)
        with pytest.raises(OSError, match=r"last\.pt: No space left on device; (.* kept; )?free some space") as caught:
            run_pipeline(recipe, tmp_path / "run")
    assert caught.value.errno == errno.ENOSPC
    saved = RunFolder(tmp_path / "run").load_checkpoint()
    if fatal_write == 1:
        assert saved is None
    else:
        assert saved is not None
        done = {2: ("sparsify", 1), 3: ("sparsify", 2)}[fatal_write]
        assert (saved["stage"], saved["done_epochs"]) == done
    run_pipeline(recipe, tmp_path / "run")
    assert_same_outcome(whole["masked"], tmp_path / "run")


def test_a_damaged_last_checkpoint_gives_way_to_the_one_before(
    small_recipe: Recipes, whole: dict[str, Path], tmp_path: Path, assert_same_outcome: Comparison, stop_after: Stops
) -> None:
    recipe = hard(small_recipe, "masked")
    with pytest.raises(RunInterrupted):
        run_pipeline(recipe, tmp_path / "run", should_stop=stop_after(3 * QUESTIONS_PER_EPOCH))
    last = tmp_path / "run" / "checkpoints" / "last.pt"
    content = bytearray(last.read_bytes())
    content[len(content) // 2] ^= 1
    last.write_bytes(content)
    run_pipeline(recipe, tmp_path / "run")
    assert_same_outcome(whole["masked"], tmp_path / "run")


def finite(state: dict[str, torch.Tensor]) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in state.values())


@pytest.mark.parametrize(
    ("overrides", "epoch"),
    [
        # In the middle of an epoch; and in its last step, whose loss was still a number.
        (["stage1.lr=1e18"], "epoch 1 of sparsify"),
        (["stage1.lr=2e18", "data.batch_size=1347"], "epoch 1 of sparsify"),
        (["stage2.lr=1e18"], "epoch 1 of finetune"),
        (["stage2.lr=2e18", "data.batch_size=1347"], "epoch 1 of finetune"),
    ],
)
def test_a_loss_that_is_no_number_names_epoch_and_remedy_and_spoils_no_checkpoint(
    overrides: list[str], epoch: str, small_recipe: Recipes, tmp_path: Path
) -> None:
    with pytest.raises(TrainingDiverged, match=f"{epoch}.*lower learning rate") as caught:
        run_pipeline(small_recipe(*overrides), tmp_path / "run")
    assert "nan" in str(caught.value) or "inf" in str(caught.value)
    saved = RunFolder(tmp_path / "run").load_checkpoint()
    if "finetune" in epoch:
        assert saved is not None
        assert (saved["stage"], saved["done_epochs"]) == ("sparsify", 2)
        assert finite(saved["model"])
    else:
        assert saved is None


HOLDER = """
import fcntl, sys
with open(sys.argv[1], "w") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    file.write("4242"), file.flush()
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_process_is_refused_until_the_first_one_is_gone(small_recipe: Recipes, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    command = [sys.executable, "-c", HOLDER, str(folder / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(RunFolderBusy, match="in use by process 4242"):
            run_pipeline(small_recipe(), folder)
        holder.kill()
    assert sorted(path.name for path in folder.iterdir() if path.is_file()) == [".lock"]
    assert run_pipeline(small_recipe("stage1.epochs=1", "stage2.epochs=1"), folder).name == "small"


def test_a_running_run_refuses_a_second_one_in_its_folder(small_recipe: Recipes, tmp_path: Path) -> None:
    refusals = []

    def begin_another() -> bool:
        with pytest.raises(RunFolderBusy, match=f"in use by process {os.getpid()}") as caught:
            run_pipeline(small_recipe(), tmp_path / "run")
        refusals.append(caught.value)
        return True

    with pytest.raises(RunInterrupted):
        run_pipeline(small_recipe(), tmp_path / "run", should_stop=begin_another)
    assert len(refusals) == 1


def test_a_foreign_folder_is_left_alone(small_recipe: Recipes, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(ValueError, match=r"holds thesis\.tex, but no recipe\.yaml: it is not a run folder"):
        run_pipeline(small_recipe(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_file_in_the_way_is_an_error_that_names_it(small_recipe: Recipes, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises((ValueError, OSError), match=r"file.*choose another path"):
            run_pipeline(small_recipe(), path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_unwritable_folder_is_an_error_that_names_it(small_recipe: Recipes, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(PermissionError, match="cannot make the run folder"):
            run_pipeline(small_recipe(), tmp_path / "run")
    finally:
        tmp_path.chmod(0o700)


@pytest.mark.parametrize("rate", ["1e18", "1e6"])
def test_a_stop_after_the_weights_are_spoilt_does_not_replace_a_good_checkpoint(
    rate: str, small_recipe: Recipes, tmp_path: Path
) -> None:
    stopped = tmp_path / "run"
    recipe = small_recipe("kind=dense", f"stage2.lr={rate}", "stage2.epochs=3")
    asked = iter(range(100))
    with pytest.raises(TrainingDiverged, match="lower learning rate"):
        run_pipeline(recipe, stopped, should_stop=lambda: next(asked) >= 4)
    assert RunFolder(stopped).load_checkpoint() is None
    assert not RunFolder(stopped).is_begun


def test_a_stop_after_another_process_has_spoilt_sums_saves_nothing_either(
    small_recipe: Recipes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "summed", lambda self, values: values + torch.nan)
    asked = iter(range(100))
    with pytest.raises(TrainingDiverged, match="became nan in epoch 1"):
        run_pipeline(small_recipe("kind=dense"), tmp_path / "run", should_stop=lambda: next(asked) >= 4)
    assert RunFolder(tmp_path / "run").load_checkpoint() is None


def check_weights(model: nn.Module) -> None:
    """As in the middle of an epoch whose losses were numbers so far."""
    engine = SimpleNamespace(summed=lambda values: values)
    stage: Any = SimpleNamespace(
        _name="train",
        _model=model,
        _step=SimpleNamespace(sums=torch.ones(2)),
        _run=SimpleNamespace(engine=engine),
    )
    stage._check_finite = partial(Stage._check_finite, stage)
    Stage._check_weights(stage, 1, 0.1)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_weight_that_is_no_number_is_enough_to_save_nothing(value: float) -> None:
    last = nn.Linear(2, 2)
    model = nn.Sequential(nn.Linear(2, 2), last)
    check_weights(model)
    with torch.no_grad():
        last.weight[0, 1] = value
    with pytest.raises(TrainingDiverged, match="in epoch 1 of train"):
        check_weights(model)


def test_a_parameter_of_no_numbers_is_no_obstacle_to_a_stop() -> None:
    model = nn.Linear(2, 2)
    model.register_parameter("empty", nn.Parameter(torch.empty(0)))
    check_weights(model)
