from itertools import combinations

import numpy as np
from numpy.testing import assert_array_equal

from strucspars.core.bisection import PRESENT_ORDER, BisectionEffort, Float32Array, bisect_blocks
from strucspars.core.criterion import kept_norm_by_level

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
    orders = bisect_blocks(blocks, 3, effort=EFFORT, generator=np.random.default_rng(0))
    assert_array_equal(np.sort(orders.rows, axis=1), np.tile(np.arange(8), (5, 1)))
    assert_array_equal(np.sort(orders.columns, axis=1), np.tile(np.arange(24), (5, 1)))


def test_one_split_finds_the_optimum_of_small_blocks() -> None:
    blocks = np.random.default_rng(1).random((20, 6, 8), dtype=np.float32)
    orders = bisect_blocks(blocks, 1, effort=EFFORT, generator=np.random.default_rng(0))
    kept = [
        kept_norm_by_level(block[rows][:, columns])[1] * block.sum()
        for block, rows, columns in zip(blocks, orders.rows, orders.columns, strict=True)
    ]
    np.testing.assert_allclose(kept, [best_balanced_split(block) for block in blocks], rtol=1e-5)


def test_blocks_without_structure_get_a_valid_order() -> None:
    blocks = np.stack([np.zeros((4, 4)), np.ones((4, 4)), np.eye(4)]).astype(np.float32)
    orders = bisect_blocks(blocks, 2, effort=EFFORT, generator=np.random.default_rng(0))
    assert_array_equal(np.sort(orders.rows, axis=1), np.tile(np.arange(4), (3, 1)))
    np.testing.assert_array_equal(kept_norm_by_level(blocks[2][orders.rows[2]][:, orders.columns[2]]), [1, 1, 1])


def test_no_halving_leaves_everything_in_place() -> None:
    orders = bisect_blocks(np.ones((2, 3, 5), dtype=np.float32), 0, effort=EFFORT, generator=np.random.default_rng(0))
    assert_array_equal(orders.rows, np.tile(np.arange(3), (2, 1)))
    assert_array_equal(orders.columns, np.tile(np.arange(5), (2, 1)))


def test_a_settled_order_stays_without_random_starts() -> None:
    block_of = np.arange(16) // 4
    blocks = np.equal.outer(block_of, block_of).astype(np.float32)[None]
    orders = bisect_blocks(blocks, 2, effort=PRESENT_ORDER, generator=None)
    assert_array_equal(orders.rows[0] // 4, block_of)
    assert_array_equal(orders.columns[0] // 4, block_of)
