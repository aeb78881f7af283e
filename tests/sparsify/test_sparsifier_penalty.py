"""The penalty of a sparsifier and its gradient."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from sparse_training import CONFIG, gradients, network, penalty_by_definition, sparsifier_with_penalty
from torch_warnings import COMPILER_WARNS

from strucspars.core.importance import Norm


@pytest.mark.parametrize("norm", ["l1", "l2"])
def test_the_penalty_is_the_papers_sum(norm: Norm) -> None:
    model = network()
    sparsifier = sparsifier_with_penalty(model, replace(CONFIG, importance=norm))
    expected = penalty_by_definition(model, sparsifier, norm)
    assert expected > 0
    assert sparsifier.penalty().item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("norm", ["l1", "l2"])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_the_gradient_added_equals_that_of_the_loss_term(norm: Norm, memory_format: torch.memory_format) -> None:
    model = network().to(memory_format=memory_format)
    with torch.no_grad():
        model.get_parameter("2.weight")[:4].zero_()
    sparsifier = sparsifier_with_penalty(model, replace(CONFIG, importance=norm))
    images = torch.randn(2, 3, 8, 8)
    (model(images).square().mean() + sparsifier.penalty()).backward()
    by_loss = gradients(model)
    model.zero_grad()
    model(images).square().mean().backward()
    without = gradients(model)
    sparsifier.regularize_()
    by_hook = gradients(model)
    torch.testing.assert_close(by_hook, by_loss, rtol=1e-6, atol=1e-7)
    assert not torch.allclose(by_hook["2.weight"], without["2.weight"])
    assert torch.equal(by_hook["7.weight"], without["7.weight"])


@pytest.mark.parametrize("norm", ["l1", "l2"])
def test_the_subgradient_at_zero_is_zero(norm: Norm) -> None:
    model = network()
    sparsifier = sparsifier_with_penalty(model, replace(CONFIG, importance=norm))
    with torch.no_grad():
        model.get_parameter("2.weight").zero_()
    torch.autograd.backward(sparsifier.penalty())
    gradient = model.get_parameter("2.weight").grad
    assert gradient is not None
    assert torch.equal(gradient, torch.zeros_like(gradient))
    sparsifier.regularize_()
    assert torch.equal(gradient, torch.zeros_like(gradient))


def test_accumulated_and_scaled_gradients_get_the_penalty_once_and_unscaled() -> None:
    model = network()
    sparsifier = sparsifier_with_penalty(model)
    batches = torch.randn(2, 2, 3, 8, 8)
    for batch in batches:
        ((model(batch).square().mean() + sparsifier.penalty()) / 2).backward()
    expected = gradients(model)
    model.zero_grad()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for batch in batches:
        scaler.scale(model(batch).square().mean() / 2).backward()
    scaler.unscale_(optimizer)
    sparsifier.regularize_()
    torch.testing.assert_close(gradients(model), expected, rtol=1e-5, atol=1e-7)


def test_a_frozen_weight_is_left_alone() -> None:
    model = network()
    model.get_parameter("2.weight").requires_grad_(False)
    sparsifier = sparsifier_with_penalty(model)
    sparsifier.regularize_()
    assert model.get_parameter("2.weight").grad is None
    assert model.get_parameter("4.weight").grad is not None


@COMPILER_WARNS
def test_the_penalty_compiles_without_a_break() -> None:
    model = network()
    sparsifier = sparsifier_with_penalty(model)

    def loss(images: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = model(images).square().mean() + sparsifier.penalty()
        return value

    images = torch.randn(2, 3, 8, 8)
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(images), loss(images))


def test_half_precision_weights_get_the_same_gradient_both_ways() -> None:
    model = network().bfloat16()
    sparsifier = sparsifier_with_penalty(model)
    torch.autograd.backward(sparsifier.penalty())
    by_loss = gradients(model)
    model.zero_grad()
    sparsifier.regularize_()
    by_hook = gradients(model)
    assert by_hook["2.weight"].dtype == torch.bfloat16
    assert by_hook["2.weight"].any()
    for name in ("2.weight", "4.weight"):
        assert torch.equal(by_hook[name], by_loss[name])


def test_nothing_is_penalised_while_everything_is_frozen() -> None:
    model = network().requires_grad_(False)
    sparsifier_with_penalty(model).regularize_()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_compiled_and_plain_penalties_have_equal_gradients_after_an_epoch() -> None:
    model = network()
    sparsifier = sparsifier_with_penalty(model)
    compiled = torch.compile(sparsifier.regularize_, backend="aot_eager")
    compiled()
    sparsifier.end_epoch()
    model.zero_grad()
    compiled()
    by_compiler = gradients(model)
    model.zero_grad()
    sparsifier.regularize_()
    torch.testing.assert_close(by_compiler, gradients(model))


def test_the_penalty_falls_from_halving_to_halving_by_the_decay_asked_for() -> None:
    model = network()
    with torch.no_grad():
        # Of two groups, so that two halvings are penalised; the other layer lags, so that lambda rises.
        model.get_parameter("4.weight").mul_((torch.arange(16)[:, None] % 2 == torch.arange(32) % 2)[..., None, None])
    sparsifier = sparsifier_with_penalty(model, replace(CONFIG, decay=0.3))
    with torch.no_grad():
        model.get_parameter("4.weight").fill_(1)
    torch.autograd.backward(sparsifier.penalty())
    gradient = model.get_parameter("4.weight").grad
    assert gradient is not None
    strengths = np.unique(gradient.numpy()) / sparsifier.lambda_value
    np.testing.assert_allclose(strengths, [0.0, 0.3, 1.0], rtol=1e-6)
