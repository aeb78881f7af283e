"""What the other commands make of the folder that `strucspars compress --run` has left."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from strucspars.cli.run import run_state
from strucspars.models.catalogue import build_model
from strucspars.train.run_folder import ONE_SHOT_STATE, RunFolder

SMALL = "tiny_networks:small"


@pytest.fixture
def one_shot(call: Any, networks: Path) -> Path:
    torch.save(build_model(SMALL, num_classes=10).state_dict(), "weights.pt")
    options = ("--model", SMALL, "--classes", "10", "--image-shape", "3x16x24", "--target", "0.5")
    assert call("compress", "weights.pt", *options, "--run", "runs/first").status == 0
    return Path("runs/first")


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


def test_its_state_is_of_its_own_until_a_run_is_finished_there(one_shot: Path) -> None:
    state = run_state(one_shot)
    assert (state.is_one_shot, state.is_finished, state.words) == (True, False, ONE_SHOT_STATE)
    # Earlier versions let runs move in.
    RunFolder(one_shot).summary_json_path.touch()
    state = run_state(one_shot)
    assert (state.is_one_shot, state.is_finished) == (False, True)


def test_its_network_is_described(call: Any, one_shot: Path) -> None:
    said = call("summary", str(one_shot), "--model", SMALL)
    assert said.status == 0
    assert "ShuffledGroupConv2d" in said.out
    assert f"runs/first: {ONE_SHOT_STATE}; strucspars eval with data.root=FOLDER measures it" in said.out
    assert "goes on" not in said.out
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
    named = f"model.name={SMALL}"
    said = call("eval", str(one_shot), named)
    assert said.status == 2
    assert "needs a root" in said.err
    said = call("eval", str(one_shot), named, "data.name=digits", "engine.device=cpu")
    assert said.status == 0
    assert "top-1" in said.out
    assert f"recorded  {ONE_SHOT_STATE}" in said.out
    document = json.loads(call("eval", str(one_shot), named, "data.name=digits", "engine.device=cpu", "--json").out)
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
    assert "going on" not in said.out
    assert contents(one_shot) == before
