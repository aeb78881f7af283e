"""Finished runs of a folder: which count, and what they are compared with."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest

from strucspars.cli.run import run_name
from strucspars.paper.experiments import collected, gain_over_base
from strucspars.train.outcome import RunSummary, read_summary
from strucspars.train.recipe_reading import read_recipe, recipe_yaml
from strucspars.train.run_folder import RunFolder

RECORDED = Path(__file__).parents[2] / "results/cifar10/cifar10-resnet20-40"
BASE = "cifar10-resnet20-40"
MODERN, SLIMMING = f"{BASE}-modern", f"{BASE}-slimming"
NAMES = (BASE, MODERN, SLIMMING)


def summary(name: str, seed: int, top1: float) -> RunSummary:
    recorded = read_summary(RunFolder(RECORDED))
    assert recorded is not None
    finetuned = dataclasses.replace(recorded.finetuned, last_top1=top1)
    return dataclasses.replace(recorded, name=name, seed=seed, finetuned=finetuned)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def finished(name: str, *overrides: str, top1: float = 0.5, path: str | None = None) -> Path:
    """A folder like that of a finished run."""
    recipe = read_recipe(name, overrides)
    folder = RunFolder(path or Path("runs") / run_name(recipe))
    folder.create()
    folder.write_recipe(recipe_yaml(recipe))
    folder.write_json(folder.summary_json_path, summary(recipe.name, recipe.seed, top1).to_json())
    return folder.path


def gain(name: str) -> Any:
    """Points over the base, and pairs of runs; None without a base."""
    experiments = collected(Path("runs"), NAMES).experiments
    (experiment,) = (each for each in experiments if each.recipe.name == name)
    found = gain_over_base(experiment, experiments)
    return None if found is None else (found.mean, found.count)


SHORT = ("stage2.epochs=6", "sparsify.lambda_step=null", "data.name=digits")


@pytest.mark.parametrize(
    ("variant", "overrides"),
    [
        (MODERN, ()),
        (MODERN, SHORT),
        (MODERN, ("stage1.epochs=0", "model.weights='there: a file.pt'")),
        (SLIMMING, ()),
        (SLIMMING, ("engine.precision=bf16",)),
    ],
)
def test_a_variant_is_compared_with_its_base_where_both_have_the_same_changes(
    variant: str, overrides: tuple[str, ...]
) -> None:
    finished(BASE, *overrides, top1=0.5)
    finished(variant, *overrides, "data.root=there", top1=0.75)
    assert gain(variant) == (pytest.approx(25.0), 1)


@pytest.mark.parametrize(
    ("of_base", "of_variant"),
    [("stage2.epochs=6", "stage2.epochs=1"), ("stage2.epochs=160", "stage2.epochs=1"), ("stage2.lr=1", "seed=0")],
)
def test_a_variant_is_not_compared_with_a_base_of_other_changes(of_base: str, of_variant: str) -> None:
    finished(BASE, of_base)
    finished(MODERN, of_variant)
    assert gain(MODERN) is None


def test_pairs_have_the_same_seed_and_an_accuracy_of_zero_counts() -> None:
    for seed, top1 in ((0, 0.0), (1, 0.5), (2, 0.6)):
        finished(BASE, f"seed={seed}", top1=top1)
    for seed, top1 in ((0, 0.75), (2, 0.65), (5, 0.9)):
        finished(MODERN, f"seed={seed}", top1=top1)
    assert gain(MODERN) == (pytest.approx((75.0 + 5.0) / 2), 2)


def test_runs_of_different_protocols_are_different_experiments() -> None:
    finished(BASE)
    finished(BASE, "seed=1", "stage2.epochs=3")
    finished(BASE, "seed=2", "data.root=there", "engine.device=cpu")
    first, second = collected(Path("runs"), NAMES).experiments
    assert (first.label, [run.recipe.seed for run in first.runs]) == (BASE, [0, 2])
    assert second.label.startswith(f"{BASE} (")
    assert "stage2.epochs=3" in second.changes


def test_rows_come_in_the_order_of_the_table_and_their_runs_by_seed() -> None:
    finished(MODERN)
    for seed in (10, 2, 0):
        finished(BASE, f"seed={seed}")
    experiments = collected(Path("runs"), NAMES).experiments
    assert [[run.recipe.seed for run in each.runs] for each in experiments] == [[0, 2, 10], [0]]


def test_a_copy_of_a_run_is_not_counted() -> None:
    shutil.copytree(finished(BASE), "runs/zzz-copy")
    found = collected(Path("runs"), NAMES)
    assert [len(each.runs) for each in found.experiments] == [1]
    assert found.not_counted == {Path("runs/zzz-copy"): f"runs/{BASE} is a run of the same recipe and seed"}


def test_other_files_and_runs_are_ignored() -> None:
    finished(BASE)
    finished("imagenet-resnet50-35", path="runs/another-table")
    for name, damaged in (("damaged", "summary.json"), ("unreadable", "recipe.yaml")):
        (finished("demo", path=f"runs/{name}") / damaged).write_text("{")
    Path("runs/notes.txt").touch()
    found = collected(Path("runs"), NAMES)
    assert [each.label for each in found.experiments] == [BASE]
    assert (found.unreadable, found.not_counted) == ({}, {})


@pytest.mark.parametrize("damaged", ["recipe.yaml", "summary.json"])
def test_a_damaged_run_of_a_row_is_named_and_the_others_counted(damaged: str) -> None:
    finished(BASE, "seed=2")
    path = finished(BASE, "seed=1")
    (path / damaged).write_text("{")
    found = collected(Path("runs"), NAMES)
    assert [run.recipe.seed for each in found.experiments for run in each.runs] == [2]
    assert list(found.unreadable) == [path]
    assert "repair, move or delete it" in found.unreadable[path]
