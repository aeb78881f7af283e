"""The searches for channel orders: the paper's alternation, and recursive bisection that gives it a good start.

The alternation of Sec. 3.2 stops at the first partial optimum, so its start decides the result. The bisection splits
both sides in two, then each half again, all blocks at once; the first split counts most in the cost.

A split of a block A needs balanced signs x, y in {-1, +1} with the largest `x' A y`. Given y, the best x is the top
half of the row scores `A y`. Annealed mean-field iterations, `x = tanh(beta * A y)` with rising `beta`, keep random
starts out of poor optima before they are rounded to signs. See `docs/decisions/0006-solver.md`.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from strucspars.core.checks import FloatArray, IntArray
from strucspars.core.hierarchy import block_sums
from strucspars.core.permutation import Connectivity, cheaper, measured_connectivity
from strucspars.core.transport import AssignToGroups, assign_by_group_cycles, saves


def alternate(
    importance: FloatArray,
    penalty: FloatArray,
    *,
    out_perm: IntArray,
    in_perm: IntArray,
    assign: AssignToGroups,
    max_sweeps: int = 100,
) -> Connectivity:
    """Lower `sum(S[P][:, Q] * R)` by exact steps over P and Q in turn until neither can gain (Sec. 3.2).

    The cost never rises. The end is a partial optimum, not always the global one. S is `(C_out, C_in)`, R between
    groups symmetric `(G, G)`; `G` divides both widths.
    """
    rows_first = (importance, importance.T)
    perms = [out_perm, in_perm]
    converged = False
    for half_step in range(2 * max_sweeps):
        side = half_step % 2
        better = _better_order(rows_first[side], penalty, perm=perms[side], other_perm=perms[1 - side], assign=assign)
        # The other side was just solved for this very order; if it stays, both are optimal.
        converged = half_step > 0 and better is None
        if converged:
            break
        if better is not None:
            perms[side] = better
    sweeps = half_step // 2 + 1
    return measured_connectivity(
        importance, penalty, out_perm=perms[0], in_perm=perms[1], sweeps=sweeps, converged=converged
    )


def _better_order(
    importance: FloatArray, penalty: FloatArray, *, perm: IntArray, other_perm: IntArray, assign: AssignToGroups
) -> IntArray | None:
    """Best order of the rows of `importance` for a fixed order of its columns; None if the present one is as good."""
    channels, other_channels = importance.shape
    groups = len(penalty)
    penalty_of_other = np.empty((other_channels, groups))
    penalty_of_other[other_perm] = penalty.repeat(other_channels // groups, axis=0)
    cost = (importance @ penalty_of_other)[perm]
    order = assign(cost)
    return perm[order] if saves(cost, order, np.arange(groups).repeat(channels // groups)) else None


# Ranking sums of thousands of norms needs no more, and it halves the memory traffic that bounds the speed.
Float32Array = npt.NDArray[np.float32]

# Inverse temperature in units of the noise's spectral norm: near 1 the symmetry breaks, by 3 most signs have settled.
FIRST_BETA, LAST_BETA = 1.0, 3.0
# Every fourth start is this much colder: its tanh is a sign from the first step on.
FROZEN = np.float32(20)


@dataclass(frozen=True)
class BisectionEffort:
    """How long to search: random starts, annealing steps at the first, second, ... halving, then steps with signs."""

    starts: int
    annealing_steps: tuple[int, ...]
    rounded_steps: int

    def steps_at(self, halving: int) -> int:
        """Annealing steps of a halving; the last entry holds for all deeper ones."""
        return self.annealing_steps[min(halving, len(self.annealing_steps) - 1)]


# One step of signs from where the channels are.
PRESENT_ORDER = BisectionEffort(starts=1, annealing_steps=(0,), rounded_steps=1)


def bisect_blocks(
    blocks: Float32Array, halvings: int, *, effort: BisectionEffort, generator: np.random.Generator | None
) -> tuple[IntArray, IntArray]:
    """Order rows and columns of every block so that `halvings` nested halvings keep much of its norm.

    Args:
        blocks: `(B, n, m)`; `2**halvings` divides n and m. All blocks are worked on at once.
        generator: the source of the random starts; None starts from the present order, with `PRESENT_ORDER`.

    Returns: `order[block, new] = old` of the rows, `(B, n)`, and of the columns, `(B, m)`.
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
    return rows.reshape(count, -1), columns.reshape(count, -1)


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

    The scale is the spectral norm of noise with the block's standard deviation. Every fourth start is frozen: on small
    blocks all annealed starts end in the same optimum, and only the frozen ones find others.
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
    """+1 for the upper half of the scores along the last axis, -1 for the lower; ties are broken arbitrarily."""
    half = scores.shape[-1] // 2
    upper = np.argpartition(scores, half, axis=-1)[..., half:]
    signs = np.full_like(scores, -1)
    np.put_along_axis(signs, upper, np.float32(1), axis=-1)
    return signs


LEAF_PENALTY = 1 / 32
TRUNK_EFFORT = BisectionEffort(starts=12, annealing_steps=(20, 12, 8), rounded_steps=2)
# Up to 64 x 64 channels, more starts cost next to nothing, and there are few enough optima to find them all.
SMALL_LAYER = 64 * 64
SMALL_LAYER_EFFORT = BisectionEffort(starts=64, annealing_steps=(20, 12, 8), rounded_steps=3)


def search_from_scratch(importance: FloatArray, penalty: FloatArray, *, generator: np.random.Generator) -> Connectivity:
    """Cold search for the orders that minimise `sum(S[P][:, Q] * R)`. Never worse than the identity order."""
    trunk_halvings = _halvings(len(penalty) // _leaf_groups(penalty))
    effort = SMALL_LAYER_EFFORT if importance.size <= SMALL_LAYER else TRUNK_EFFORT
    rows, columns = bisect_blocks(_scaled(importance)[None], trunk_halvings, effort=effort, generator=generator)
    found = _polish(importance, penalty, rows[0], columns[0])
    out_channels, in_channels = importance.shape
    return cheaper(found, importance, penalty, out_perm=np.arange(out_channels), in_perm=np.arange(in_channels))


def refresh(importance: FloatArray, penalty: FloatArray, *, out_perm: IntArray, in_perm: IntArray) -> Connectivity:
    """Warm search from given orders, without random starts. Never worse than its start."""
    found = _polish(importance, penalty, out_perm, in_perm)
    return cheaper(found, importance, penalty, out_perm=out_perm, in_perm=in_perm)


def _polish(importance: FloatArray, penalty: FloatArray, out_perm: IntArray, in_perm: IntArray) -> Connectivity:
    """Exact alternation over the trunk's groups, then bisection inside each of them."""
    leaf_groups = _leaf_groups(penalty)
    trunk = penalty[::leaf_groups, ::leaf_groups]
    end = alternate(importance, trunk, out_perm=out_perm, in_perm=in_perm, assign=assign_by_group_cycles)
    if leaf_groups == 1:
        return end
    rows, columns = end.out_perm.reshape(len(trunk), -1), end.in_perm.reshape(len(trunk), -1)
    rows, columns = _order_leaves(importance, penalty[:leaf_groups, :leaf_groups], rows, columns)
    return measured_connectivity(
        importance, penalty, out_perm=rows.ravel(), in_perm=columns.ravel(), sweeps=end.sweeps, converged=end.converged
    )


def _order_leaves(
    importance: FloatArray, penalty: FloatArray, rows: IntArray, columns: IntArray
) -> tuple[IntArray, IntArray]:
    """Bisect inside the trunk's groups, `(B, n)` and `(B, m)`, from the present order; keep what lowers the cost."""
    blocks = importance[rows[:, :, None], columns[:, None, :]]
    row_orders, column_orders = bisect_blocks(
        _scaled(blocks), _halvings(len(penalty)), effort=PRESENT_ORDER, generator=None
    )
    reordered = np.take_along_axis(blocks, row_orders[:, :, None], axis=1)
    reordered = np.take_along_axis(reordered, column_orders[:, None, :], axis=2)
    old_cost = (block_sums(blocks, len(penalty)) * penalty).sum(axis=(1, 2))
    new_cost = (block_sums(reordered, len(penalty)) * penalty).sum(axis=(1, 2))
    better = (new_cost < old_cost)[:, None]
    rows = np.where(better, np.take_along_axis(rows, row_orders, axis=1), rows)
    columns = np.where(better, np.take_along_axis(columns, column_orders, axis=1), columns)
    return rows, columns


def _leaf_groups(penalty: FloatArray) -> int:
    """How many of the finest groups, cheap to separate, one trunk group holds."""
    return int(np.count_nonzero(penalty[0] <= LEAF_PENALTY))


def _halvings(groups: int) -> int:
    return groups.bit_length() - 1


def _scaled(importance: FloatArray) -> Float32Array:
    """Single precision with the largest entry 1: tiny or huge weights neither underflow nor overflow."""
    largest = importance.max()
    return (importance / largest if largest > 0 else importance).astype(np.float32)
