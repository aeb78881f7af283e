"""The paper's tables, with tiny networks on the digits."""

import dataclasses
import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest

from strucspars.cli.paper_comparison import MEASURES
from strucspars.cli.reproduce import Table
from strucspars.cli.reproduction import base_row, first_stage_source, planned_rows, selected_rows, table_rows
from strucspars.cli.row_measures import Spread, pooled_deviation, spread, verdict
from strucspars.training.paper_rows import PAPER_ROWS, PAPER_TIMELINES
from strucspars.training.recipe_reading import read_recipe, recipe_names


@pytest.fixture
def tiny_digits(tiny: tuple[str, ...]) -> tuple[str, ...]:
    return (*tiny, "data.name=digits", "sparsify.lambda_step=null")


@pytest.mark.parametrize(
    ("table", "count"), [("table1", 19), ("table2", 11), ("table3", 15), ("table5", 18), ("variants", 17)]
)
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


def test_distilled_rows_have_the_dense_run_of_the_same_seed_as_teacher() -> None:
    (row,) = planned_rows("variants", patterns=["*20-40-distilled"], seeds=[1], overrides=[], out=Path("there"))
    ((path, recipe),) = row.recipes.items()
    assert path == Path("there/cifar10-resnet20-40-distilled-seed1")
    assert recipe.finetune.teacher == "there/cifar10-resnet20-dense-seed1"
    assert recipe.sparsify.from_run == "there/cifar10-resnet20-40-seed1"
    assert {each.name for each in row.first.values()} == {"cifar10-resnet20-40", "cifar10-resnet20-dense"}


def test_every_variant_differs_from_its_base_in_what_it_says() -> None:
    for name in set(table_rows("variants")) | set(table_rows("table3")):
        base, recipe = base_row(name), read_recipe(name)
        if base is None:
            continue
        if recipe.kind == "slimming":
            assert recipe.slimming.target == read_recipe(base).sparsify.target
            assert recipe.stage1.epochs == read_recipe(base).stage1.epochs
        if first_stage_source(name) is not None:
            # What decides the first stage must be the same, or it could not be taken over.
            assert (recipe.sparsify, recipe.stage1, recipe.model) == (
                read_recipe(base).sparsify,
                read_recipe(base).stage1,
                read_recipe(base).model,
            )
        assert recipe != dataclasses.replace(read_recipe(base), name=recipe.name)


def test_variants_are_compared_with_their_base_seed_by_seed(call: Any, tiny_digits: tuple[str, ...]) -> None:
    arguments = ("reproduce", "variants", "--rows", "cifar10-resnet20-40,cifar10-resnet20-40-distilled", *tiny_digits)
    assert call(*arguments, "--seeds", "0,1", "--quiet").status == 0
    tops = {
        (name, seed): json.loads((Path("runs") / f"{name}{seed}" / "summary.json").read_text())["finetuned"][
            "last_top1"
        ]
        for name in ("cifar10-resnet20-40", "cifar10-resnet20-40-distilled")
        for seed in ("", "-seed1")
    }
    gains = [100 * (tops["cifar10-resnet20-40-distilled", s] - tops["cifar10-resnet20-40", s]) for s in ("", "-seed1")]
    said = call("reproduce", "variants", "--collect", "--markdown")
    (line,) = (line for line in said.out.splitlines() if "-distilled" in line)
    assert f"| {statistics.mean(gains):+.2f} ± {statistics.stdev(gains):.2f} |" in line


def test_collecting_finds_all_seeds_and_runs_nothing(call: Any, tiny_digits: tuple[str, ...]) -> None:
    assert call("reproduce", "table1", "--rows", "*20-dense", *tiny_digits, "--seeds", "0,12").status == 0
    Path("runs/cifar10-resnet20-dense-seedling").mkdir()
    Path("runs/cifar10-resnet20-40").mkdir()
    said = call("reproduce", "table1", "--collect", "--json")
    (row,) = json.loads(said.out)["rows"]
    assert (row["row"], row["runs"]) == ("cifar10-resnet20-dense", 2)
    assert not list(Path("runs/cifar10-resnet20-40").iterdir())


def test_collecting_says_when_there_is_nothing(call: Any) -> None:
    said = call("reproduce", "table1", "--collect", "--out", "nowhere")
    assert said.status == 2
    assert "nowhere has no finished run of table1" in said.err
    assert "takes no overrides" in call("reproduce", "table1", "--collect", "seed=3").err


def test_a_difference_is_noise_up_to_two_of_its_errors() -> None:
    ours, paper = Spread(91.0, None, runs=4), Spread(91.0, 0.1, runs=10)
    error = math.sqrt(0.3**2 / 4 + 0.1**2 / 10)
    for shift, expected in ((1.99, "noise"), (2.01, "above"), (-1.99, "noise"), (-2.01, "below")):
        assert verdict(Spread(91 + shift * error, None, runs=ours.runs), paper, 0.3) == expected


def test_the_deviation_of_all_rows_weighs_them_by_their_runs() -> None:
    values = [[1.0, 2.0, 4.0], [7.0, 7.5], [3.0]]
    spreads = [each for each in map(spread, values) if each is not None]
    squares = [(value - statistics.mean(row)) ** 2 for row in values for value in row]
    assert pooled_deviation(spreads) == pytest.approx(math.sqrt(sum(squares) / 3))
    assert pooled_deviation(spreads[2:]) is None


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
    assert set(MEASURES) == {table.value for table in Table}
