"""Permutations of channels. `perm[new] = old`, so `S[out_perm][:, in_perm]` is the permuted matrix."""

import numpy as np
import numpy.typing as npt

from strucspars.core.checks import IntArray


def checked_permutation(perm: npt.ArrayLike, length: int, *, name: str) -> IntArray:
    """A read-only int64 copy, or a `ValueError` unless every channel from 0 to `length - 1` stands in it once.

    >>> checked_permutation([1, 0, 2], 3, name="out_perm")
    array([1, 0, 2])
    """
    values = np.asarray(perm)
    if values.shape != (length,):
        raise ValueError(f"{name} must list {length} channels, got shape {values.shape}")
    if not np.issubdtype(values.dtype, np.integer):
        raise ValueError(f"{name} must hold whole numbers, got {values.dtype}")
    present = np.zeros(length, dtype=np.bool_)
    present[values[(values >= 0) & (values < length)]] = True
    if not present.all():
        raise ValueError(
            f"{name} is not a permutation: it must hold every channel from 0 to {length - 1} exactly once, "
            f"but lacks {present.argmin()}"
        )
    return locked_copy(values.astype(np.int64))


def inverse(perm: IntArray) -> IntArray:
    """The permutation that undoes this one: `inverse(perm)[perm[new]] = new`.

    >>> inverse(np.array([2, 0, 1]))
    array([1, 2, 0])
    """
    undo = np.empty_like(perm)
    undo[perm] = np.arange(len(perm))
    return undo


def locked_copy(perm: IntArray) -> IntArray:
    """A read-only copy: a result that several owners hold must not change under them."""
    copy = perm.copy()
    copy.setflags(write=False)
    return copy
