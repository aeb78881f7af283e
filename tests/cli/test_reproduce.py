"""The paper's tables, with tiny networks on the digits."""

import json
from pathlib import Path
from typing import Any

import pytest

from strucspars.cli.paper_comparison import MEASURES, spread
from strucspars.cli.reproduction import planned_rows, selected_rows, table_rows
from strucspars.training.paper_rows import PAPER_ROWS, PAPER_TIMELINES
from strucspars.training.recipe_reading import read_recipe, recipe_names


@pytest.fixture
def tiny_digits(tiny: tuple[str, ...]) -> tuple[str, ...]:
    return (*tiny, "data.name=digits", "sparsify.lambda_step=null")


@pytest.mark.parametrize(("table", "count"), [("table1", 19), ("table2", 11), ("table3", 15), ("table5", 18)])
def test_all_rows_of_a_table_have_recipes(table: str, count: int) -> None:
    rows = table_rows(table)
    assert len(rows) == len(set(rows)) == count
    assert set(rows) <= set(recipe_names())


def test_table_5_has_the_papers_numbers_where_the_paper_has_them() -> None:
    assert set(PAPER_TIMELINES) < set(table_rows("table5"))
    for name, timeline in PAPER_TIMELINES.items():
        assert timeline.finetuned == PAPER_ROWS[name].accuracy
        assert 0.87 < timeline.min_kept_norm < 0.92


def test_rows_are_chosen_by_name_and_pattern() -> None:
    assert selected_rows("table1", ["cifar10-resnet20-40", "*-dense"]) == [
        "cifar10-resnet20-dense",
        "cifar10-resnet20-40",
        "cifar10-resnet56-dense",
        "cifar10-resnet110-dense",
    ]
    assert len(selected_rows("table3", None)) == 5
    assert selected_rows("table2", None) == table_rows("table2")


def test_ablations_take_over_the_first_stage_of_the_same_seed() -> None:
    rows = planned_rows("table3", patterns=["*56*random"], seeds=[0, 3], overrides=[], out=Path("there"))
    (row,) = rows
    assert [recipe.sparsify.from_run for recipe in row.recipes.values()] == [
        "there/cifar10-resnet56-60",
        "there/cifar10-resnet56-60-seed3",
    ]
    assert list(row.first) == [Path("there/cifar10-resnet56-60"), Path("there/cifar10-resnet56-60-seed3")]


def test_the_list_has_all_rows_and_runs_none(call: Any) -> None:
    said = call("reproduce", "table3", "--list", "--json")
    rows = json.loads(said.out)["rows"]
    assert [row["row"] for row in rows] == table_rows("table3")
    assert {row["state"] for row in rows} == {"not begun"}
    assert not Path("runs").exists()


def test_a_table_is_run_resumed_and_compared(call: Any, tiny_digits: tuple[str, ...]) -> None:
    arguments = ("reproduce", "table1", "--rows", "cifar10-resnet20-dense,cifar10-resnet20-40", *tiny_digits)
    said = call(*arguments, "--seeds", "0,1", "--jobs", "2")
    assert said.status == 0
    line = next(line for line in said.out.splitlines() if "91.42 ± 0.04" in line)
    assert line.split()[:2] == ["cifar10-resnet20-40", "2"]
    again = call(*arguments, "--seeds", "0,1", "--json")
    assert "epoch" not in again.err
    (_, row) = json.loads(again.out)["rows"]
    assert row["runs"] == 2
    assert row["top1"]["difference"] == pytest.approx(row["top1"]["mean"] - 91.42)
    states = json.loads(call(*arguments, "--list", "--json").out)["rows"]
    assert [state["is_finished"] for state in states] == [True, True]


def test_table_3_trains_the_first_stage_once(call: Any, tiny_digits: tuple[str, ...]) -> None:
    said = call("reproduce", "table3", "--rows", "*56*no-shuffle", *tiny_digits)
    assert said.status == 0
    assert said.out.count("  sparsify  ") == 1
    recipe = read_recipe("runs/cifar10-resnet56-60-no-shuffle/recipe.yaml")
    assert recipe.sparsify.from_run == "runs/cifar10-resnet56-60"


def test_table_5_shows_every_stage(call: Any, tiny_digits: tuple[str, ...]) -> None:
    said = call("reproduce", "table5", "--rows", "imagenet-resnet50-35", *tiny_digits, "--json", "--quiet")
    (row,) = json.loads(said.out)["rows"]
    assert row["before_compression"]["paper"] == 69.07
    assert row["min_kept_norm"]["paper"] == 0.873
    assert row["after_compression"]["mean"] is not None


def test_failed_rows_are_named_and_the_others_shown(call: Any, tiny_digits: tuple[str, ...]) -> None:
    Path("runs/cifar10-resnet20-40").mkdir(parents=True)
    Path("runs/cifar10-resnet20-40/holiday.jpg").touch()
    said = call("reproduce", "table1", "--rows", "cifar10-resnet20-dense,cifar10-resnet20-40", *tiny_digits)
    assert said.status == 1
    assert "not finished: runs/cifar10-resnet20-40 (not begun)" in said.out
    assert "cifar10-resnet20-dense  " in said.out
    assert "1 of 2 runs failed: runs/cifar10-resnet20-40: " in said.err


def test_data_that_all_rows_miss_are_one_error(call: Any) -> None:
    said = call("reproduce", "table1", "--rows", "cifar10-resnet20-*", "--quiet")
    assert said.status == 2
    assert said.err.count("\n") == 1
    assert "needs a root" in said.err


def test_a_single_run_has_no_deviation() -> None:
    alone = spread([3.0])
    assert alone is not None
    assert (alone.mean, alone.deviation) == (3.0, None)
    assert spread([]) is None


def test_every_table_has_its_measures() -> None:
    assert set(MEASURES) == {"table1", "table2", "table3", "table5"}
