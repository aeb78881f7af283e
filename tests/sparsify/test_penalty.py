import copy
import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn
from torch_warnings import COMPILER_WARNS

from strucspars.core.importance import Norm
from strucspars.sparsify.penalty import StructuredPenalty

SHAPES = ((4, 6, 3, 3), (8, 4, 1, 1), (6, 2), (2, 4, 3))


def weights_and_penalty(
    *dtypes: torch.dtype, memory_format: torch.memory_format = torch.contiguous_format
) -> tuple[list[nn.Parameter], StructuredPenalty, list[torch.Tensor]]:
    """Random weights of several shapes, with some zeros, their penalty, and its strengths in full shape."""
    generator = torch.Generator().manual_seed(0)
    weights, strengths = [], []
    for index, shape in enumerate(SHAPES):
        values = torch.randn(shape, generator=generator).to(dtypes[index % len(dtypes)] if dtypes else torch.float32)
        values[0] = 0
        weights.append(nn.Parameter(values.to(memory_format=memory_format) if values.dim() == 4 else values))
        strengths.append(torch.rand(shape[:2], generator=generator))
    penalty = StructuredPenalty(weights, "l1")
    for index, strength in enumerate(strengths):
        penalty.set_strength_(index, strength.numpy().astype(np.float64))
    full = [
        strength.view(*strength.shape, *[1] * (weight.dim() - 2)).expand_as(weight).to(weight)
        for weight, strength in zip(weights, strengths, strict=True)
    ]
    return weights, penalty, full


def expected_value(weights: list[nn.Parameter], strengths: list[torch.Tensor]) -> float:
    return sum(
        (weight.detach().double().abs() * strength.double()).sum().item()
        for weight, strength in zip(weights, strengths, strict=True)
    )


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_value_and_gradient_are_those_of_the_weighted_norm(memory_format: torch.memory_format) -> None:
    weights, penalty, strengths = weights_and_penalty(memory_format=memory_format)
    value = penalty.value(weights)
    assert value.item() == pytest.approx(expected_value(weights, strengths), rel=1e-6)
    gradients = torch.autograd.grad(3 * value, weights)
    for gradient, weight, strength in zip(gradients, weights, strengths, strict=True):
        torch.testing.assert_close(gradient, 3 * weight.detach().sign() * strength)
        assert gradient.dim() != 4 or gradient.is_contiguous(memory_format=memory_format)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_strengths_lie_in_memory_as_the_weights_do(memory_format: torch.memory_format) -> None:
    # The fused kernels fall back to one by one where they do not.
    weights, penalty, _ = weights_and_penalty(memory_format=memory_format)
    assert [strength.stride() for strength in penalty._strengths] == [weight.stride() for weight in weights]


@pytest.mark.parametrize("duplicated", [copy.deepcopy, lambda penalty: pickle.loads(pickle.dumps(penalty))])
def test_a_copy_follows_its_own_strengths(duplicated: Callable[[StructuredPenalty], StructuredPenalty]) -> None:
    weights, original, strengths = weights_and_penalty(torch.float32, torch.float64, memory_format=torch.channels_last)
    penalty = duplicated(original)
    assert penalty.value(weights).item() == pytest.approx(expected_value(weights, strengths), rel=1e-6)
    strengths[1] = torch.full_like(strengths[1], 2.0)
    penalty.set_strength_(1, np.full(SHAPES[1][:2], 2.0))
    value = penalty.value(weights)
    assert value.item() == pytest.approx(expected_value(weights, strengths), rel=1e-6)
    for gradient, weight, strength in zip(torch.autograd.grad(value, weights), weights, strengths, strict=True):
        torch.testing.assert_close(gradient, weight.detach().sign() * strength)
    assert original.value(weights).item() != pytest.approx(value.item())


def test_weights_of_several_precisions_are_added_up() -> None:
    weights, penalty, strengths = weights_and_penalty(torch.float32, torch.float64)
    value = penalty.value(weights)
    assert value.item() == pytest.approx(expected_value(weights, strengths), rel=1e-6)
    for gradient, weight, strength in zip(torch.autograd.grad(value, weights), weights, strengths, strict=True):
        torch.testing.assert_close(gradient, weight.detach().sign() * strength)


def test_a_weight_with_gaps_in_memory_is_penalised_like_any_other() -> None:
    weight = nn.Parameter(torch.randn(4, 8)[:, ::2])
    assert not weight.is_contiguous()
    other = nn.Parameter(torch.randn(2, 2))
    penalty = StructuredPenalty([weight, other], "l1")
    for index, parameter in enumerate((weight, other)):
        penalty.set_strength_(index, np.ones(parameter.shape))
    torch.testing.assert_close(penalty.value([weight, other]), weight.abs().sum() + other.abs().sum())


def test_two_values_of_one_graph_and_a_graph_used_twice_give_twice_the_gradient() -> None:
    weights, penalty, _ = weights_and_penalty()
    once = torch.autograd.grad(penalty.value(weights), weights)
    twice = torch.autograd.grad(penalty.value(weights) + penalty.value(weights), weights)
    torch.testing.assert_close(twice, tuple(2 * gradient for gradient in once))
    value = penalty.value(weights)
    for _ in range(2):
        torch.autograd.backward(value, retain_graph=True)
    torch.testing.assert_close(tuple(weight.grad for weight in weights), twice)


def test_an_earlier_value_keeps_its_number_and_gradient_when_another_is_taken() -> None:
    weights, penalty, strengths = weights_and_penalty()
    first = penalty.value(weights)
    before = first.item()
    torch.autograd.backward(penalty.value(weights))
    assert first.item() == before
    torch.testing.assert_close(torch.autograd.grad(first, weights)[1], weights[1].detach().sign() * strengths[1])


def test_what_changes_between_forward_and_backward_raises() -> None:
    weights, penalty, strengths = weights_and_penalty()
    value = penalty.value(weights)
    with torch.no_grad():
        weights[1].neg_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.backward(value)
    value = penalty.value(weights)
    penalty.set_strength_(1, 2 * strengths[1][..., 0, 0].double().numpy())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.backward(value)


def test_a_frozen_weight_counts_in_the_value_and_gets_no_gradient() -> None:
    weights, penalty, strengths = weights_and_penalty()
    weights[0].requires_grad_(False)
    value = penalty.value(weights)
    assert value.item() == pytest.approx(expected_value(weights, strengths), rel=1e-6)
    torch.autograd.backward(value)
    assert weights[0].grad is None
    for weight, strength in zip(weights[1:], strengths[1:], strict=True):
        torch.testing.assert_close(weight.grad, weight.detach().sign() * strength)
    for weight in weights:
        weight.requires_grad_(False)
    assert not penalty.value(weights).requires_grad


def test_the_gradient_can_be_differentiated_by_its_factor() -> None:
    weights, penalty, strengths = weights_and_penalty()
    factor = torch.tensor(2.0, requires_grad=True)
    gradients = torch.autograd.grad(factor * penalty.value(weights), weights, create_graph=True)
    (by_factor,) = torch.autograd.grad(torch.stack([gradient.sum() for gradient in gradients]).sum(), factor)
    signed = [(weight.detach().sign() * strength).sum() for weight, strength in zip(weights, strengths, strict=True)]
    torch.testing.assert_close(by_factor, torch.stack(signed).sum())


def test_a_scaled_loss_gives_the_unscaled_gradient_after_unscaling() -> None:
    weights, penalty, strengths = weights_and_penalty()
    optimizer = torch.optim.SGD(weights, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    torch.autograd.backward(scaler.scale(penalty.value(weights)))
    scaler.unscale_(optimizer)
    for weight, strength in zip(weights, strengths, strict=True):
        torch.testing.assert_close(weight.grad, weight.detach().sign() * strength)


@COMPILER_WARNS
def test_the_compiled_value_has_the_same_gradient() -> None:
    weights, penalty, _ = weights_and_penalty()
    compiled = torch.compile(penalty.value, backend="aot_eager", fullgraph=True)
    value, plain = compiled(weights), penalty.value(weights)
    torch.testing.assert_close(value, plain)
    torch.testing.assert_close(torch.autograd.grad(value, weights), torch.autograd.grad(plain, weights))


def test_every_weight_is_penalised_in_its_own_precision() -> None:
    weights, penalty, strengths = weights_and_penalty(torch.bfloat16, torch.float32)
    value = penalty.value(weights)
    assert value.dtype == weights[0].dtype
    gradients = torch.autograd.grad(value, weights)
    penalty.add_gradient_(weights)
    for gradient, weight, strength in zip(gradients, weights, strengths, strict=True):
        # To the last bit: strengths in the first weight's precision would be off by one in 500.
        assert torch.equal(gradient, weight.detach().sign() * strength)
        assert weight.grad is not None
        assert torch.equal(weight.grad, gradient)


@pytest.mark.parametrize("norm", ["l1", "l2"])
def test_gradients_that_are_added_remember_no_graph(norm: Norm) -> None:
    weight = nn.Parameter(torch.randn(4, 4, 3, 3))
    penalty = StructuredPenalty([weight], norm)
    penalty.set_strength_(0, np.ones((4, 4)))
    penalty.add_gradient_([weight])
    assert weight.grad is not None
    assert weight.grad.any()
    assert not weight.grad.requires_grad


def test_a_value_that_gets_no_gradient_gives_none() -> None:
    class Ignored(torch.autograd.Function):
        @staticmethod
        def forward(_: object, value: torch.Tensor) -> torch.Tensor:
            return value.clone()

        @staticmethod
        def backward(*_: object) -> None:
            return None

    weights, penalty, _ = weights_and_penalty()
    torch.autograd.backward(Ignored.apply(penalty.value(weights)))
    assert all(weight.grad is None for weight in weights)


def test_weights_on_another_device_are_refused_with_both_named() -> None:
    weights, penalty, _ = weights_and_penalty()
    elsewhere = [nn.Parameter(weight.detach().to("meta")) for weight in weights]
    for use in (penalty.value, penalty.add_gradient_):
        with pytest.raises(ValueError, match="the model moved from cpu to meta after its Sparsifier was made"):
            use(elsewhere)


@pytest.mark.parametrize("norm", ["l1", "l2"])
def test_the_shrinkage_minimises_distance_and_penalty(norm: Norm) -> None:
    weights, _, strengths = weights_and_penalty()
    penalty = StructuredPenalty(weights, norm)
    for index, strength in enumerate(strengths):
        penalty.set_strength_(index, strength.reshape(*strength.shape[:2], -1)[..., 0].double().numpy())
    before = [weight.detach().clone() for weight in weights]
    rate = 0.7
    penalty.shrink_(weights, range(len(weights)), rate)

    def objective(candidates: list[torch.Tensor]) -> float:
        distance = sum((new - old).square().sum().item() for new, old in zip(candidates, before, strict=True)) / 2
        return distance + rate * penalty.value(candidates).item()

    shrunk = [weight.detach() for weight in weights]
    generator = torch.Generator().manual_seed(1)
    least = objective(shrunk)
    for size in (1e-3, 1e-1):
        for _ in range(20):
            nearby = [value + size * torch.randn(value.shape, generator=generator) for value in shrunk]
            assert objective(nearby) > least
    assert sum(int((value == 0).sum()) for value in shrunk) > sum(int((value == 0).sum()) for value in before)
    assert all((value.abs() <= old.abs()).all() for value, old in zip(shrunk, before, strict=True))
