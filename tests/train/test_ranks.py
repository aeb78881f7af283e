"""Two processes that torchrun has started: one plan, one network, one folder."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from strucspars.train.pipeline import run_pipeline
from strucspars.train.recipe import Recipe
from strucspars.train.run_folder import RunFolder

SCRIPT = Path(__file__).with_name("rank_run.py")
RUNS = ("plain", "stopped", "dropout", "rich")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def ranks(place: Path) -> list[Any]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    variables = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [*launcher, str(SCRIPT), str(place)]
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=300, env=variables, check=False)
    assert outcome.returncode == 0, outcome.stderr
    return [json.loads((place / f"rank{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("name", RUNS)
def test_both_processes_have_the_same_network_after_every_epoch(ranks: list[Any], name: str) -> None:
    first, second = (rank[name] for rank in ranks)
    assert len(first["digests"]) == (4 if name == "stopped" else 5)
    assert first["digests"] == second["digests"]


@pytest.mark.parametrize("name", RUNS)
def test_both_processes_return_the_same_summary(ranks: list[Any], name: str) -> None:
    first, second = (rank[name]["summary"] for rank in ranks)
    assert first == second


@pytest.mark.parametrize("name", RUNS)
def test_the_folder_is_complete_and_written_once(ranks: list[Any], place: Path, name: str) -> None:
    folder = RunFolder(place / name)
    assert [row["stage"] for row in folder.metrics()] == ["sparsify"] * 2 + ["compress"] + ["finetune"] * 2
    for path in (folder.plan_path, folder.model_path, folder.summary_json_path, folder.environment_path):
        assert path.is_file(), path
    assert json.loads(folder.summary_json_path.read_text()) == ranks[0][name]["summary"]


def test_a_stop_that_one_process_hears_of_stops_both_and_loses_nothing(ranks: list[Any], place: Path) -> None:
    assert [rank["stopped"]["stopped"] for rank in ranks] == ["stopped after epoch 1 of sparsify"] * 2
    plain, stopped = (RunFolder(place / name).load_checkpoint() for name in ("plain", "stopped"))
    assert plain is not None
    assert stopped is not None
    torch.testing.assert_close(stopped["model"], plain["model"], rtol=0, atol=0)
    assert RunFolder(place / "stopped").load_plan() == RunFolder(place / "plain").load_plan()


def test_without_batch_norm_two_processes_train_as_one(
    ranks: list[Any], place: Path, small_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    run_pipeline(small_recipe("model.name=small_networks:without_norm"), tmp_path / "one")
    one, two = RunFolder(tmp_path / "one"), RunFolder(place / "plain")
    for alone, together in zip(one.metrics(), two.metrics(), strict=True):
        assert together["test_loss"] == pytest.approx(alone["test_loss"], rel=1e-4)
        if "train_loss" in alone:
            assert together["train_loss"] == pytest.approx(alone["train_loss"], rel=1e-4)
    plans = [folder.load_plan() for folder in (one, two)]
    assert plans[0] is not None
    assert plans[1] is not None
    assert plans[0].layers == plans[1].layers


def test_processes_that_stop_together_in_the_middle_of_an_epoch_end_as_if_they_had_not(
    ranks: list[Any], place: Path, assert_same_outcome: Callable[..., None]
) -> None:
    assert [rank["midway"] for rank in ranks] == ["stopped in epoch 1 of sparsify"] * 2
    assert_same_outcome(place / "dropout", place / "dropout-midway")


def test_another_number_of_processes_cannot_go_on_in_the_middle_of_an_epoch(
    ranks: list[Any], place: Path, small_recipe: Callable[..., Recipe]
) -> None:
    assert ranks[0]["midway"].startswith("stopped in")
    recipe = small_recipe("model.name=small_networks:with_dropout", "stage1.ema=0.8")
    with pytest.raises(ValueError, match="in the middle of an epoch by 2 processes, and this run has 1; start as many"):
        run_pipeline(recipe, place / "dropout-left")


def test_statistics_recalibrated_by_two_processes_are_those_of_all_images(ranks: list[Any]) -> None:
    mean, variance = ranks[0]["recalibrated"]
    assert ranks[1]["recalibrated"] == [mean, variance]
    assert mean == pytest.approx(8.001)
    # Within a process (of 256 pixels), and between the two.
    assert variance == pytest.approx(0.003**2 * 256 / 255 + 0.001**2, rel=0.01)


def test_processes_do_not_drop_the_same_neurons(ranks: list[Any]) -> None:
    # Those of the epoch's dropout, of the first stage's first epoch.
    assert ranks[0]["plain"]["seeds"][0] != ranks[1]["plain"]["seeds"][0]
