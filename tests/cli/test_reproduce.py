"""The paper's tables, with tiny networks on the digits."""

import dataclasses
import json
import shutil
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from strucspars.cli.console import Output
from strucspars.cli.paper_comparison import ACCURACY, AFTER, BEFORE, BEST, MEASURES, THRESHOLD
from strucspars.cli.reproduce import Table, planned_rows, reproduced
from strucspars.cli.table_rows import base_row, selected_rows, table_rows
from strucspars.paper.measured import Sample
from strucspars.paper.noise import is_within_noise
from strucspars.report.experiments import NUM_TEST_IMAGES, paper_accuracy
from strucspars.train.paper_rows import PAPER_ROWS, PAPER_TIMELINES
from strucspars.train.recipe_reading import read_recipe, recipe_names


@pytest.fixture
def tiny_digits(tiny: tuple[str, ...]) -> tuple[str, ...]:
    return (*tiny, "data.name=digits", "sparsify.lambda_step=null")


@pytest.mark.parametrize(
    ("table", "count"), [("table1", 19), ("table2", 11), ("table3", 15), ("table5", 18), ("variants", 20)]
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


# What a variant changes of its base, and nothing else.
CHANGES = {
    "low-rate": ("stage2.lr=0.01",),
    "distilled": ("finetune.teacher=runs/{network}-dense",),
    "modern": ("stage2.schedule=cosine", "stage2.weight_decay=5e-4"),
    "paper-solver": ("sparsify.method=paper",),
    **{
        ablation: (f"finetune.ablation={ablation}",)
        for ablation in ("from-scratch", "shufflenet", "random", "no-shuffle")
    },
}


@pytest.mark.parametrize("name", [name for name in (*table_rows("variants"), *table_rows("table3")) if base_row(name)])
def test_variants_change_what_they_say_and_nothing_else(name: str) -> None:
    base = str(base_row(name))
    way, network = name.removeprefix(f"{base}-"), "-".join(name.split("-")[:2])
    if way == "slimming":
        recipe, its = read_recipe(name), read_recipe(base)
        papers = read_recipe(f"{network}-slimming60")
        assert recipe == dataclasses.replace(
            papers,
            name=name,
            slimming=dataclasses.replace(papers.slimming, target=its.sparsify.target),
            stage1=dataclasses.replace(papers.stage1, epochs=its.stage1.epochs),
        )
    else:
        overrides = [change.format(network=network) for change in CHANGES[way]]
        assert read_recipe(name) == dataclasses.replace(read_recipe(base, overrides), name=name)


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
    # The base is found even where only the variant is asked for.
    said = call("reproduce", "variants", "--collect", "--markdown", "--rows", "*-distilled")
    (line,) = (line for line in said.out.splitlines() if "-distilled" in line)
    assert f"| {statistics.mean(gains):+.2f} ± {statistics.stdev(gains):.2f} (2) |" in line
    (row,) = json.loads(call("reproduce", "variants", "--collect", "--json", "--rows", "*-distilled").out)["rows"]
    assert row["over_base"] == {
        "mean": pytest.approx(statistics.mean(gains)),
        "deviation": pytest.approx(statistics.stdev(gains)),
        "pairs": 2,
    }


@pytest.fixture
def two_runs(call: Any, tiny_digits: tuple[str, ...]) -> Path:
    assert call("reproduce", "table1", "--rows", "*20-dense", *tiny_digits, "--seeds", "0,12", "--quiet").status == 0
    return Path("runs")


def test_collecting_finds_all_seeds_and_nothing_else(call: Any, two_runs: Path) -> None:
    (two_runs / "cifar10-resnet20-dense-seedling").mkdir()
    (two_runs / "cifar10-resnet20-40").mkdir()
    (two_runs / "notes.txt").touch()
    said = call("reproduce", "table1", "--collect", "--json")
    (row,) = json.loads(said.out)["rows"]
    assert (row["row"], row["runs"]) == ("cifar10-resnet20-dense", 2)
    assert not list((two_runs / "cifar10-resnet20-40").iterdir())
    assert row["best_top1"]["difference"] == pytest.approx(row["best_top1"]["mean"] - 91.70)
    assert row["top1"]["verdict"] in ("below", "noise", "above")


@pytest.mark.parametrize("name", ["cifar10-resnet20-40-seed7", "cifar10-resnet20-dense-seed0"])
def test_a_run_under_a_wrong_name_is_not_counted(call: Any, two_runs: Path, name: str) -> None:
    shutil.copytree(two_runs / "cifar10-resnet20-dense", two_runs / name)
    said = call("reproduce", "table1", "--collect", "--json")
    document = json.loads(said.out)
    assert [(row["row"], row["runs"]) for row in document["rows"]] == [("cifar10-resnet20-dense", 2)]
    assert document["failed"] == []
    (left_out,) = document["not_counted"]
    assert left_out["folder"] == f"runs/{name}"
    assert "seed 0, whose folder is called cifar10-resnet20-dense; rename it" in left_out["reason"]
    text = call("reproduce", "table1", "--collect").out
    assert f"not counted: runs/{name} (" in text
    assert "delete" not in text
    assert "not finished" not in text


@pytest.mark.parametrize("text", ["null", "{", '{"version": 1}'])
def test_a_damaged_run_is_named_and_the_others_shown(call: Any, two_runs: Path, text: str) -> None:
    (two_runs / "cifar10-resnet20-dense-seed12" / "summary.json").write_text(text)
    said = call("reproduce", "table1", "--collect")
    assert "cifar10-resnet20-dense  1" in said.out
    assert "not finished: runs/cifar10-resnet20-dense-seed12 (" in said.out
    assert "repair, move or delete it" in said.out


def test_runs_of_different_protocols_have_no_mean(call: Any, two_runs: Path) -> None:
    recipe = two_runs / "cifar10-resnet20-dense-seed12" / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("lr: 0.1", "lr: 0.001"))
    said = call("reproduce", "table1", "--collect")
    assert said.status == 2
    assert "are called the same row, but the latter has stage" in said.err
    assert "in another folder" in said.err


def test_collecting_says_when_there_is_nothing(call: Any) -> None:
    said = call("reproduce", "table1", "--collect", "--out", "nowhere", "--rows", "*56*")
    assert said.status == 2
    assert "nowhere has no finished run of table1 that fits *56*" in said.err
    assert "leave out overrides" in call("reproduce", "table1", "--collect", "seed=3").err
    assert "leave out --list" in call("reproduce", "table1", "--list", "--markdown").err


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("name=mine", "name"),
        ("name =mine", "name"),
        ("seed=3", "seed"),
        ("sparsify.from_run=there", "sparsify.from_run"),
        ("finetune.teacher=there", "finetune.teacher"),
        ("finetune={form: masked, teacher: there}", "finetune.teacher"),
    ],
)
def test_what_every_row_has_of_its_own_cannot_be_overridden(call: Any, override: str, key: str) -> None:
    said = call("reproduce", "variants", "--list", override)
    assert said.status == 2
    assert f"every row has its own {key}; leave it out" in said.err


@pytest.mark.parametrize("override", ["finetune={teacher", "stage2={epochs: 3}"])
def test_other_overrides_are_left_to_the_recipe(call: Any, override: str) -> None:
    assert "every row has its own" not in call("reproduce", "variants", "--list", override).err


def test_differences_are_judged_as_in_the_report(call: Any, two_runs: Path) -> None:
    (row,) = json.loads(call("reproduce", "table1", "--collect", "--json").out)["rows"]
    paper = paper_accuracy(PAPER_ROWS["cifar10-resnet20-dense"])
    assert paper is not None
    for key in ("top1", "best_top1"):
        ours = Sample(mean=row[key]["mean"] / 100, deviation=row[key]["deviation"] / 100, count=2)
        is_noise = is_within_noise(ours, paper, test_images=NUM_TEST_IMAGES["digits"])
        assert (row[key]["verdict"] == "noise") == is_noise
        assert is_noise or (row[key]["verdict"] == "above") == (ours.mean > paper.mean)


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
    assert "not finished: runs/cifar10-resnet20-40 (runs/cifar10-resnet20-40 holds holiday.jpg" in said.out
    assert "cifar10-resnet20-dense  " in said.out
    assert "1 of 2 runs failed: runs/cifar10-resnet20-40: " in said.err


@pytest.mark.parametrize("table", ["table1", "variants"])
def test_data_that_all_rows_miss_are_one_error(call: Any, table: str) -> None:
    said = call("reproduce", table, "--rows", "cifar10-resnet20-*", "--quiet")
    assert said.status == 2
    assert said.err.count("\n") == 1
    assert "needs a root" in said.err


def test_every_table_has_its_measures() -> None:
    assert set(MEASURES) == {table.value for table in Table}


def test_what_others_build_on_comes_before_them_and_else_the_order_is_that_of_the_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[list[str]] = []

    def run_all(recipes: Mapping[Path, object], *, jobs: int, output: Output) -> dict[Path, Exception]:
        calls.append([path.name for path in recipes])
        return {path: ValueError(path.name) for path in recipes}

    monkeypatch.setattr("strucspars.cli.reproduce.run_all", run_all)
    rows = ["cifar10-resnet20-40-distilled", "cifar10-resnet20-40-slimming"]
    planned = planned_rows("variants", patterns=rows, seeds=[0], overrides=[], out=Path("there"))
    outcomes = reproduced(planned, jobs=4, output=Output(as_json=False, quiet=True))
    first = ["cifar10-resnet20-40", "cifar10-resnet20-dense", "cifar10-resnet20-40-slimming"]
    assert calls == [[*first, "cifar10-resnet20-40-distilled"]]
    assert [path.name for path in outcomes] == calls[0]


def test_rows_that_build_on_others_are_run_beside_them(call: Any, tiny_digits: tuple[str, ...]) -> None:
    said = call("reproduce", "variants", "--rows", "*20-40-distilled,*20-40-modern", *tiny_digits, "--jobs", "3")
    assert said.status == 0
    assert said.out.count("  sparsify  ") == 1
    assert not [line for line in said.out.splitlines() if line.startswith("not finished")]


def test_the_folder_of_the_runs_may_be_named_from_home(
    call: Any, tiny_digits: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    said = call("reproduce", "variants", "--rows", "*20-40-modern", "--out=~/runs", *tiny_digits)
    assert said.status == 0
    assert (tmp_path / "home" / "runs" / "cifar10-resnet20-40-modern" / "summary.json").is_file()
    assert "finished" in call("reproduce", "variants", "--rows", "*20-40-modern", "--out=~/runs", "--list").out
    assert not Path("~").exists()


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_rows_whose_base_fails_say_so_and_others_are_shown(call: Any, tiny_digits: tuple[str, ...], jobs: str) -> None:
    Path("runs/cifar10-resnet20-40").mkdir(parents=True)
    Path("runs/cifar10-resnet20-40/holiday.jpg").touch()
    rows = "cifar10-resnet20-40-modern,cifar10-resnet20-40-paper-solver"
    said = call("reproduce", "variants", "--rows", rows, *tiny_digits, "--jobs", jobs)
    assert said.status == 1
    failure = "runs/cifar10-resnet20-40 holds holiday.jpg"
    needed = f"not begun: it needs the first stage of runs/cifar10-resnet20-40, but that run failed: {failure}"
    assert f"not finished: runs/cifar10-resnet20-40 ({failure}" in said.out
    assert f"not finished: runs/cifar10-resnet20-40-modern ({needed}" in said.out
    assert "cifar10-resnet20-40-paper-solver  1" in said.out
    assert f"2 of 3 runs failed: runs/cifar10-resnet20-40: {failure}" in said.err
    assert f"; runs/cifar10-resnet20-40-modern: {needed}" in said.err


def test_table_5_holds_every_stage_against_the_papers() -> None:
    for name, timeline in PAPER_TIMELINES.items():
        samples = [measure.paper(name) for measure in (BEFORE, AFTER, ACCURACY, BEST, THRESHOLD)]
        assert [sample and sample.mean for sample in samples] == [
            timeline.before_compression,
            timeline.after_compression,
            pytest.approx(timeline.finetuned),
            pytest.approx(timeline.finetuned),
            timeline.min_kept_norm,
        ]
