import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from strucspars.core.plan import GroupingPlan
from strucspars.sparsify.agreement import agreed

WORKER = Path(__file__).parent / "rank_worker.py"


def run_ranks(world: int, folder: Path) -> list[dict[str, Any]]:
    command = [sys.executable, str(WORKER)]
    ranks = [
        subprocess.Popen([*command, str(rank), str(world), str(folder)], stderr=subprocess.PIPE, text=True)
        for rank in range(world)
    ]
    complaints = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * world, complaints
    return [torch.load(folder / f"{rank}-of-{world}.pt", weights_only=True) for rank in range(world)]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(2, tmp_path_factory.mktemp("two-ranks"))


def test_both_ranks_have_the_same_plan_and_weights(two_ranks: list[dict[str, Any]]) -> None:
    first, second = two_ranks
    assert first["plan"] == second["plan"]
    torch.testing.assert_close(first["state"], second["state"], rtol=0, atol=0)
    torch.testing.assert_close(first["attached"], second["attached"], rtol=0, atol=0)


def test_two_processes_equal_one_with_the_whole_batch(two_ranks: list[dict[str, Any]], tmp_path: Path) -> None:
    (alone,) = run_ranks(1, tmp_path)
    together, single = (GroupingPlan.from_json(outcome["plan"]) for outcome in (two_ranks[0], alone))
    assert together.layers == single.layers
    assert together.min_kept_norm == pytest.approx(single.min_kept_norm)
    torch.testing.assert_close(two_ranks[0]["state"], alone["state"], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(two_ranks[0]["attached"], alone["attached"], rtol=1e-6, atol=1e-9)


def test_two_processes_decide_and_anneal_alike(two_ranks: list[dict[str, Any]]) -> None:
    first, second = two_ranks
    assert first["progressive_plan"] == second["progressive_plan"]
    torch.testing.assert_close(first["progressive_state"], second["progressive_state"], rtol=0, atol=0)


def test_the_loss_term_and_the_gradient_are_the_same_over_two_processes(two_ranks: list[dict[str, Any]]) -> None:
    for rank in two_ranks:
        torch.testing.assert_close(rank["state_by_loss"], rank["state"], rtol=1e-9, atol=1e-12)


def test_rank_0_decides_for_all(two_ranks: list[dict[str, Any]]) -> None:
    assert [rank["taken"] for rank in two_ranks] == [0, 0]


def test_a_refusal_or_failure_on_rank_0_is_raised_everywhere(two_ranks: list[dict[str, Any]]) -> None:
    first, second = two_ranks
    assert first["refusal"] == "ValueError: rank 0 says no"
    assert second["refusal"] == "ValueError: rank 0 could not decide: ValueError: rank 0 says no"
    assert first["failure"].startswith("ZeroDivisionError")
    assert second["failure"].startswith("RuntimeError: rank 0 could not decide: ZeroDivisionError")


def test_ranks_out_of_step_take_over_orders_lambda_and_plans_of_rank_0(two_ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["out_of_step"] for rank in two_ranks)
    assert first == second
    assert first["lambda"] == 0.5


def test_a_decision_that_does_not_arrive_fails_on_every_rank(two_ranks: list[dict[str, Any]]) -> None:
    for rank in two_ranks:
        assert rank["lost"] == (
            "RuntimeError: ranks [1] hold another grouping decision than rank 0; check the process group"
        )


def test_both_ranks_keep_the_same_minimum_width(two_ranks: list[dict[str, Any]]) -> None:
    first, second = two_ranks
    assert first["wide_plan"] == second["wide_plan"]
    layers = GroupingPlan.from_json(first["wide_plan"]).layers
    assert [min(layer.weight_shape[:2]) // layer.num_groups for layer in layers.values()] == [4]


def test_a_width_that_rules_out_the_target_is_refused_on_every_rank(two_ranks: list[dict[str, Any]]) -> None:
    for rank in two_ranks:
        assert rank["refused_width"].startswith("ValueError: target 0.4 cannot be reached: ")
        assert "with min_channels_per_group=4 is 0.0879 of all params" in rank["refused_width"]


def test_one_process_agrees_with_itself() -> None:
    assert agreed(lambda: {"level": 3}) == {"level": 3}
    with pytest.raises(ZeroDivisionError):
        agreed(lambda: 1 // 0)
