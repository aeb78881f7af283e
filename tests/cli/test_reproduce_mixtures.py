"""What `strucspars reproduce` holds against each other, where a folder holds runs of several kinds."""

import dataclasses
import json
import shutil
import statistics
from pathlib import Path
from typing import Any

import pytest

from strucspars.cli.reproduce import check_planned, planned_rows, reproduced_table
from strucspars.cli.run import run_name
from strucspars.cli.run_collection import collected
from strucspars.paper.noise import NOISE
from strucspars.train.outcome import RunSummary, read_summary
from strucspars.train.recipe_reading import read_recipe, recipe_yaml
from strucspars.train.run_folder import RunFolder

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


def test_the_document_has_the_numbers_of_ours_and_of_the_paper(call: Any) -> None:
    # A network that has learned nothing counts like the others.
    tops = (0.0, 0.5)
    for seed, top1 in enumerate(tops):
        finished(BASE, f"seed={seed}", top1=top1)
    (row,) = json.loads(call("reproduce", "table1", "--collect", "--json").out)["rows"]
    assert row["top1"] == {
        "mean": pytest.approx(25.0),
        "deviation": pytest.approx(100 * statistics.stdev(tops)),
        "paper": pytest.approx(91.42),
        "paper_deviation": pytest.approx(0.04),
        "difference": pytest.approx(25.0 - 91.42),
        "verdict": "noise",  # with such a spread
    }


def test_a_damaged_run_is_in_the_document_too(call: Any) -> None:
    finished(BASE)
    damaged = finished(BASE, "seed=1")
    (damaged / "summary.json").write_text("{")
    (failure,) = json.loads(call("reproduce", "table1", "--collect", "--json").out)["failed"]
    assert failure["folder"] == str(damaged)
    assert "repair, move or delete it" in failure["error"]


def test_the_list_tells_a_run_that_goes_on_from_a_finished_one(call: Any) -> None:
    finished(BASE)
    begun = RunFolder(finished(BASE, "seed=1"))
    begun.summary_json_path.unlink()
    begun.append_metrics({"stage": "sparsify", "epoch": 1, "test_top1": 0.5, "test_top5": 0.9, "seconds": 2.0})
    said = call("reproduce", "table1", "--list", "--rows", BASE, "--seeds", "0,1,2", "--json")
    assert [row["is_finished"] for row in json.loads(said.out)["rows"]] == [True, False, False]


def test_an_accuracy_of_nothing_is_an_accuracy(call: Any) -> None:
    finished(BASE, top1=0.0)
    finished(MODERN, top1=0.75)
    assert gain(call, MODERN) == {"mean": pytest.approx(75.0), "deviation": None, "pairs": 1}


def test_a_summary_of_another_row_is_damage(networks: Path) -> None:
    path = finished(BASE)
    shutil.copy(finished(MODERN) / "summary.json", path)
    found = collected(Path("runs"), [BASE, MODERN])
    assert list(found.rows) == [MODERN]
    assert f"but its summary of {MODERN} with seed 0" in found.unreadable[path]


def test_a_run_that_may_not_be_read_is_named_and_the_others_counted(
    networks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked = finished(BASE, "seed=1")
    finished(BASE, "seed=2")

    # Not by taking the right away: the administrator may read anything.
    def read(folder: RunFolder) -> RunSummary | None:
        if folder.path == locked:
            raise PermissionError(13, "Permission denied", str(folder.summary_json_path))
        return read_summary(folder)

    monkeypatch.setattr("strucspars.cli.run_collection.read_summary", read)
    found = collected(Path("runs"), [BASE])
    assert [run.recipe.seed for run in found.rows[BASE]] == [2]
    assert "Permission denied" in found.unreadable[locked]


def test_the_runs_of_a_row_come_by_seed(networks: Path) -> None:
    for seed in (10, 2, 0):
        finished(BASE, f"seed={seed}")
    assert [run.recipe.seed for run in collected(Path("runs"), [BASE]).rows[BASE]] == [0, 2, 10]


def test_a_mixture_is_noticed_in_every_row(networks: Path) -> None:
    finished(BASE, "stage2.epochs=7")
    rows = ["cifar10-resnet20-dense", BASE]
    planned = planned_rows("table1", patterns=rows, seeds=[1], overrides=[], out=Path("runs"))
    assert [row.name for row in planned] == rows
    with pytest.raises(ValueError, match=f"runs/{BASE} and runs/{BASE}-seed1 are called the same row"):
        check_planned(planned, Path("runs"))


def test_what_a_row_builds_on_is_named_where_it_failed() -> None:
    planned = planned_rows("variants", patterns=[MODERN], seeds=[0], overrides=[], out=Path("there"))
    (row,) = planned
    outcomes = {path: ValueError(f"nothing for {path.name}") for path in (*row.first, *row.recipes)}
    text, document = reproduced_table("variants", planned, outcomes, Path("there"), as_markdown=False)
    assert [failure["folder"] for failure in document["failed"]] == [f"there/{BASE}", f"there/{MODERN}"]
    assert f"not finished: there/{BASE} (nothing for {BASE})" in text


@pytest.mark.parametrize("as_markdown", [True, False])
def test_what_was_run_is_a_table_for_a_page_if_asked(as_markdown: bool) -> None:
    planned = planned_rows("table1", patterns=[BASE], seeds=[0], overrides=[], out=Path("there"))
    outcomes = {path: summary(BASE, 0, 0.9) for row in planned for path in row.recipes}
    text, _ = reproduced_table("table1", planned, outcomes, Path("there"), as_markdown=as_markdown)
    assert text.startswith("| row") == as_markdown


def test_a_verdict_comes_with_what_it_means(call: Any) -> None:
    finished(BASE)
    assert NOISE in call("reproduce", "table1", "--collect").out
