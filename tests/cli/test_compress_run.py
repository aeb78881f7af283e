"""`strucspars compress --run`: the folder is new, whole or not there, and other commands know what it is."""

import json
import os
from dataclasses import fields
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch

from strucspars.cli.compress import compress
from strucspars.cli.run import run_state
from strucspars.models.catalogue import build_model
from strucspars.sparsify.config import SparsifyOptions
from strucspars.train.recipe_reading import read_recipe
from strucspars.train.run_folder import ONE_SHOT, ONE_SHOT_STATE, RunFolder

SMALL = "tiny_networks:small"


@pytest.fixture
def arguments(networks: Path) -> tuple[str, ...]:
    torch.save(build_model(SMALL, num_classes=7).state_dict(), "weights.pt")
    options = ("--model", SMALL, "--classes", "7", "--image-shape", "3x16x16", "--target", "0.5")
    return ("compress", "weights.pt", *options)


def test_the_folder_is_told_and_can_be_reported(call: Any, arguments: tuple[str, ...]) -> None:
    said = call(*arguments, "--run", "runs/first")
    assert said.status == 0
    assert "strucspars report runs/first shows it" in said.out
    said = call("report", "runs/first", "--json")
    (told,) = json.loads(said.out)["runs"]
    assert (told["folder"], said.err) == ("runs/first", "")
    assert sorted(path.name for path in Path("runs").iterdir()) == ["first"]


def test_without_the_option_there_is_no_folder(call: Any, arguments: tuple[str, ...]) -> None:
    assert json.loads(call(*arguments, "--json").out)["run"] is None
    assert not [path for path in Path().iterdir() if path.is_dir() and path.name != "__pycache__"]


@pytest.mark.parametrize("name", ["mine", "mine/notes", "mine/notes/run"])
def test_what_is_there_is_kept_and_no_work_is_done(call: Any, arguments: tuple[str, ...], name: str) -> None:
    Path("mine").mkdir()
    Path("mine/notes").write_text("precious")
    said = call(*arguments, "--run", name, "--force")
    assert said.status == 2
    assert said.err.startswith(
        f"error: {name} exists" if "run" not in name else f"error: cannot make the run folder {name}"
    )
    assert said.err.count("\n") == 1
    assert Path("mine/notes").read_text() == "precious"
    assert not list(Path().glob("*.safetensors"))


def test_a_failure_leaves_nothing_of_the_folder(
    call: Any, arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("strucspars.io.arrays.save_arrays", full)
    said = call(*arguments, "--run", "runs/first")
    assert said.status == 1
    assert "cannot make the run folder runs/first: No space left on device" in said.err
    assert list(Path("runs").iterdir()) == []


def test_a_folder_that_appears_meanwhile_is_kept(
    call: Any, arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def meanwhile() -> dict[str, str]:
        Path("runs/first").mkdir()
        Path("runs/first/notes").write_text("precious")
        return {}

    monkeypatch.setattr("strucspars.bench.machine.environment", meanwhile)
    said = call(*arguments, "--run", "runs/first")
    assert said.status != 0
    assert "error: cannot make the run folder runs/first: Directory not empty; " in said.err
    assert [path.name for path in Path("runs/first").iterdir()] == ["notes"]


def test_a_link_to_nowhere_is_kept_and_no_work_is_done(call: Any, arguments: tuple[str, ...]) -> None:
    Path("link").symlink_to("nowhere")
    said = call(*arguments, "--run", "link")
    assert (said.status, said.err) == (
        2,
        "error: link exists already; name a new folder with --run, such as runs/one-shot\n",
    )
    assert Path("link").is_symlink()
    assert not list(Path().glob("*.safetensors"))


def test_the_folder_is_tried_before_the_work(
    call: Any, arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("elsewhere").mkdir()
    # Not by taking the right away: the administrator may write anywhere.
    allowed = os.access
    monkeypatch.setattr("os.access", lambda path, mode: Path(path).name != "elsewhere" and allowed(path, mode))
    said = call(*arguments, "--run", "elsewhere/run")
    assert said.status == 2
    assert said.err.startswith("error: cannot make the run folder elsewhere/run: Permission denied; ")
    assert said.err.count("\n") == 1
    assert not list(Path().glob("*.safetensors"))


def test_the_recipe_of_the_folder_has_what_was_asked_for(call: Any, arguments: tuple[str, ...]) -> None:
    options = ("--budget", "macs", "--min-channels-per-group", "2", "--image-shape", "3x16x24", "--target", "0.3")
    assert call(*arguments, *options, "--run", "runs/first").status == 0
    recipe = read_recipe("runs/first/recipe.yaml")
    assert (recipe.name, recipe.model.name, recipe.model.weights) == ("first", SMALL, "weights.pt")
    assert (recipe.sparsify.target, recipe.sparsify.budget) == (0.3, "macs")
    assert recipe.sparsify.min_channels_per_group == 2
    assert recipe.data.image_size == 24


def test_the_folder_tells_the_same_as_the_command(call: Any, arguments: tuple[str, ...]) -> None:
    said = json.loads(call(*arguments, "--run", "runs/first", "--json").out)
    kept = RunFolder("runs/first").remembered(ONE_SHOT)
    assert kept == {"classes": 7, "image_shape": [3, 16, 16], "lost_norm": said["lost_norm"]}


def test_compress_takes_every_option_of_sparsification_that_does_not_train() -> None:
    of_training = {"min_kept_norm", "decay", "controller", "lambda_step", "lambda_warmup", "method"}
    of_training |= {"schedule", "decide_by", "anneal"}
    of_recipes = {"fixed_levels", "largest_levels"}
    options = {option.name for option in fields(SparsifyOptions)} - of_training - of_recipes
    assert {name.removesuffix("s") if name == "layer_types" else name for name in options} <= set(
        signature(compress).parameters
    )


@pytest.mark.parametrize("place", [".", "..", "new/..", "link", "{cwd}"])
def test_a_folder_that_is_there_by_any_name_is_no_new_one(place: str, call: Any, arguments: tuple[str, ...]) -> None:
    Path("empty").mkdir()
    Path("link").symlink_to("empty")
    place = place.format(cwd=Path.cwd())
    said = call(*arguments, "--run", place)
    assert (said.status, said.err) == (
        2,
        f"error: {place} exists already; name a new folder with --run, such as runs/one-shot\n",
    )
    assert not Path("new").exists()
    assert not list(Path().glob("*.safetensors"))


@pytest.fixture
def one_shot(call: Any, networks: Path) -> Path:
    torch.save(build_model(SMALL, num_classes=10).state_dict(), "weights.pt")
    options = ("--model", SMALL, "--classes", "10", "--image-shape", "3x16x24", "--target", "0.5")
    assert call("compress", "weights.pt", *options, "--run", "runs/first").status == 0
    return Path("runs/first")


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


def test_its_state_is_of_its_own_until_a_run_is_finished_there(one_shot: Path) -> None:
    assert run_state(RunFolder(one_shot)) == ONE_SHOT_STATE
    # Earlier versions let runs move in.
    RunFolder(one_shot).summary_json_path.touch()
    assert run_state(RunFolder(one_shot)) == "finished"


def test_its_network_is_described(call: Any, one_shot: Path) -> None:
    said = call("summary", str(one_shot), "--model", SMALL)
    assert said.status == 0
    assert "ShuffledGroupConv2d" in said.out
    assert f"runs/first: {ONE_SHOT_STATE}; strucspars eval with data.root=FOLDER measures it" in said.out
    assert "resumes" not in said.out
    document = json.loads(call("summary", str(one_shot), "--model", SMALL, "--json").out)
    outcome = json.loads((one_shot / "decisions.json").read_text())["one_shot"]
    assert (document["state"], document["one_shot"]) == (ONE_SHOT_STATE, outcome)
    assert document["network"]["image_shape"] == outcome["image_shape"] == [3, 16, 24]


@pytest.mark.parametrize("command", [("eval",), ("summary",), ("export", "--format", "torch")])
def test_code_that_it_names_is_not_run(call: Any, one_shot: Path, command: tuple[str, ...]) -> None:
    said = call(*command, str(one_shot))
    assert said.status == 2
    assert f"takes its network from the function {SMALL}" in said.err


def test_its_network_is_evaluated_on_the_data_that_one_names(call: Any, one_shot: Path) -> None:
    named = ("--model", SMALL)
    said = call("eval", str(one_shot), *named)
    assert said.status == 2
    assert "needs a root" in said.err
    said = call("eval", str(one_shot), *named, "data.name=digits", "engine.device=cpu")
    assert said.status == 0
    assert "top-1" in said.out
    assert "recorded" not in said.out
    document = json.loads(call("eval", str(one_shot), *named, "data.name=digits", "engine.device=cpu", "--json").out)
    assert document["recorded_top1"] is None
    assert 0 <= document["top1"] <= 1


def test_its_network_is_exported(call: Any, one_shot: Path) -> None:
    said = call("export", str(one_shot), "--model", SMALL, "--format", "torch")
    assert said.status == 0
    assert (one_shot / "model.pt2").is_file()


@pytest.mark.parametrize("recipe", ["runs/first/recipe.yaml", "demo"])
def test_no_run_moves_in(call: Any, one_shot: Path, tiny: tuple[str, ...], recipe: str) -> None:
    before = contents(one_shot)
    said = call("run", recipe, *tiny, "data.name=digits", "--out", str(one_shot))
    assert said.status == 2
    assert said.err.startswith("error: runs/first holds a network of one-shot compression, which a run would overwrite")
    assert said.err.endswith("choose another folder with --out\n")
    assert "resuming" not in said.out
    assert contents(one_shot) == before
