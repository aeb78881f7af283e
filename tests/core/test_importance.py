import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strucspars.core.importance import Norm, checked_importance, importance_matrix, penalty_scale


@given(st.integers(0, 3), st.sampled_from(["l1", "l2"]))
def test_importance_is_the_norm_of_each_kernel(kernel_axes: int, norm: Norm) -> None:
    weight = np.random.default_rng(kernel_axes).standard_normal((3, 4, *[2] * kernel_axes))
    matrix = importance_matrix(weight, norm)
    assert matrix.shape == (3, 4)
    assert matrix.dtype == np.float64
    for j in range(3):
        for i in range(4):
            expected = np.linalg.norm(np.atleast_1d(weight[j, i]).ravel(), ord=int(norm[1]))
            np.testing.assert_allclose(matrix[j, i], expected)


@pytest.mark.parametrize("shape", [(), (4,), (0, 4), (2, 2, 2, 2, 2, 2), (4, 4, 0, 3)])
def test_a_weight_of_the_wrong_shape_is_named(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="2 to 5 axes, got shape"):
        importance_matrix(np.ones(shape))


def test_an_unknown_norm_is_named() -> None:
    with pytest.raises(ValueError, match="norm must be 'l1' or 'l2', got 'max'"):
        importance_matrix(np.ones((2, 2)), "max")  # type: ignore[arg-type]  # the bad value is the point


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e308])
def test_a_weight_that_is_not_finite_or_overflows_in_a_sum_is_refused(bad: float) -> None:
    weight = np.ones((2, 2, 3, 3))
    weight[1, 0, 2, 2] = bad
    with pytest.raises(ValueError, match="NaN, infinite"):
        importance_matrix(weight)


@pytest.mark.parametrize("norm", ["l1", "l2"])
@pytest.mark.parametrize("scale", [1e-200, 1e-30, 1e30, 1e200])
def test_the_scale_of_the_weights_only_scales_the_importance(scale: float, norm: Norm) -> None:
    weight = np.random.default_rng(0).standard_normal((3, 4, 3, 3))
    scaled = importance_matrix(weight * scale, norm)
    np.testing.assert_allclose(scaled, importance_matrix(weight, norm) * scale)


def test_an_all_zero_weight_has_no_importance() -> None:
    assert not importance_matrix(np.zeros((2, 3, 3, 3)), "l2").any()


@pytest.mark.parametrize("weight", [np.ones((2, 2), dtype=complex), [["a", "b"]], [[1.0], [1.0, 2.0]], None])
def test_what_is_no_array_of_real_numbers_is_named(weight: object) -> None:
    with pytest.raises(ValueError, match="weight must be"):
        importance_matrix(weight)  # type: ignore[arg-type]  # assorted bad input


@pytest.mark.parametrize(
    ("matrix", "complaint"),
    [
        ([1.0, 2.0], "non-empty"),
        (np.ones((0, 4)), "non-empty"),
        ([[1.0, np.nan]], r"must be finite .* got nan at \[0, 1\]"),
        ([[1.0, 1.0], [np.inf, 1.0]], r"must be finite .* got inf at \[1, 0\]"),
        ([[np.inf, -np.inf]], "must be finite"),
        ([[1e308, 1e308]], "small enough to be added up"),
        ([[1j, 2.0]], "real numbers"),
        ("S", "importance must be"),
        ([[1.0, -0.5]], "must not be negative, got -0.5"),
    ],
)
def test_a_bad_importance_is_refused(matrix: object, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        checked_importance(matrix)  # type: ignore[arg-type]  # assorted bad input


def test_what_refuses_to_become_an_array_is_named() -> None:
    class NeedsGradient:
        """As a tensor that requires gradients answers numpy."""

        def __array__(self, *_: object, **__: object) -> None:
            raise RuntimeError("can't call numpy() on a tensor that requires grad")

    with pytest.raises(ValueError, match="weight must be an array of real numbers, got NeedsGradient: can't call"):
        importance_matrix(NeedsGradient())  # type: ignore[arg-type]  # the bad value is the point


@given(st.integers(0, 20), st.sampled_from([1e-30, 1.0, 1e30]))
def test_what_matters_more_is_penalised_less(seed: int, scale: float) -> None:
    importance = np.random.default_rng(seed).exponential(size=(4, 6)) * scale
    factors = penalty_scale(importance)
    assert (factors > 0).all()
    assert (factors <= 2).all()
    np.testing.assert_allclose(factors.mean(), 1)
    np.testing.assert_array_equal(factors.ravel()[np.argsort(importance.ravel())], np.sort(factors.ravel())[::-1])


def test_connections_that_all_matter_alike_are_penalised_alike() -> None:
    for importance in (np.zeros((2, 3)), np.full((2, 3), 5.0)):
        np.testing.assert_allclose(penalty_scale(importance), np.ones((2, 3)))
