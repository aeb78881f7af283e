"""What `strucspars reproduce` holds against each other, where a folder holds runs of several kinds."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from strucspars.cli.run_collection import collected
from strucspars.cli.running import run_name
from strucspars.runs.folder import RunFolder
from strucspars.training.outcome import RunSummary, read_summary
from strucspars.training.recipe_reading import read_recipe, recipe_yaml

RECORDED = Path(__file__).parents[2] / "results/cifar10/cifar10-resnet20-40"
BASE = "cifar10-resnet20-40"
MODERN, SLIMMING, SOLVER = f"{BASE}-modern", f"{BASE}-slimming", f"{BASE}-paper-solver"


def summary(name: str, seed: int, top1: float) -> RunSummary:
    recorded = read_summary(RunFolder(RECORDED))
    assert recorded is not None
    finetuned = dataclasses.replace(recorded.finetuned, last_top1=top1)
    return dataclasses.replace(recorded, name=name, seed=seed, finetuned=finetuned)


def finished(name: str, *overrides: str, top1: float = 0.5, path: str | None = None) -> Path:
    """A folder as of a finished run, without the run."""
    recipe = read_recipe(name, overrides)
    folder = RunFolder(path or Path("runs") / run_name(recipe))
    folder.create()
    folder.write_recipe(recipe_yaml(recipe))
    folder.write_json(folder.summary_json_path, summary(recipe.name, recipe.seed, top1).to_json())
    return folder.path


def gain(call: Any, row: str) -> dict[str, Any] | None:
    (found,) = json.loads(call("reproduce", "variants", "--collect", "--rows", row, "--json").out)["rows"]
    over_base: dict[str, Any] | None = found.get("over_base")
    return over_base


SHORT = ("stage2.epochs=6", "sparsify.lambda_step=null", "data.name=digits")
ONE_SHOT = ("stage1.epochs=0", "model.weights='there: a file.pt'")


@pytest.mark.parametrize("overrides", [(), SHORT])
@pytest.mark.parametrize(("base", "variant"), [(BASE, MODERN), (BASE, SLIMMING), (BASE, f"{BASE}-low-rate")])
def test_runs_with_the_same_changes_are_compared(
    call: Any, base: str, variant: str, overrides: tuple[str, ...]
) -> None:
    finished(base, *overrides, top1=0.5)
    finished(variant, *overrides, "data.root=there", top1=0.75)
    assert gain(call, variant) == {"mean": pytest.approx(25.0), "deviation": None, "pairs": 1}


def test_runs_without_a_first_stage_are_compared(call: Any) -> None:
    finished(BASE, *ONE_SHOT, top1=0.5)
    finished(MODERN, *ONE_SHOT, top1=0.75)
    assert gain(call, MODERN) == {"mean": pytest.approx(25.0), "deviation": None, "pairs": 1}
    finished(f"{BASE}-low-rate", "stage1.epochs=0", "model.weights=other.pt")
    assert gain(call, f"{BASE}-low-rate") is None
    assert "which was run with other model.weights" in call("reproduce", "variants", "--collect").out


@pytest.mark.parametrize(
    ("of_base", "of_variant"),
    [("stage2.epochs=6", "stage2.epochs=1"), ("stage2.epochs=160", "stage2.epochs=1"), ("stage2.lr=1", "seed=0")],
)
def test_runs_with_other_changes_are_not_compared(call: Any, of_base: str, of_variant: str) -> None:
    finished(BASE, of_base)
    finished(MODERN, of_variant)
    assert gain(call, MODERN) is None
    text = call("reproduce", "variants", "--collect").out
    assert f"{MODERN} is not compared with {BASE}, which was run with other {of_base.split('=')[0]}" in text
    assert "over its base: the mean" not in text


def test_a_change_of_what_the_base_does_not_read_is_a_change_all_the_same(call: Any) -> None:
    unused_in_base = "slimming.strength=1e-05"
    finished(BASE)
    finished(SLIMMING, unused_in_base)
    assert gain(call, SLIMMING) is None
    text = call("reproduce", "variants", "--collect").out
    assert f"{SLIMMING} is not compared with {BASE}, which was run with other slimming.strength" in text
    assert f"Not quite as in the recipes: {unused_in_base}." in text


def test_a_base_of_several_protocols_leaves_the_rest_of_the_table(call: Any, tiny: tuple[str, ...]) -> None:
    # With a first stage of its own, so that the base is not run before it.
    finished(BASE, "seed=5", "stage2.epochs=3")
    finished(BASE, "seed=6", "stage2.epochs=7")
    arguments = ("reproduce", "variants", "--rows", SOLVER, *tiny, "data.name=digits", "--quiet")
    said = call(*arguments)
    assert said.status == 0
    assert f"{SOLVER}  1" in said.out
    assert f"{SOLVER} is not compared with {BASE}: runs/{BASE}-seed5 and runs/{BASE}-seed6 are called" in said.out
    (row,) = json.loads(call(*arguments, "--json").out)["rows"]
    assert "over_base" not in row


@pytest.mark.parametrize("seeds", ["1", "0,1"])
def test_a_row_that_would_be_a_mixture_is_noticed_before_the_training(
    call: Any, tiny: tuple[str, ...], seeds: str
) -> None:
    finished(BASE, "data.name=digits", "stage2.epochs=7")
    said = call("reproduce", "table1", "--rows", BASE, *tiny, "data.name=digits", "--seeds", seeds)
    assert said.status == 2
    assert f"runs/{BASE} and runs/{BASE}-seed1 are called the same row, but the latter has " in said.err
    assert "stage2.epochs=1" in said.err
    assert [path.name for path in Path("runs").iterdir()] == [BASE]


def test_runs_of_no_row_are_nobodys_business(call: Any) -> None:
    finished(BASE)
    finished("demo", "sparsify.target=0.7", path="runs/demo-70")
    finished("imagenet-resnet50-35", path="runs/another-table")
    damaged = finished("demo", path="runs/damaged")
    (damaged / "summary.json").write_text("{")
    unreadable = finished("demo", path="runs/unreadable")
    (unreadable / "recipe.yaml").write_text("{")
    said = call("reproduce", "table1", "--collect", "--json")
    document = json.loads(said.out)
    assert [row["row"] for row in document["rows"]] == [BASE]
    assert (document["failed"], document["not_counted"]) == ([], [])
    text = call("reproduce", "table1", "--collect").out
    assert "not finished" not in text
    assert "not counted" not in text


def test_a_row_whose_recipe_is_damaged_is_named(call: Any) -> None:
    finished(BASE)
    (finished(BASE, "seed=1") / "recipe.yaml").write_text("{")
    said = call("reproduce", "table1", "--collect")
    assert f"not finished: runs/{BASE}-seed1 (" in said.out


def test_a_summary_of_another_run_is_damage(networks: Path) -> None:
    path = finished(BASE)
    shutil.copy(finished(BASE, "seed=1") / "summary.json", path)
    found = collected(Path("runs"), [BASE])
    assert [run.recipe.seed for run in found.rows[BASE]] == [1]
    assert "but its summary of cifar10-resnet20-40 with seed 1" in found.unreadable[path]
