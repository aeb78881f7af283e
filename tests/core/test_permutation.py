import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from strucspars.core.permutation import checked_permutation, inverse, locked_copy


@given(st.integers(1, 30).flatmap(lambda n: st.permutations(range(n))))
def test_the_inverse_undoes_a_permutation(order: list[int]) -> None:
    perm = checked_permutation(order, len(order), name="perm")
    assert_array_equal(perm[inverse(perm)], np.arange(len(order)))
    assert_array_equal(inverse(perm)[perm], np.arange(len(order)))


def test_a_checked_permutation_is_a_locked_copy() -> None:
    original = np.array([1, 0])
    perm = checked_permutation(original, 2, name="perm")
    original[:] = 0
    assert_array_equal(perm, [1, 0])
    with pytest.raises(ValueError, match="read-only"):
        perm[0] = 0


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ([0, 1], r"out_perm must list 3 channels, got shape \(2,\)"),
        ([[0, 1, 2]], "must list 3 channels"),
        ([0, 1, 1], "not a permutation.* lacks 2"),
        ([0, 1, 3], "every channel from 0 to 2"),
        ([-1, 0, 1], "not a permutation"),
        ([0.0, 1.0, 2.0], "whole numbers, got float64"),
        ([True, False, True], "whole numbers, got bool"),
        ([0, 1, 10**30], "whole numbers, got object"),
    ],
)
def test_what_is_no_permutation_is_refused(values: npt.ArrayLike, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        checked_permutation(values, 3, name="out_perm")


def test_a_permutation_of_small_integers_becomes_one_of_64_bits() -> None:
    # A place times a number of groups would leave the range of the small ones.
    perm = checked_permutation(np.arange(200, dtype=np.uint8), 200, name="perm")
    assert perm.dtype == np.int64
    assert inverse(perm)[-1] * 4 == 796


def test_a_locked_copy_does_not_follow_its_original() -> None:
    original = np.array([1, 0])
    copy = locked_copy(original)
    original[:] = 0
    assert_array_equal(copy, [1, 0])
    assert original.flags.writeable
