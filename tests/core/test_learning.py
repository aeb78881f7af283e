import math
from itertools import permutations
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.testing import assert_array_equal

from strucspars.core import search as fast_search
from strucspars.core.checks import FloatArray, IntArray
from strucspars.core.hierarchy import connection_mask, group_penalty, max_group_level, num_groups, penalty_matrix
from strucspars.core.importance import kept_norm_by_level, largest_group_level
from strucspars.core.learning import Method, learn_permutations, refine_at_level
from strucspars.core.permutation import Connectivity, connection_cost
from strucspars.core.search import BisectionEffort, bisect_blocks

METHODS: list[Method] = ["fast", "paper", "paper-pot"]


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest) -> Method:
    if request.param == "paper-pot":
        pytest.importorskip("ot", reason="POT is not installed")
    chosen: Method = request.param
    return chosen


def permuted(importance: FloatArray, learned: Connectivity) -> FloatArray:
    return importance[learned.out_perm][:, learned.in_perm]


def full_cost(importance: FloatArray, learned: Connectivity, decay: float = 0.5) -> float:
    return float((permuted(importance, learned) * penalty_matrix(*importance.shape, decay=decay)).sum())


def planted_blocks(width: int, groups: int, signal: float, seed: int) -> tuple[FloatArray, IntArray, IntArray]:
    """Noise with stronger hidden diagonal blocks, shuffled; and the hidden block of every row and column."""
    generator = np.random.default_rng(seed)
    block = np.arange(width) * groups // width
    importance = np.abs(generator.standard_normal((width, width, 9))).sum(axis=2)
    importance *= 1 + signal * np.equal.outer(block, block)
    rows, columns = generator.permutation(width), generator.permutation(width)
    return importance[rows][:, columns], block[rows], block[columns]


def test_the_reported_cost_is_the_papers_metric(method: Method) -> None:
    importance = np.random.default_rng(0).random((64, 192))  # 64 groups: deeper than the fast solver's trunk
    for decay in (0.5, 0.3, 1.0):
        learned = learn_permutations(importance, method, decay=decay)
        assert learned.converged
        assert learned.cost == pytest.approx(full_cost(importance, learned, decay), rel=1e-12)
        assert learned.cost < (importance * penalty_matrix(64, 192, decay=decay)).sum()


@settings(max_examples=60)
# Denormal numbers: products with the penalty round to other multiples of the smallest one.
@example(
    np.array([[0, 0, 5e-324, 1e-323], [0, 2e-323, 0, 0], [3e-323, 0, 0, 5e-324], [0, 0, 5e-324, 1.5e-323]]), "fast"
)
@example(np.array([[0, 5e-324], [1.0, 0]]), "paper")
@given(
    st.tuples(st.integers(1, 12), st.integers(1, 12)).flatmap(
        lambda shape: arrays(np.float64, shape, elements=st.sampled_from([0.0, 1.0]) | st.floats(0, 1e6))
    ),
    st.sampled_from(["fast", "paper"]),
)
def test_any_matrix_gives_permutations_no_worse_than_the_identity(importance: FloatArray, method: Method) -> None:
    learned = learn_permutations(importance, method)
    assert_array_equal(np.sort(learned.out_perm), np.arange(importance.shape[0]))
    assert_array_equal(np.sort(learned.in_perm), np.arange(importance.shape[1]))
    # In a scale where products of small importances and the penalty keep their digits.
    exponent = math.frexp(importance.max())[1]
    scaled, cost = np.ldexp(importance, -exponent), math.ldexp(learned.cost, -exponent)
    rounding = math.ldexp(5e-324, -exponent)
    identity_cost = float((scaled * penalty_matrix(*importance.shape)).sum())
    assert cost <= identity_cost * (1 + 1e-12) + rounding
    assert cost == pytest.approx(full_cost(scaled, learned), rel=1e-9, abs=1e-9 * scaled.sum() + rounding)


def test_denormal_importances_are_ordered_like_any_others_in_their_scale() -> None:
    whole = np.random.default_rng(0).integers(0, 100, (8, 8)).astype(float)
    learned, expected = learn_permutations(5e-324 * whole), learn_permutations(whole)
    assert_array_equal(learned.out_perm, expected.out_perm)
    assert_array_equal(learned.in_perm, expected.in_perm)
    # Beside large importances they count as zero.
    mixed = np.where(np.eye(8, dtype=bool), 1.0, 5e-324 * whole)
    assert learn_permutations(mixed).cost == learn_permutations(np.eye(8)).cost == 0


def test_the_fast_solver_comes_near_the_global_optimum_of_small_layers() -> None:
    penalty = penalty_matrix(4, 4)
    orders = [list(order) for order in permutations(range(4))]
    shares = []
    for seed in range(40):
        importance = np.random.default_rng(seed).random((4, 4))
        best = min((importance[rows][:, columns] * penalty).sum() for rows in orders for columns in orders)
        random_order = importance.sum() * penalty.mean()
        learned = learn_permutations(importance)
        assert learned.cost >= best * (1 - 1e-12)
        shares.append((random_order - learned.cost) / (random_order - best))
    assert np.mean(shares) > 0.98


def test_the_fast_solver_beats_the_papers_on_noise() -> None:
    fast, paper = 0.0, 0.0
    for seed, shape in enumerate([(64, 64), (256, 64), (64, 256), (128, 128), (96, 160)]):
        importance = np.abs(np.random.default_rng(seed).standard_normal(shape))
        expected = penalty_matrix(*shape).mean()  # what a random order costs per unit of norm
        fast += expected - learn_permutations(importance).cost / importance.sum()
        paper += expected - learn_permutations(importance, "paper").cost / importance.sum()
    assert fast > 1.1 * paper > 0


@pytest.mark.parametrize("signal", [2.0, 4.0])
def test_planted_blocks_are_recovered_exactly(signal: float) -> None:
    importance, row_block, column_block = planted_blocks(256, 8, signal, seed=7)
    learned = learn_permutations(importance)
    rows = row_block[learned.out_perm].reshape(8, -1)
    columns = column_block[learned.in_perm].reshape(8, -1)
    assert_array_equal(rows, np.broadcast_to(rows[:, :1], rows.shape))
    assert_array_equal(columns, np.broadcast_to(rows[:, :1], columns.shape))


@pytest.mark.parametrize("shape", [(64, 32), (96, 40), (256, 128)])
def test_a_refresh_is_never_worse_than_its_start(shape: tuple[int, int], method: Method) -> None:
    generator = np.random.default_rng(0)
    for _ in range(3):
        importance = generator.random(shape)
        start = generator.permutation(shape[0]), generator.permutation(shape[1])
        start_cost = (importance[start[0]][:, start[1]] * penalty_matrix(*shape)).sum()
        refreshed = learn_permutations(importance, method, start=start)
        assert refreshed.cost < start_cost
        again = learn_permutations(importance, method, start=refreshed)
        assert again.cost <= refreshed.cost


@pytest.mark.parametrize("shape", [(64, 32), (256, 256)])
def test_a_refresh_of_unchanged_weights_keeps_every_trunk_group(shape: tuple[int, int]) -> None:
    importance = np.random.default_rng(0).random(shape)
    learned = learn_permutations(importance)
    refreshed = learn_permutations(importance, start=learned)
    for old, new in ((learned.out_perm, refreshed.out_perm), (learned.in_perm, refreshed.in_perm)):
        places = len(old) // 32
        assert_array_equal(np.argsort(new) // places, np.argsort(old) // places)
    assert refreshed.sweeps == 1


def test_a_second_refresh_never_costs_more_not_by_one_bit(method: Method) -> None:
    for seed in range(30):
        importance = np.random.default_rng(seed).random((64, 64))
        learned = learn_permutations(importance, method)
        assert learn_permutations(importance, method, start=learned).cost <= learned.cost


def test_a_refresh_that_pays_only_in_the_trunk_returns_its_start() -> None:
    # Orders that are optimal over all 64 groups: what 32 groups still gain, the leaves mostly lose again.
    returned_starts = 0
    for seed in range(8):
        importance = np.random.default_rng(seed).random((64, 64))
        start = learn_permutations(importance, "paper")
        refreshed = learn_permutations(importance, start=start)
        assert refreshed.cost <= start.cost
        returned_starts += refreshed.cost == start.cost
    assert 0 < returned_starts < 8


def test_the_fast_solver_is_deterministic_for_a_seed() -> None:
    importance = np.random.default_rng(0).random((128, 128))
    first, second, other = (learn_permutations(importance, seed=seed) for seed in (3, 3, 4))
    assert_array_equal(first.out_perm, second.out_perm)
    assert_array_equal(first.in_perm, second.in_perm)
    assert first.cost == second.cost != other.cost


def test_the_callers_arrays_are_left_alone_and_the_result_is_locked(method: Method) -> None:
    importance = np.random.default_rng(0).random((8, 8))
    start = np.arange(8)[::-1].copy(), np.arange(8)
    before = importance.copy()
    learned = learn_permutations(importance, method, start=start)
    assert_array_equal(importance, before)
    assert_array_equal(start[0], np.arange(8)[::-1])
    assert start[0].flags.writeable
    assert not learned.out_perm.flags.writeable
    assert not learned.in_perm.flags.writeable


def test_a_depth_limit_forgets_the_deeper_halvings(method: Method) -> None:
    importance = np.random.default_rng(0).random((32, 32))
    learned = learn_permutations(importance, method, max_group_level=2)
    outside = ~connection_mask(32, 32, 2)
    assert learned.cost == pytest.approx((permuted(importance, learned) * outside).sum())
    assert learn_permutations(importance, method, max_group_level=1).cost == 0.0


@pytest.mark.parametrize("shape", [(1, 1), (1, 8), (7, 64), (64, 3)])
def test_a_layer_of_odd_width_keeps_its_order(shape: tuple[int, int], method: Method) -> None:
    learned = learn_permutations(np.random.default_rng(0).random(shape), method)
    assert_array_equal(learned.out_perm, np.arange(shape[0]))
    assert_array_equal(learned.in_perm, np.arange(shape[1]))
    assert learned.cost == 0.0
    assert learned.converged


@pytest.mark.parametrize("matrix", [np.zeros((16, 8)), np.ones((16, 8)), np.eye(64), np.tril(np.ones((64, 64)))])
def test_zero_constant_and_tied_matrices_give_a_valid_result(matrix: FloatArray, method: Method) -> None:
    learned = learn_permutations(matrix, method)
    assert learned.converged
    assert learned.cost == pytest.approx(full_cost(matrix, learned))


@pytest.mark.parametrize("scale", [1e-300, 1e-20, 1e20, 1e300])
def test_the_scale_of_the_weights_does_not_matter(scale: float, method: Method) -> None:
    importance = np.random.default_rng(0).random((64, 64))
    learned = learn_permutations(importance * scale, method)
    assert full_cost(importance, learned) == pytest.approx(learn_permutations(importance, method).cost, rel=5e-3)


def test_only_the_method_with_pot_calls_pot(monkeypatch: pytest.MonkeyPatch) -> None:
    ot = pytest.importorskip("ot", reason="POT is not installed")
    solve, sizes = ot.emd, []

    def counted(rows: FloatArray, *arguments: object, **options: object) -> object:
        sizes.append(len(rows))
        return solve(rows, *arguments, **options)

    monkeypatch.setattr(ot, "emd", counted)
    learn_permutations(np.random.default_rng(0).random((8, 8)), "paper")
    assert sizes == []
    learn_permutations(np.random.default_rng(0).random((8, 8)), "paper-pot")
    assert set(sizes) == {8}


def test_an_order_that_is_perfect_already_is_kept() -> None:
    # 64 equal blocks of two: a search that starts anywhere else cuts some of them.
    importance = np.kron(np.eye(64), np.ones((2, 2)))
    assert_array_equal(learn_permutations(importance).out_perm, np.arange(128))
    assert learn_permutations(importance).cost == (importance * penalty_matrix(128, 128)).sum()


def test_the_leaves_below_32_groups_are_ordered_too() -> None:
    generator = np.random.default_rng(0)
    importance = np.kron(np.eye(32), np.full((4, 4), 0.01)) + np.eye(128)  # 128 groups of one, in 32 blocks of four
    shuffled = importance[generator.permutation(128)][:, generator.permutation(128)]
    kept = kept_norm_by_level(permuted(shuffled, learn_permutations(shuffled)))
    assert kept[5] > 0.95  # 32 groups: a cold search finds nearly all blocks
    assert kept[7] > 0.8  # 128 groups: a random order inside the blocks would keep a quarter


@pytest.mark.parametrize("shape", [(32, 32), (64, 16), (96, 160)])
def test_refining_at_a_level_never_lowers_the_kept_norm(shape: tuple[int, int]) -> None:
    importance = np.random.default_rng(0).random(shape)
    learned = learn_permutations(importance)
    gained = 0.0
    for level in range(1, max_group_level(*shape) + 1):
        refined = refine_at_level(importance, learned, group_level=level)
        before = kept_norm_by_level(permuted(importance, learned))[level - 1]
        after = kept_norm_by_level(permuted(importance, refined))[level - 1]
        assert after >= before
        assert refined.cost == pytest.approx((1 - after) * importance.sum())
        assert largest_group_level(permuted(importance, refined), min_kept_norm=before) >= level
        gained += after - before
    assert gained > 0
    assert num_groups(level) > 1


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"method": "best"}, "method must be one of fast, paper, paper-pot, got 'best'"),
        ({"decay": 0.0}, r"decay must lie in \(0, 1\], got 0.0"),
        ({"decay": 1.5}, r"decay must lie in \(0, 1\]"),
        ({"max_group_level": 9}, r"max_group_level must lie in 1\.\.3 for a 4 x 8 layer"),
        ({"max_group_level": 0}, "max_group_level must be a whole number"),
        ({"decay": "0.5"}, "decay must lie in"),
        ({"start": ([0, 1, 2, 2], range(8))}, "start's out_perm is not a permutation"),
        ({"start": (range(4), range(7))}, "start's in_perm must list 8 channels"),
        ({"seed": -1}, "seed must be a whole number from 0 on, got -1"),
    ],
)
def test_a_bad_option_is_named_with_its_limits(options: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        learn_permutations(np.ones((4, 8)), **options)  # type: ignore[arg-type]  # assorted bad input


@pytest.mark.parametrize("importance", [[1.0, 2.0], [[np.nan, 1.0]], [[-1.0, 1.0]], [[]]])
def test_a_bad_importance_is_refused(importance: npt.ArrayLike) -> None:
    with pytest.raises(ValueError, match="importance"):
        learn_permutations(importance)
    with pytest.raises(ValueError, match="importance"):
        refine_at_level(importance, ([0], [0]), group_level=1)


def test_refining_at_an_impossible_level_names_the_limit() -> None:
    with pytest.raises(ValueError, match=r"1\.\.3 for a 4 x 8 layer"):
        refine_at_level(np.ones((4, 8)), (range(4), range(8)), group_level=4)


@pytest.mark.parametrize("places", [2, 8])
def test_the_leaves_of_a_refresh_are_reordered_where_that_pays_and_only_there(places: int) -> None:
    # 32 heavy blocks in place, and noise: the trunk stays, the leaves have something to gain or to lose.
    width = 32 * places
    generator = np.random.default_rng(0)
    importance = np.kron(np.eye(32), np.full((places, places), 100.0)) + generator.random((width, width))
    blocks = [slice(first, first + places) for first in range(0, width, places)]
    penalty = penalty_matrix(width, width)[:places, :places]

    def leaf_costs(learned: Connectivity) -> FloatArray:
        return np.array([(permuted(importance, learned)[block, block] * penalty).sum() for block in blocks])

    orders = Connectivity(np.arange(width), np.arange(width), cost=0.0, sweeps=0, converged=True)
    cheaper = []
    for _ in range(4):
        refreshed = learn_permutations(importance, start=orders)
        assert_array_equal(refreshed.out_perm // places, np.arange(width) // places)
        assert_array_equal(refreshed.in_perm // places, np.arange(width) // places)
        assert (leaf_costs(refreshed) <= leaf_costs(orders)).all()
        cheaper.append(int((leaf_costs(refreshed) < leaf_costs(orders)).sum()))
        orders = refreshed
        importance += 0.1 * generator.random((width, width))
    assert cheaper[0] > 8


def test_every_method_goes_on_from_the_start_that_it_is_given(method: Method) -> None:
    importance = np.random.default_rng(0).random((32, 32))
    start = learn_permutations(importance)
    assert learn_permutations(importance, method, start=start).cost <= start.cost
    assert learn_permutations(importance, method, start=(range(32), range(32)[::-1])).cost > start.cost


def test_refining_beside_a_heavy_row_never_costs_more_not_by_one_bit() -> None:
    # The others move for less than the rounding of the whole sum, which rises in a few of these.
    outside = 1 - np.eye(2)
    for seed in range(60):
        importance = np.random.default_rng(seed).random((64, 64))
        importance[3] *= 1e17
        start = np.arange(64), np.argsort(-importance[3])
        start_cost = connection_cost(importance, outside, *start)
        assert refine_at_level(importance, start, group_level=2).cost <= start_cost


@pytest.mark.parametrize(("width", "effort"), [(64, fast_search.SMALL_LAYER_EFFORT), (66, fast_search.TRUNK_EFFORT)])
def test_layers_up_to_64_x_64_channels_are_searched_longer(
    width: int, effort: BisectionEffort, monkeypatch: pytest.MonkeyPatch
) -> None:
    efforts = []

    def recorded(*arguments: Any, **options: Any) -> tuple[IntArray, IntArray]:
        efforts.append(options["effort"])
        return bisect_blocks(*arguments, **options)

    monkeypatch.setattr(fast_search, "bisect_blocks", recorded)
    importance, generator = np.random.default_rng(0).random((width, width)), np.random.default_rng(0)
    fast_search.search_from_scratch(importance, group_penalty(1), generator=generator)
    assert efforts == [effort]
