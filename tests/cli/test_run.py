"""`strucspars run` on the digits with a tiny network, in this process."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from strucspars.cli.export import export_network
from strucspars.cli.networks import Target
from strucspars.cli.run import seeded_recipes
from strucspars.core.plan import GroupingPlan
from strucspars.export.checked import ExportReport
from strucspars.export.storage import read_plan
from strucspars.train.recipe_reading import read_recipe
from strucspars.train.run_folder import RunFolder


def test_a_run_prints_its_outcome_and_where_it_lies(call: Any, tiny: tuple[str, ...]) -> None:
    said = call("run", "demo", *tiny)
    assert said.status == 0
    assert "starting in runs/demo" in said.out
    assert "demo  sparsify  epoch 1/1  loss" in said.out
    assert "demo  finetune  epoch 1/1  loss" in said.out
    for part in ("params", "MACs", "before compression", "after compression", "finetuned, last epoch", "saved network"):
        assert part in said.out
    assert "runs/demo/model.safetensors" in said.out
    assert Path("runs/demo/model.safetensors").is_file()
    assert "\x1b" not in said.out + said.err


@pytest.mark.parametrize("schedule", ["two-stage", "progressive"])
def test_layers_share_orders_from_the_recipe_to_the_saved_network(call: Any, schedule: str) -> None:
    short = ("stage1.epochs=2", "stage2.epochs=1", "engine.device=cpu")
    options = ("sparsify.orders=shared", f"sparsify.schedule={schedule}")
    said = call("run", "demo", "model.name=cifar-resnet8", *short, *options)
    assert said.status == 0, said.err
    plan = GroupingPlan.from_json(Path("runs/demo/plan.json").read_text())
    assert plan.shared_orders
    assert read_plan(Path("runs/demo/model.safetensors")) == plan


def test_the_text_is_kept_in_the_folder(call: Any, tiny: tuple[str, ...], finished: Path) -> None:
    said = call("run", "demo", *tiny, "--quiet")
    assert said.out == Path("runs/demo/summary.txt").read_text()


def test_a_finished_run_prints_the_same_again(call: Any, tiny: tuple[str, ...], finished: Path) -> None:
    again = call("run", "demo", *tiny)
    assert again.status == 0
    assert again.out.startswith("runs/demo is finished already\n")
    assert again.out.endswith((finished / "summary.txt").read_text())


def test_a_finished_run_without_its_network_is_refused_with_the_remedy(
    call: Any, tiny: tuple[str, ...], finished: Path
) -> None:
    Path("runs/demo/model.safetensors").unlink()
    again = call("run", "demo", *tiny)
    assert again.status == 2
    assert "finished already" not in again.out + again.err
    assert "or delete runs/demo/summary.json to write it again from the last checkpoint" in again.err


def test_a_finished_folder_does_not_take_another_recipe(call: Any, tiny: tuple[str, ...], finished: Path) -> None:
    said = call("run", "demo", *tiny, "sparsify.target=0.3")
    assert said.status == 2
    assert said.err.startswith("error: runs/demo holds a run with another recipe")
    assert "sparsify.target: 0.55 there, 0.3 now;" in said.err


def test_options_are_listed_without_a_recipe_and_nothing_runs(call: Any) -> None:
    said = call("run", "--options")
    assert (said.status, said.err) == (0, "")
    for part in ("  seed=0    a whole number\n", "  stage1.lr=0.1, stage2.lr=0.1    ", "      learning rate, at"):
        assert part in said.out
    assert max(map(len, said.out.splitlines())) <= 120
    assert not Path("runs").exists()


def test_json_is_alone_on_the_standard_output(call: Any, tiny: tuple[str, ...]) -> None:
    said = call("run", "demo", *tiny, "--json")
    (run,) = json.loads(said.out)["runs"]
    assert run["folder"] == "runs/demo"
    assert run["summary"]["kind"] == "strucspars"
    assert "epoch 1/1" in said.err


def test_quiet_json_says_nothing_else(call: Any, tiny: tuple[str, ...]) -> None:
    said = call("run", "demo-dense", *tiny, "--json", "--quiet", "--out", "elsewhere")
    assert said.err == ""
    assert json.loads(said.out)["runs"][0]["folder"] == "elsewhere"


def test_several_seeds_have_a_folder_each_and_a_mean(call: Any, tiny: tuple[str, ...]) -> None:
    said = call("run", "demo-dense", *tiny, "--seeds", "0,2", "--jobs", "2")
    assert said.status == 0
    assert "demo-dense-seed2  train  epoch 1/1" in said.out
    assert "mean" in said.out
    assert read_recipe("runs/demo-dense/recipe.yaml").seed == 0
    assert read_recipe("runs/demo-dense-seed2/recipe.yaml").seed == 2


def test_out_holds_the_folders_of_several_seeds(call: Any, tiny: tuple[str, ...]) -> None:
    said = call("run", "demo-dense", *tiny, "--seeds", "0,1", "--out", "many", "--quiet")
    assert said.status == 0
    assert {path.name for path in Path("many").iterdir()} == {"demo-dense", "demo-dense-seed1"}


def test_a_seed_of_the_recipe_names_the_folder(call: Any, tiny: tuple[str, ...]) -> None:
    assert call("run", "demo-dense", *tiny, "seed=5", "--quiet").status == 0
    assert Path("runs/demo-dense-seed5/summary.txt").is_file()


def test_a_recipe_file_runs_under_its_own_name(call: Any, tiny: tuple[str, ...]) -> None:
    Path("mine.yaml").write_text("base: demo-dense\n")
    assert call("run", "mine.yaml", *tiny, "--quiet").status == 0
    assert Path("runs/mine/summary.txt").is_file()


@pytest.mark.parametrize("name", ["../../escaped", "a/b", "/tmp/a", "..", ".", "a\\\\b"])
def test_a_run_does_not_leave_its_folder_by_its_name(call: Any, tiny: tuple[str, ...], name: str) -> None:
    before = sorted(Path().resolve().parent.rglob("*"))
    Path("mine.yaml").write_text(f"base: demo-dense\nname: '{name}'\n")
    said = call("run", "mine.yaml", *tiny, "--quiet")
    assert said.status == 2
    assert said.err.startswith(f"error: name: {name!r} cannot name a run folder")
    Path("mine.yaml").unlink()
    assert sorted(Path().resolve().parent.rglob("*")) == before


def test_a_run_with_a_folder_may_have_any_name(call: Any, tiny: tuple[str, ...]) -> None:
    assert call("run", "demo-dense", *tiny, "name=half/size", "--out", "here", "--quiet").status == 0
    assert read_recipe("here/recipe.yaml").name == "half/size"


def test_one_failure_does_not_stop_the_others(call: Any, tiny: tuple[str, ...]) -> None:
    Path("runs/demo-dense").mkdir(parents=True)
    Path("runs/demo-dense/holiday.jpg").touch()
    said = call("run", "demo-dense", *tiny, "--seeds", "0,1", "--json")
    assert said.status == 1
    document = json.loads(said.out)
    assert [run["folder"] for run in document["runs"]] == ["runs/demo-dense-seed1"]
    assert [run["folder"] for run in document["failed"]] == ["runs/demo-dense"]
    assert "1 of 2 runs failed: runs/demo-dense: " in said.err


@pytest.mark.parametrize("seeds", ["0", "0,1"])
def test_json_has_the_failures_also_where_every_run_fails(call: Any, tiny: tuple[str, ...], seeds: str) -> None:
    arguments = ("run", "demo-dense", *tiny, "stage2.lr=1e18", "--seeds", seeds, "--quiet")
    said = call(*arguments, "--json")
    assert said.status == 1
    document = json.loads(said.out)
    assert document["runs"] == []
    assert len(document["failed"]) == len(seeds.split(","))
    assert all("the loss became" in failure["error"] for failure in document["failed"])
    assert said.err.startswith("error: ")
    assert call(*arguments).out == ""


def test_a_busy_folder_is_an_error_of_one_line(call: Any, tiny: tuple[str, ...]) -> None:
    folder = RunFolder("runs/demo")
    folder.create()
    with folder.locked():
        said = call("run", "demo", *tiny, "--quiet")
    assert said.status == 1
    assert said.err.startswith("error: the run folder runs/demo is in use by process")
    assert said.err.count("\n") == 1


def test_a_diverged_run_fails_with_status_1(call: Any, tiny: tuple[str, ...]) -> None:
    said = call("run", "demo-dense", *tiny, "stage2.lr=1e18", "--quiet")
    assert said.status == 1
    assert said.err.startswith("error: the loss became")


def test_missing_data_do_not_bind_the_next_attempt(call: Any, tiny: tuple[str, ...]) -> None:
    assert call("run", "cifar10-resnet20-dense", *tiny).status == 2
    said = call("run", "cifar10-resnet20-dense", *tiny, "data.name=digits")
    assert said.status == 0
    assert "resuming" not in said.out


def test_a_row_of_the_paper_has_the_papers_numbers_beside(call: Any, tiny: tuple[str, ...]) -> None:
    said = call("run", "cifar10-resnet20-40", *tiny, "data.name=digits", "--quiet")
    row = next(line for line in said.out.splitlines() if line.startswith("cifar10-resnet20-40  "))
    assert "131K" in row
    assert "91.42 ± 0.04%" in row
    assert "Not quite as in the recipes: data.name=digits, " in said.out


def test_jobs_are_refused_under_torchrun(call: Any, tiny: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    said = call("run", "demo", *tiny, "--jobs", "2")
    assert said.status == 2
    assert "--jobs 2 is for one process" in said.err


@pytest.mark.parametrize(("seeds", "folders"), [("0", ["summary.json"]), ("0,1", ["demo-dense", "demo-dense-seed1"])])
def test_the_run_folder_may_be_named_from_home(
    seeds: str, folders: list[str], call: Any, tiny: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert call("run", "demo-dense", *tiny, "--out=~/there", "--seeds", seeds, "--quiet").status == 0
    assert all((tmp_path / "home" / "there" / name).exists() for name in folders)
    assert not Path("~").exists()


def test_a_world_size_without_torchrun_ends_at_once(
    call: Any, tiny: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    said = call("run", "demo", *tiny)
    assert said.status == 2
    assert said.err.startswith("error: WORLD_SIZE is 2, but this process was not started with others")
    assert not Path("runs").exists()


def test_a_run_can_end_in_an_export(call: Any, tiny: tuple[str, ...], finished: Path) -> None:
    said = call("run", "demo", *tiny, "--export", "torch", "--quiet")
    assert said.status == 0
    assert "checked in" in said.out
    again = call("run", "demo", *tiny, "--export", "torch", "--json")
    (exported,) = json.loads(again.out)["exported"]
    assert Path(exported["path"]).is_file()
    assert exported["agreement"]["max_relative_error"] <= exported["agreement"]["tolerance"]


def test_what_was_trained_is_told_where_an_export_fails(
    call: Any, tiny: tuple[str, ...], finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exported(target: Target, **options: Any) -> ExportReport:
        if target.folder is not None and target.folder.path.name.endswith("seed1"):
            raise ValueError("the file cannot be written")
        return export_network(target, **options)

    monkeypatch.setattr("strucspars.cli.run.export_network", exported)
    said = call("run", "demo", *tiny, "--seeds", "0,1", "--export", "torch", "--json")
    assert said.status == 2
    assert said.err.endswith("error: the file cannot be written\n")
    document = json.loads(said.out)
    assert [run["summary"]["seed"] for run in document["runs"]] == [0, 1]
    assert [Path(file["path"]).parent.name for file in document["exported"]] == ["demo"]


def test_a_run_that_failed_is_named_where_an_export_fails_too(
    call: Any, tiny: tuple[str, ...], finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exported(target: Target, **options: Any) -> ExportReport:
        raise ValueError("the file cannot be written")

    monkeypatch.setattr("strucspars.cli.run.export_network", exported)
    Path("runs/demo-seed1").write_text("in the way")
    said = call("run", "demo", *tiny, "--seeds", "0,1", "--export", "torch", "--quiet")
    assert said.status == 1
    assert "error: 1 of 2 runs failed: runs/demo-seed1: " in said.err
    assert said.err.endswith("; and not all others could be exported: the file cannot be written\n")


def test_a_missing_runtime_is_noticed_before_the_training(
    call: Any, tiny: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)
    said = call("run", "demo", *tiny, "--export", "openvino")
    assert said.status != 0
    assert "pip install 'strucspars[openvino]'" in said.err
    assert not Path("runs/demo").exists()


def test_the_seeds_of_the_command_win_over_the_recipes() -> None:
    assert [recipe.seed for recipe in seeded_recipes("demo", ["seed=5"], [0, 1])] == [0, 1]
    assert [recipe.seed for recipe in seeded_recipes("demo", ["seed=5"], None)] == [5]


@pytest.mark.parametrize(("asked", "workers"), [("0", 0), ("3", 3), ("null", 6)])
def test_no_solver_workers_are_none_on_a_gpu_too(
    call: Any, monkeypatch: pytest.MonkeyPatch, asked: str, workers: int
) -> None:
    pools: list[int] = []

    @contextmanager
    def solver_pool(workers: int) -> Iterator[None]:
        pools.append(workers)
        yield

    monkeypatch.setattr("strucspars.train.solver_pool.solver_pool", solver_pool)
    monkeypatch.setattr("strucspars.train.side_by_side.run_side_by_side", lambda recipes, **options: {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    call("run", "demo", f"engine.solver_workers={asked}")
    assert pools == [workers]


def test_int8_needs_a_format(call: Any, networks: Path) -> None:
    said = call("run", "demo", "--int8")
    assert said.status == 2
    assert "name its format with --export onnx" in said.err
