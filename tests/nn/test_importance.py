import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal

import strucspars as ss
from strucspars.core.importance import Norm
from strucspars.core.importance import importance_matrix as importance_of_array
from strucspars.nn.importance import importance_matrix


@pytest.mark.parametrize("norm", ["l1", "l2"])
@pytest.mark.parametrize(
    "layer", [torch.nn.Linear(6, 4), torch.nn.Conv1d(6, 4, 3), torch.nn.Conv2d(6, 4, 3), torch.nn.Conv3d(6, 4, 3)]
)
def test_a_parameter_gives_the_importance_of_its_values(layer: torch.nn.Module, norm: Norm) -> None:
    weight = layer.weight
    assert isinstance(weight, torch.nn.Parameter)
    expected = importance_of_array(weight.detach().double().numpy(), norm)
    np.testing.assert_allclose(importance_matrix(weight, norm), expected, rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_every_precision_is_taken(dtype: torch.dtype) -> None:
    weight = torch.ones(4, 2, 3, 3, dtype=dtype)
    assert_array_equal(importance_matrix(weight), np.full((4, 2), 9.0))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
def test_a_weight_on_the_gpu_is_taken() -> None:
    weight = torch.randn(8, 4, 3, 3, device="cuda")
    assert_array_equal(importance_matrix(weight), importance_matrix(weight.cpu()))


@pytest.mark.parametrize(
    "weight",
    [
        torch.empty(2, 2, device="meta"),
        torch.eye(2).to_sparse(),
        torch.ones(2, 2, dtype=torch.complex64),
    ],
)
def test_a_tensor_without_dense_real_values_is_refused(weight: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="weight must hold real, dense values"):
        importance_matrix(weight)


@pytest.mark.parametrize("shape", [(0, 4, 3, 3), (4, 0, 3, 3), (4, 4, 0, 3)])
def test_an_empty_weight_is_refused_with_its_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"weight must be non-empty, .* got shape \(\d, \d, \d, 3\)"):
        importance_matrix(torch.empty(shape))


def test_orders_may_be_tensors_and_weights_must_be_made_importance_first() -> None:
    weight = torch.nn.Parameter(torch.rand(4, 4))
    learned = ss.core.learn_permutations(importance_matrix(weight), start=(torch.arange(4), torch.arange(4)))
    assert sorted(learned.out_perm) == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="importance must be an array of real numbers, got Parameter"):
        ss.core.learn_permutations(weight)


@pytest.mark.parametrize("norm", ["linf", "l3", "nuc"])
def test_an_unknown_norm_is_named(norm: Norm) -> None:
    with pytest.raises(ValueError, match=f"norm must be 'l1' or 'l2', got '{norm}'"):
        importance_matrix(torch.ones(4, 2, 3, 3), norm)


def test_a_nan_weight_is_refused() -> None:
    with pytest.raises(ValueError, match="NaN"):
        importance_matrix(torch.full((2, 2, 1, 1), float("nan")))
