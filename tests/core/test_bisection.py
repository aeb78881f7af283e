from itertools import combinations

import numpy as np
from numpy.testing import assert_allclose, assert_array_equal

from strucspars.core.importance import kept_norm_by_level
from strucspars.core.search import (
    FROZEN,
    PRESENT_ORDER,
    BisectionEffort,
    Float32Array,
    _mean_field_gains,
    bisect_blocks,
)

EFFORT = BisectionEffort(starts=64, annealing_steps=(20, 10), rounded_steps=3)


def best_balanced_split(block: Float32Array) -> float:
    """Largest norm that any two balanced halves keep, by enumeration."""
    num_rows, num_columns = block.shape
    best = 0.0
    for upper in combinations(range(num_rows), num_rows // 2):
        rows = np.isin(np.arange(num_rows), upper)
        for left in combinations(range(num_columns), num_columns // 2):
            columns = np.isin(np.arange(num_columns), left)
            best = max(best, float(block[np.equal.outer(rows, columns)].sum()))
    return best


def test_orders_are_permutations_inside_every_block() -> None:
    blocks = np.random.default_rng(0).random((5, 8, 24), dtype=np.float32)
    row_orders, column_orders = bisect_blocks(blocks, 3, effort=EFFORT, generator=np.random.default_rng(0))
    assert_array_equal(np.sort(row_orders, axis=1), np.tile(np.arange(8), (5, 1)))
    assert_array_equal(np.sort(column_orders, axis=1), np.tile(np.arange(24), (5, 1)))


def test_one_split_finds_the_optimum_of_small_blocks() -> None:
    blocks = np.random.default_rng(1).random((20, 6, 8), dtype=np.float32)
    row_orders, column_orders = bisect_blocks(blocks, 1, effort=EFFORT, generator=np.random.default_rng(0))
    kept = [
        kept_norm_by_level(block[rows][:, columns])[1] * block.sum()
        for block, rows, columns in zip(blocks, row_orders, column_orders, strict=True)
    ]
    np.testing.assert_allclose(kept, [best_balanced_split(block) for block in blocks], rtol=1e-5)


def test_blocks_without_structure_get_a_valid_order() -> None:
    blocks = np.stack([np.zeros((4, 4)), np.ones((4, 4)), np.eye(4)]).astype(np.float32)
    row_orders, column_orders = bisect_blocks(blocks, 2, effort=EFFORT, generator=np.random.default_rng(0))
    assert_array_equal(np.sort(row_orders, axis=1), np.tile(np.arange(4), (3, 1)))
    np.testing.assert_array_equal(kept_norm_by_level(blocks[2][row_orders[2]][:, column_orders[2]]), [1, 1, 1])


def test_no_halving_leaves_everything_in_place() -> None:
    row_orders, column_orders = bisect_blocks(
        np.ones((2, 3, 5), dtype=np.float32), 0, effort=EFFORT, generator=np.random.default_rng(0)
    )
    assert_array_equal(row_orders, np.tile(np.arange(3), (2, 1)))
    assert_array_equal(column_orders, np.tile(np.arange(5), (2, 1)))


def test_a_settled_order_stays_without_random_starts() -> None:
    block_of = np.arange(16) // 4
    blocks = np.equal.outer(block_of, block_of).astype(np.float32)[None]
    row_orders, column_orders = bisect_blocks(blocks, 2, effort=PRESENT_ORDER, generator=None)
    assert_array_equal(row_orders[0] // 4, block_of)
    assert_array_equal(column_orders[0] // 4, block_of)


def kept_by_one_split(blocks: Float32Array, effort: BisectionEffort) -> list[float]:
    generator = None if effort is PRESENT_ORDER else np.random.default_rng(0)
    row_orders, column_orders = bisect_blocks(blocks, 1, effort=effort, generator=generator)
    return [
        float(kept_norm_by_level(block[rows][:, columns])[1] * block.sum())
        for block, rows, columns in zip(blocks, row_orders, column_orders, strict=True)
    ]


def test_the_last_number_of_annealing_steps_holds_for_all_deeper_halvings() -> None:
    effort = BisectionEffort(starts=1, annealing_steps=(20, 12, 8), rounded_steps=1)
    assert [effort.steps_at(halving) for halving in range(5)] == [20, 12, 8, 8, 8]


def test_heavy_rows_and_columns_do_not_lead_the_search_away() -> None:
    # Balanced halves keep the same share of whatever a row or a column has everywhere.
    generator = np.random.default_rng(2)
    blocks = generator.random((10, 16, 16), dtype=np.float32)
    rows = 4 * generator.random((10, 16, 1), dtype=np.float32)
    columns = 4 * generator.random((10, 1, 16), dtype=np.float32)
    few = BisectionEffort(starts=3, annealing_steps=(20,), rounded_steps=2)
    gained = np.array(kept_by_one_split(blocks, few)) - blocks.sum(axis=(1, 2)) / 2
    heavy = blocks + rows + columns
    gained_beside = np.array(kept_by_one_split(heavy, few)) - heavy.sum(axis=(1, 2), dtype=np.float64) / 2
    assert_allclose(gained_beside.mean(), gained.mean(), rtol=0.02)


def test_every_rounded_step_goes_on_from_the_one_before() -> None:
    blocks = np.random.default_rng(3).random((10, 32, 32), dtype=np.float32)
    kept = [
        sum(kept_by_one_split(blocks, BisectionEffort(starts=1, annealing_steps=(0,), rounded_steps=steps)))
        for steps in (1, 2, 10)
    ]
    assert kept[0] < kept[1] < kept[2]


def test_channels_of_one_half_stay_in_their_present_order() -> None:
    half_of = np.arange(64) // 32
    half_of[[0, 63]] = half_of[[63, 0]]  # two channels have to move
    blocks = np.equal.outer(half_of, half_of).astype(np.float32)[None]
    row_orders, column_orders = bisect_blocks(blocks, 1, effort=PRESENT_ORDER, generator=None)
    expected = [*range(1, 32), 63, 0, *range(32, 63)]
    assert_array_equal(row_orders[0], expected)
    assert_array_equal(column_orders[0], expected)


def test_the_gains_bring_the_scores_of_wide_and_tall_blocks_to_order_one() -> None:
    for shape in ((32, 512), (512, 32)):
        noise = np.random.default_rng(0).standard_normal((1, *shape), dtype=np.float32)
        row_gain, column_gain = _mean_field_gains(noise, starts=1)
        signs = [np.where(np.arange(width) % 2, 1, -1).astype(np.float32) for width in shape]
        row_scores, column_scores = noise[0] @ signs[1] * row_gain[0, 0], signs[0] @ noise[0] * column_gain[0, 0]
        assert 0.1 < row_scores.std() < 1
        assert 0.1 < column_scores.std() < 1


def test_every_fourth_start_is_frozen() -> None:
    noise = np.random.default_rng(0).standard_normal((2, 8, 8), dtype=np.float32)
    for gain in _mean_field_gains(noise, starts=9):
        colder = np.ones((2, 9, 1))
        colder[:, [3, 7]] = FROZEN
        assert_allclose(gain / gain[:, :1], colder, rtol=1e-6)
