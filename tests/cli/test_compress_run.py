"""`strucspars compress --run`: the folder is new, and whole or not there."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from strucspars.models.catalogue import build_model

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
    assert (told["problems"], said.err) == ([], "")
    assert sorted(path.name for path in Path("runs").iterdir()) == ["first"]


def test_without_the_option_there_is_no_folder(call: Any, arguments: tuple[str, ...]) -> None:
    assert json.loads(call(*arguments, "--json").out)["run"] is None
    assert not [path for path in Path().iterdir() if path.is_dir() and path.name != "__pycache__"]


def test_an_empty_folder_is_taken(call: Any, arguments: tuple[str, ...]) -> None:
    Path("mine").mkdir()
    assert call(*arguments, "--run", "mine").status == 0
    assert Path("mine/plan.json").is_file()


@pytest.mark.parametrize("name", ["mine", "mine/notes", "mine/notes/run"])
def test_what_is_there_is_kept_and_no_work_is_done(call: Any, arguments: tuple[str, ...], name: str) -> None:
    Path("mine").mkdir()
    Path("mine/notes").write_text("precious")
    said = call(*arguments, "--run", name, "--force")
    assert said.status == 2
    assert said.err.startswith(f"error: {name} ")
    assert "--run" in said.err
    assert said.err.count("\n") == 1
    assert Path("mine/notes").read_text() == "precious"
    assert not list(Path().glob("*.safetensors"))


def test_a_failure_leaves_nothing_of_the_folder(
    call: Any, arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("strucspars.cli.one_shot_folder.save_arrays", full)
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

    monkeypatch.setattr("strucspars.cli.one_shot_folder.environment", meanwhile)
    said = call(*arguments, "--run", "runs/first")
    assert said.status != 0
    assert "name a new folder with --run" in said.err
    assert [path.name for path in Path("runs/first").iterdir()] == ["notes"]
