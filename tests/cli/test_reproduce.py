"""The paper's tables, with tiny networks on the digits."""

import json
import shutil
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from strucspars.cli.console import Output
from strucspars.cli.main import main
from strucspars.cli.reproduce import Table, planned_rows, reproduce_rows
from strucspars.paper.experiments import MEASURES, NUM_TEST_IMAGES
from strucspars.paper.noise import NOISE, Sample, is_within_noise
from strucspars.paper.published import PAPER_ROWS, table_rows
from strucspars.train.recipe_reading import read_recipe, recipe_yaml
from strucspars.train.run_folder import RunFolder


@pytest.fixture(scope="session")
def tiny_digits(tiny: tuple[str, ...]) -> tuple[str, ...]:
    return (*tiny, "data.name=digits", "sparsify.lambda_step=null")


def test_ablations_take_over_the_first_stage_of_the_same_seed() -> None:
    rows = planned_rows("table3", patterns=["*56*random"], seeds=[0, 3], overrides=[], out=Path("there"))
    (row,) = rows
    assert [recipe.sparsify.from_run for recipe in row.recipes.values()] == [
        "there/cifar10-resnet56-60",
        "there/cifar10-resnet56-60-seed3",
    ]
    assert list(row.sources) == [Path("there/cifar10-resnet56-60"), Path("there/cifar10-resnet56-60-seed3")]


@pytest.fixture(scope="module")
def trained_rows(trained: Path, tiny_digits: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of two finished runs, trained once for all tests."""
    place = tmp_path_factory.mktemp("rows")
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(trained.parents[1])
        patched.chdir(place)
        arguments = ("reproduce", "table1", "--rows", "*20-dense", *tiny_digits, "--seeds", "0,12", "--quiet")
        assert main(arguments) == 0
    return place / "runs"


@pytest.fixture
def two_runs(networks: Path, trained_rows: Path) -> Path:
    shutil.copytree(trained_rows, "runs")
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


@pytest.mark.parametrize("text", ["null", "{", '{"version": 1}'])
def test_a_damaged_run_is_named_and_the_others_shown(call: Any, two_runs: Path, text: str) -> None:
    (two_runs / "cifar10-resnet20-dense-seed12" / "summary.json").write_text(text)
    said = call("reproduce", "table1", "--collect")
    assert "cifar10-resnet20-dense     1" in said.out
    assert "not finished: runs/cifar10-resnet20-dense-seed12 (" in said.out
    assert "repair, move or delete it" in said.out


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
        ("sparsify={target: 0.3, from_run: there}", "sparsify.from_run"),
    ],
)
def test_what_every_row_has_of_its_own_cannot_be_overridden(call: Any, override: str, key: str) -> None:
    said = call("reproduce", "table3", "--list", override)
    assert said.status == 2
    assert f"every row has its own {key}; leave it out" in said.err


@pytest.mark.parametrize("override", ["finetune={teacher", "stage2={epochs: 3}"])
def test_other_overrides_are_left_to_the_recipe(call: Any, override: str) -> None:
    assert "every row has its own" not in call("reproduce", "table3", "--list", override).err


def test_differences_are_judged_as_in_the_report(call: Any, two_runs: Path) -> None:
    (row,) = json.loads(call("reproduce", "table1", "--collect", "--json").out)["rows"]
    paper = PAPER_ROWS["cifar10-resnet20-dense"].top1
    for key in ("top1", "best_top1"):
        ours = Sample(mean=row[key]["mean"] / 100, deviation=row[key]["deviation"] / 100, count=2)
        is_noise = is_within_noise(ours, paper, test_images=NUM_TEST_IMAGES["digits"])
        assert (row[key]["verdict"] == "noise") == is_noise
        assert is_noise or (row[key]["verdict"] == "above") == (ours.mean > paper.mean)


def test_the_document_has_the_numbers_of_ours_and_of_the_paper(call: Any, two_runs: Path) -> None:
    summaries = [json.loads(path.read_text()) for path in sorted(two_runs.glob("*/summary.json"))]
    tops = [100 * each["finetuned"]["last_top1"] for each in summaries]
    (row,) = json.loads(call("reproduce", "table1", "--collect", "--json").out)["rows"]
    assert {key: row["top1"][key] for key in row["top1"] if key != "verdict"} == {
        "mean": pytest.approx(statistics.mean(tops)),
        "deviation": pytest.approx(statistics.stdev(tops)),
        "paper": pytest.approx(91.70),
        "paper_deviation": pytest.approx(0.12),
        "difference": pytest.approx(statistics.mean(tops) - 91.70),
    }
    assert row["params"]["paper"] == PAPER_ROWS["cifar10-resnet20-dense"].params
    text = " ".join(call("reproduce", "table1", "--collect").out.split())
    assert " ".join(NOISE.split()) in text
    markdown = call("reproduce", "table1", "--collect", "--markdown").out
    assert markdown.startswith("| experiment | runs |")


def test_a_copy_of_a_run_is_not_counted(call: Any, two_runs: Path) -> None:
    shutil.copytree(two_runs / "cifar10-resnet20-dense", two_runs / "copy")
    document = json.loads(call("reproduce", "table1", "--collect", "--json").out)
    assert [row["runs"] for row in document["rows"]] == [2]
    (left_out,) = document["not_counted"]
    assert left_out["folder"] == "runs/copy"
    assert "not counted: runs/copy (runs/cifar10-resnet20-dense is" in call("reproduce", "table1", "--collect").out


def test_the_list_tells_a_run_that_goes_on(call: Any) -> None:
    begun = RunFolder("runs/cifar10-resnet20-40")
    begun.create()
    begun.write_recipe(recipe_yaml(read_recipe("cifar10-resnet20-40")))
    begun.append_metrics({"stage": "sparsify", "epoch": 1, "test_top1": 0.5, "test_top5": 0.9, "seconds": 2.0})
    said = call("reproduce", "table1", "--list", "--rows", "cifar10-resnet20-40", "--json")
    (row,) = json.loads(said.out)["rows"]
    assert (row["is_finished"], row["state"]) == (False, "sparsify, epoch 1 of 100 done")


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
    line = next(line for line in said.out.splitlines() if "91.42 ± 0.04%" in line)
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


@pytest.mark.parametrize(("table", "rows"), [("table1", "cifar10-resnet20-*"), ("table3", "cifar10-*")])
def test_data_that_all_rows_miss_are_one_error(call: Any, table: str, rows: str) -> None:
    said = call("reproduce", table, "--rows", rows, "--quiet")
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

    monkeypatch.setattr("strucspars.cli.run.run_all", run_all)
    rows = ["imagenet-resnet50-65-random", "cifar10-resnet56-60", "cifar10-resnet56-60-no-shuffle"]
    planned = planned_rows("table3", patterns=rows, seeds=[0], overrides=[], out=Path("there"))
    output = Output(as_json=False, quiet=True)
    outcomes = reproduce_rows("table3", planned, jobs=4, output=output, as_markdown=False)
    first = ["cifar10-resnet56-60", "imagenet-resnet50-65"]
    assert calls == [[*first, "cifar10-resnet56-60-no-shuffle", "imagenet-resnet50-65-random"]]
    assert [path.name for path in outcomes] == calls[0]


def test_rows_that_build_on_others_are_run_beside_them_and_compared(call: Any, tiny_digits: tuple[str, ...]) -> None:
    said = call("reproduce", "table3", "--rows", "*56-60-random,*56-60-shufflenet", *tiny_digits, "--jobs", "3")
    assert said.status == 0
    assert said.out.count("  sparsify  ") == 1
    assert not [line for line in said.out.splitlines() if line.startswith("not finished")]
    table = call("reproduce", "table3", "--collect", "--rows", "*-random", "--json")
    (row,) = json.loads(table.out)["rows"]
    assert (row["row"], row["over_base"]["pairs"]) == ("cifar10-resnet56-60-random", 1)


def test_the_folder_of_the_runs_may_be_named_from_home(
    call: Any, tiny_digits: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    said = call("reproduce", "table3", "--rows", "*56-60-random", "--out=~/runs", *tiny_digits)
    assert said.status == 0
    assert (tmp_path / "home" / "runs" / "cifar10-resnet56-60-random" / "summary.json").is_file()
    assert "finished" in call("reproduce", "table3", "--rows", "*56-60-random", "--out=~/runs", "--list").out
    assert not Path("~").exists()


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_rows_whose_base_fails_say_so_and_others_are_shown(call: Any, tiny_digits: tuple[str, ...], jobs: str) -> None:
    Path("runs/cifar10-resnet56-60").mkdir(parents=True)
    Path("runs/cifar10-resnet56-60/holiday.jpg").touch()
    rows = "cifar10-resnet56-60-random,imagenet-resnet50-65"
    said = call("reproduce", "table3", "--rows", rows, *tiny_digits, "--jobs", jobs)
    assert said.status == 1
    failure = "runs/cifar10-resnet56-60 holds holiday.jpg"
    needed = f"not begun: it needs the first stage of runs/cifar10-resnet56-60, but that run failed: {failure}"
    assert f"not finished: runs/cifar10-resnet56-60 ({failure}" in said.out
    assert f"not finished: runs/cifar10-resnet56-60-random ({needed}" in said.out
    assert "imagenet-resnet50-65     1" in said.out
    assert f"2 of 3 runs failed: runs/cifar10-resnet56-60: {failure}" in said.err
    assert f"; runs/cifar10-resnet56-60-random: {needed}" in said.err
