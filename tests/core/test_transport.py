import sys
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from strucspars.core.checks import FloatArray, IntArray
from strucspars.core.transport import (
    AssignToGroups,
    assign_by_group_cycles,
    assign_by_network_simplex,
    assign_by_positions,
)

SOLVERS = [assign_by_group_cycles, assign_by_positions, assign_by_network_simplex]

# Small whole numbers make ties, the hard case of any exchange argument.
tied_or_not = st.integers(0, 3).map(float) | st.floats(-10, 10, width=32)


def cost_tables(groups_and_places: tuple[int, int]) -> st.SearchStrategy[FloatArray]:
    groups, places = groups_and_places
    return arrays(np.float64, (groups * places, groups), elements=tied_or_not)


def total(cost: FloatArray, order: IntArray | tuple[int, ...]) -> float:
    channels, groups = cost.shape
    return float(cost[list(order), np.arange(channels) * groups // channels].sum())


@pytest.fixture(params=SOLVERS, ids=lambda solver: solver.__name__)
def assign(request: pytest.FixtureRequest) -> AssignToGroups:
    if request.param is assign_by_network_simplex:
        pytest.importorskip("ot", reason="POT is not installed")
    solver: AssignToGroups = request.param
    return solver


@given(st.sampled_from([(1, 3), (2, 1), (2, 2), (2, 3), (3, 2), (4, 1), (6, 1)]).flatmap(cost_tables))
def test_group_cycles_find_the_minimum_of_brute_force(cost: FloatArray) -> None:
    order = assign_by_group_cycles(cost)
    assert sorted(order) == list(range(len(cost)))
    best = min(total(cost, candidate) for candidate in permutations(range(len(cost))))
    assert total(cost, order) == pytest.approx(best, abs=1e-9)


@given(st.tuples(st.sampled_from([2, 4, 8]), st.integers(1, 6)).flatmap(cost_tables))
def test_group_cycles_find_the_minimum_of_the_assignment_problem(cost: FloatArray) -> None:
    expected = total(cost, assign_by_positions(cost))
    assert total(cost, assign_by_group_cycles(cost)) == pytest.approx(expected, abs=1e-9)


def test_every_solver_finds_the_minimum_of_brute_force(assign: AssignToGroups) -> None:
    for seed in range(20):
        cost = np.random.default_rng(seed).random((6, 2 + seed % 2))
        best = min(total(cost, candidate) for candidate in permutations(range(6)))
        assert total(cost, assign(cost)) == pytest.approx(best)


def test_every_solver_returns_a_permutation_when_all_costs_are_equal(assign: AssignToGroups) -> None:
    assert sorted(assign(np.zeros((8, 4)))) == list(range(8))


def test_all_solvers_agree_on_a_layer_of_real_size(assign: AssignToGroups) -> None:
    cost = np.random.default_rng(0).random((256, 32))
    assert total(cost, assign(cost)) == pytest.approx(total(cost, assign_by_positions(cost)))


@pytest.mark.parametrize("scale", [1e-300, 1e-18, 1e-12, 1.0, 1e12, 1e300])
def test_every_solver_is_exact_at_any_scale(scale: float, assign: AssignToGroups) -> None:
    cost = np.random.default_rng(0).random((64, 8))
    assert total(cost, assign(cost * scale)) == pytest.approx(total(cost, assign_by_positions(cost)))


def test_one_heavy_channel_does_not_blur_the_others() -> None:
    cost = np.random.default_rng(0).random((64, 8))
    heavy = cost.copy()
    heavy[5] += 1e14  # the same for every group: the optimum of all others stays
    light = np.delete(np.arange(64), 5)
    group = np.arange(64) * 8 // 64
    found_group = group[np.argsort(assign_by_group_cycles(heavy))]
    expected_group = group[np.argsort(assign_by_positions(cost))]
    assert cost[light, found_group[light]].sum() == pytest.approx(cost[light, expected_group[light]].sum(), abs=0.02)


def test_channels_stay_in_place_where_nothing_pays() -> None:
    cost = np.random.default_rng(0).random((64, 8))
    settled = cost[assign_by_group_cycles(cost)]
    np.testing.assert_array_equal(assign_by_group_cycles(settled), np.arange(64))


def test_missing_pot_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ot", None)
    with pytest.raises(ValueError, match=r"pip install 'strucspars\[pot\]', or use method='paper'"):
        assign_by_network_simplex(np.zeros((4, 2)))


def test_pots_iteration_limit_is_not_hit_silently(monkeypatch: pytest.MonkeyPatch) -> None:
    ot = pytest.importorskip("ot", reason="POT is not installed")
    solve = ot.emd
    monkeypatch.setattr(ot, "emd", lambda *args, numItermax, log: solve(*args, numItermax=3, log=log))
    with (
        pytest.warns(UserWarning, match="numItermax"),
        pytest.raises(RuntimeError, match=r"did not solve the 64 x 64 transport problem.*numItermax"),
    ):
        assign_by_network_simplex(np.random.default_rng(0).random((64, 8)))


def test_a_saving_is_taken_however_small_beside_the_prices_but_not_one_that_rounding_could_make() -> None:
    for saving, order in ((1e-9, [1, 0]), (1e-14, [1, 0]), (np.finfo(np.float64).eps, [0, 1])):
        assert assign_by_group_cycles(np.array([[0.0, 1.0], [0.0, 1.0 + saving]])).tolist() == order


def test_pot_may_take_more_steps_than_its_default_which_wide_layers_need(monkeypatch: pytest.MonkeyPatch) -> None:
    ot = pytest.importorskip("ot", reason="POT is not installed")
    solve, limits = ot.emd, []

    def noted(*arguments: object, numItermax: int, log: bool) -> object:
        limits.append(numItermax)
        return solve(*arguments, numItermax=numItermax, log=log)

    monkeypatch.setattr(ot, "emd", noted)
    assign_by_network_simplex(np.random.default_rng(0).random((8, 2)))
    assert min(limits) > 1_000_000
