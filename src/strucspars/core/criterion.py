"""How many groups a layer can bear: the norm kept by every level, and the largest that keeps enough (Sec. 3.4)."""

import numpy as np
import numpy.typing as npt

from strucspars.core.checks import FloatArray, checked_fraction
from strucspars.core.hierarchy import block_sums, max_group_level, num_groups
from strucspars.core.importance import checked_importance


def kept_norm_by_level(permuted_importance: npt.ArrayLike) -> FloatArray:
    """Fraction of the norm that U_g keeps, `sum(S' * U_g) / sum(S)`, for the levels 1, 2, ... in one pass (Sec. 3.4).

    Never rising, 1.0 at level 1, and exactly 1.0 wherever everything outside the groups is zero; so also for a layer
    that is all zero.

    Args:
        permuted_importance: S' = `S[out_perm][:, in_perm]`, `(C_out, C_in)`.

    Returns: `(max_group_level,)`; entry `g - 1` belongs to level `g`.

    >>> kept_norm_by_level([[3.0, 1.0], [0.0, 4.0]])
    array([1.   , 0.875])
    """
    matrix = checked_importance(permuted_importance, name="permuted_importance")
    levels = max_group_level(*matrix.shape)
    total = float(matrix.sum())
    kept = np.ones(levels)
    # From fine to coarse: summing 2 x 2 blocks of groups halves the number of groups.
    sums = block_sums(matrix, num_groups(levels))
    for level in range(levels, 1, -1):
        # Where nothing lies outside the groups all is kept, whatever rounding makes of the sums.
        if np.count_nonzero(sums) > np.count_nonzero(sums.diagonal()):
            kept[level - 1] = sums.trace() / total
        sums = block_sums(sums, num_groups(level - 1))
    return np.minimum.accumulate(kept)


def largest_group_level(
    permuted_importance: npt.ArrayLike, min_kept_norm: float = 0.9, *, min_channels_per_group: int = 1
) -> int:
    """Largest level that keeps at least the fraction `min_kept_norm` of the norm: `max {g : S' (x) U_g >= p sum(S)}`.

    The threshold p of Sec. 3.4, as a kept fraction. Level 1 keeps everything, so there is always an answer; the top
    level can be reached, unless its groups would be narrower than `min_channels_per_group` on either side.

    >>> largest_group_level([[3.0, 1.0], [0.0, 4.0]]), largest_group_level([[3.0, 1.0], [0.0, 4.0]], min_kept_norm=0.8)
    (1, 2)
    >>> largest_group_level(np.eye(64)), largest_group_level(np.eye(64), min_channels_per_group=16)
    (7, 3)
    """
    matrix = checked_importance(permuted_importance, name="permuted_importance")
    limit = max_group_level(*matrix.shape, min_channels_per_group=min_channels_per_group)
    return min(level_keeping(kept_norm_by_level(matrix), min_kept_norm), limit)


def level_keeping(kept_norm: npt.ArrayLike, min_kept_norm: float) -> int:
    """The same, from the kept norms of the levels 1, 2, ...

    >>> level_keeping([1.0, 0.95, 0.8], min_kept_norm=0.9)
    2
    """
    return int(np.count_nonzero(np.asarray(kept_norm) >= checked_fraction("min_kept_norm", min_kept_norm)))
