"""Good orders by recursive bisection: split both sides in two, then each half again, all blocks at once.

The alternation of Sec. 3.2 stops at the first partial optimum it meets, so its start decides what it finds. With
`decay = 0.5` the cost is `m_1 - m_2 / 2 - m_3 / 4 - ...` where `m_g` is the norm kept at level `g`: the first split
counts most. So we maximise the kept norm level by level, from the top.

One split of a block A asks for balanced signs x, y in {-1, +1} with the largest `x' A y`. Given y, the best x is the
top half of the row scores `A y`: a matrix product. Annealed mean-field iterations, `x = tanh(beta * A y)` with rising
`beta`, lead random starts past poor optima before they are rounded to signs.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from strucspars.core.arrays import IntArray

# Ranking sums of thousands of norms needs no more, and it halves the memory traffic that bounds the speed.
Float32Array = npt.NDArray[np.float32]

# Inverse temperature in units of the noise's spectral norm: near 1 the symmetry breaks, by 3 most signs have settled.
FIRST_BETA, LAST_BETA = 1.0, 3.0
# Every fourth start is this much colder: its tanh is a sign from the first step on.
FROZEN = np.float32(20)


@dataclass(frozen=True)
class BisectionEffort:
    """How long to search.

    Attributes:
        starts: random starts per block.
        annealing_steps: steps with tanh at the first, second, ... halving.
        rounded_steps: steps with signs after that, at least one.
    """

    starts: int
    annealing_steps: tuple[int, ...]
    rounded_steps: int

    def steps_at(self, halving: int) -> int:
        """Annealing steps of a halving; the last entry holds for all deeper ones."""
        return self.annealing_steps[min(halving, len(self.annealing_steps) - 1)]


# One step of signs from where the channels are.
PRESENT_ORDER = BisectionEffort(starts=1, annealing_steps=(0,), rounded_steps=1)


@dataclass(frozen=True)
class BlockOrders:
    """Orders inside each block, `order[block, new] = old`: rows `(B, n)` and columns `(B, m)`."""

    rows: IntArray
    columns: IntArray


def bisect_blocks(
    blocks: Float32Array, halvings: int, *, effort: BisectionEffort, generator: np.random.Generator | None
) -> BlockOrders:
    """Order rows and columns of every block so that `halvings` nested halvings keep much of its norm.

    Args:
        blocks: `(B, n, m)`; `2**halvings` divides n and m. All blocks are worked on at once.
        halvings: how often to split.
        effort: how long to search.
        generator: the source of the random starts; None starts from the present order, with `PRESENT_ORDER`.
    """
    count, num_rows, num_columns = blocks.shape
    rows = np.tile(np.arange(num_rows), (count, 1))
    columns = np.tile(np.arange(num_columns), (count, 1))
    for halving in range(halvings):
        row_signs, column_signs = _split(blocks, effort, halving, generator)
        row_order = np.argsort(-row_signs, axis=1, kind="stable")
        column_order = np.argsort(-column_signs, axis=1, kind="stable")
        rows = np.take_along_axis(rows, row_order, axis=1).reshape(2 * len(rows), -1)
        columns = np.take_along_axis(columns, column_order, axis=1).reshape(2 * len(columns), -1)
        blocks = _halves(blocks, row_order, column_order)
    return BlockOrders(rows.reshape(count, -1), columns.reshape(count, -1))


def _halves(blocks: Float32Array, row_order: IntArray, column_order: IntArray) -> Float32Array:
    """The two diagonal halves of every reordered block: `(B, n, m)` to `(2 B, n / 2, m / 2)`."""
    count = len(blocks)
    block = np.arange(count)[:, None, None, None]
    half_rows = row_order.reshape(count, 2, -1, 1)
    half_columns = column_order.reshape(count, 2, 1, -1)
    halves: Float32Array = blocks[block, half_rows, half_columns]
    return halves.reshape(2 * count, *halves.shape[2:])


def _split(
    blocks: Float32Array, effort: BisectionEffort, halving: int, generator: np.random.Generator | None
) -> tuple[Float32Array, Float32Array]:
    """Balanced signs of rows `(B, n)` and columns `(B, m)` with a large `x' A y` for each block A."""
    # Balanced signs do not see row and column means; the annealing would chase them.
    centred = blocks - blocks.mean(axis=2, keepdims=True)
    centred -= centred.mean(axis=1, keepdims=True)
    transposed = centred.swapaxes(1, 2)
    columns = _first_columns(blocks, effort.starts, generator)
    row_gain, column_gain = _mean_field_gains(centred, effort.starts)
    for beta in np.linspace(FIRST_BETA, LAST_BETA, effort.steps_at(halving), dtype=np.float32):
        rows = np.tanh((beta * row_gain) * (columns @ transposed))
        columns = np.tanh((beta * column_gain) * (rows @ centred))
    columns = _balanced_signs(columns)
    for _ in range(effort.rounded_steps):
        rows = _balanced_signs(columns @ transposed)
        column_scores = rows @ centred
        columns = _balanced_signs(column_scores)
    best_start = (column_scores * columns).sum(axis=2).argmax(axis=1)
    block = np.arange(len(blocks))
    return rows[block, best_start], columns[block, best_start]


def _first_columns(blocks: Float32Array, starts: int, generator: np.random.Generator | None) -> Float32Array:
    """Where the columns start, `(B, starts, m)`: anywhere, or in their present halves."""
    count, _, num_columns = blocks.shape
    if generator is not None:
        return np.tanh(generator.standard_normal((count, starts, num_columns), dtype=np.float32))
    present = np.where(np.arange(num_columns) < num_columns // 2, np.float32(1), np.float32(-1))
    return np.tile(present, (count, starts, 1))


def _mean_field_gains(centred: Float32Array, starts: int) -> tuple[Float32Array, Float32Array]:
    """Factors `(B, starts, 1)` that bring the row and column scores to order one.

    The scale is the spectral norm that noise of the block's deviation would have. Every fourth start is frozen: on
    small blocks the annealed starts all end in one place, and only the frozen ones see others.
    """
    _, num_rows, num_columns = centred.shape
    deviation = np.sqrt(np.square(centred).mean(axis=(1, 2), keepdims=True))
    noise_norm = deviation * np.float32(np.sqrt(num_rows) + np.sqrt(num_columns))
    # Constant blocks have no deviation; any positive scale leaves their zeros zero.
    coldness = (1 / np.maximum(noise_norm, np.float32(1e-20))).repeat(starts, axis=1)
    coldness[:, 3::4] *= FROZEN
    aspect = np.float32(np.sqrt(num_rows / num_columns))
    return aspect * coldness, coldness / aspect


def _balanced_signs(scores: Float32Array) -> Float32Array:
    """+1 for the upper half of the scores along the last axis, -1 for the lower; ties are broken somehow."""
    half = scores.shape[-1] // 2
    upper = np.argpartition(scores, half, axis=-1)[..., half:]
    signs = np.full_like(scores, -1)
    np.put_along_axis(signs, upper, np.float32(1), axis=-1)
    return signs
