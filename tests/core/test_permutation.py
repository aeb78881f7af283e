import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from strucspars.core.permutation import checked_permutation, inverse


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
