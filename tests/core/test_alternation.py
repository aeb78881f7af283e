from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strucspars.core.checks import FloatArray
from strucspars.core.hierarchy import group_penalty, penalty_matrix
from strucspars.core.permutation import Connectivity, connection_cost
from strucspars.core.search import alternate
from strucspars.core.transport import AssignToGroups, assign_by_group_cycles, assign_by_positions

EXACT_SOLVERS = pytest.mark.parametrize("assign", [assign_by_group_cycles, assign_by_positions])


def from_identity(importance: FloatArray, halvings: int, assign: AssignToGroups, max_sweeps: int = 100) -> Connectivity:
    out_channels, in_channels = importance.shape
    return alternate(
        importance,
        group_penalty(halvings),
        out_perm=np.arange(out_channels),
        in_perm=np.arange(in_channels),
        assign=assign,
        max_sweeps=max_sweeps,
    )


@given(st.integers(0, 2**32 - 1))
def test_cost_in_groups_equals_the_sum_over_channels(seed: int) -> None:
    generator = np.random.default_rng(seed)
    importance = generator.random((8, 24))
    out_perm, in_perm = generator.permutation(8), generator.permutation(24)
    expected = (importance[out_perm][:, in_perm] * penalty_matrix(8, 24)).sum()
    assert connection_cost(importance, group_penalty(3), out_perm, in_perm) == pytest.approx(expected)


@EXACT_SOLVERS
def test_the_first_half_step_is_exact(assign: AssignToGroups) -> None:
    importance = np.random.default_rng(1).random((6, 4))
    one_sweep = from_identity(importance, 1, assign, max_sweeps=1)
    penalty = penalty_matrix(6, 4)
    best_rows = min((importance[list(rows)] * penalty).sum() for rows in permutations(range(6)))
    rows_only = (importance[one_sweep.out_perm] * penalty).sum()
    assert rows_only == pytest.approx(best_rows)


@EXACT_SOLVERS
def test_a_sweep_ends_with_the_best_columns_for_its_rows(assign: AssignToGroups) -> None:
    penalty = penalty_matrix(4, 6)
    for seed in range(5):
        importance = np.random.default_rng(seed).random((4, 6))
        one_sweep = from_identity(importance, 1, assign, max_sweeps=1)
        rows = importance[one_sweep.out_perm]
        best_columns = min((rows[:, list(columns)] * penalty).sum() for columns in permutations(range(6)))
        assert (rows[:, one_sweep.in_perm] * penalty).sum() == pytest.approx(best_columns)


@EXACT_SOLVERS
def test_the_end_is_optimal_in_rows_and_in_columns(assign: AssignToGroups) -> None:
    for seed in range(5):
        importance = np.random.default_rng(seed).random((4, 6))
        end = from_identity(importance, 1, assign)
        assert end.converged
        penalty = penalty_matrix(4, 6)
        by_rows = min((importance[list(rows)][:, end.in_perm] * penalty).sum() for rows in permutations(range(4)))
        by_columns = min((importance[end.out_perm][:, list(cols)] * penalty).sum() for cols in permutations(range(6)))
        cost = connection_cost(importance, group_penalty(1), end.out_perm, end.in_perm)
        assert cost == pytest.approx(by_rows)
        assert cost == pytest.approx(by_columns)


@EXACT_SOLVERS
def test_the_cost_never_rises_from_sweep_to_sweep(assign: AssignToGroups) -> None:
    importance = np.random.default_rng(3).random((32, 64))
    end = from_identity(importance, 5, assign)
    assert end.sweeps > 2
    costs = []
    for limit in range(1, end.sweeps + 1):
        limited = from_identity(importance, 5, assign, max_sweeps=limit)
        assert limited.sweeps == limit
        costs.append(connection_cost(importance, group_penalty(5), limited.out_perm, limited.in_perm))
    assert costs == sorted(costs, reverse=True)
    assert costs[0] > costs[-1]


def test_the_sweep_limit_is_reported_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    limited = from_identity(np.random.default_rng(3).random((32, 64)), 5, assign_by_group_cycles, max_sweeps=1)
    assert not limited.converged
    assert limited.sweeps == 1
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("weight", [1e14, 1e17])
def test_small_savings_count_beside_a_heavy_connection(weight: float) -> None:
    importance = np.random.default_rng(0).random((32, 32))
    importance[3, 7] = weight
    end = from_identity(importance, 2, assign_by_group_cycles)
    assert end.out_perm.tolist().index(3) // 8 == end.in_perm.tolist().index(7) // 8
    importance[3, 7] = 0.0
    start_cost = connection_cost(importance, group_penalty(2), np.arange(32), np.arange(32))
    assert connection_cost(importance, group_penalty(2), end.out_perm, end.in_perm) < 0.97 * start_cost


def test_a_heavy_row_that_stays_does_not_hide_the_savings_of_others() -> None:
    importance = np.random.default_rng(0).random((32, 32))
    heavy = importance.copy()
    heavy[3, :20] = 1e17  # more columns than one half holds: wherever they are, some lie outside
    end = from_identity(heavy, 1, assign_by_group_cycles)
    start_cost = connection_cost(importance, group_penalty(1), np.arange(32), np.arange(32))
    assert connection_cost(importance, group_penalty(1), end.out_perm, end.in_perm) < 0.97 * start_cost


def test_the_callers_orders_are_left_alone() -> None:
    out_perm, in_perm = np.arange(8), np.arange(8)
    alternate(
        np.eye(8), group_penalty(1), out_perm=out_perm, in_perm=in_perm, assign=assign_by_group_cycles, max_sweeps=3
    )
    assert out_perm.flags.writeable
    assert in_perm.flags.writeable


def test_a_saving_that_rounding_alone_could_make_moves_no_channel() -> None:
    importance = np.ones((2, 2))
    importance[0, 1] += np.finfo(np.float64).eps
    end = from_identity(importance, 1, assign_by_positions)
    assert (end.out_perm.tolist(), end.in_perm.tolist()) == ([0, 1], [0, 1])
    assert (end.sweeps, end.converged) == (1, True)
    # Sixteen times as much is a saving.
    importance[0, 1] += 15 * np.finfo(np.float64).eps
    assert from_identity(importance, 1, assign_by_positions).out_perm.tolist() == [1, 0]
