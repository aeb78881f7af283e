"""What becomes of optimizers, their memory and training when layers are grouped or masked."""

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from planned_networks import IMAGES, random_network, random_plan
from torch import nn

import strucspars as ss
from strucspars.convert.conversion import convert_, mask_

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-4, momentum=0.9, weight_decay=1e-2, nesterov=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1, amsgrad=True),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3, momentum=0.5),
    "rprop": lambda parameters: torch.optim.Rprop(parameters, lr=1e-4),
}


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(IMAGES.to(next(model.parameters()).dtype)).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_pruned_weights_stay_at_zero_through_training(kind: str) -> None:
    model = random_network()
    optimizer = OPTIMIZERS[kind](model.parameters())
    train_step(model, optimizer)
    plan = random_plan(model)
    mask_(model, plan, optimizer)
    for _ in range(3):
        train_step(model, optimizer)
    for name in plan.layers:
        weight, mask = model.get_parameter(f"{name}.weight"), model.get_buffer(f"{name}.mask")
        assert not weight[(mask == 0).expand_as(weight)].any()
        assert weight[(mask == 1).expand_as(weight)].all()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_goes_on_the_same_whether_masked_or_converted_with_the_optimizers_memory(kind: str) -> None:
    masked = random_network().double().eval()
    masked_optimizer = OPTIMIZERS[kind](masked.parameters())
    train_step(masked, masked_optimizer)
    converted = copy.deepcopy(masked)
    converted_optimizer = OPTIMIZERS[kind](converted.parameters())
    converted_optimizer.load_state_dict(copy.deepcopy(masked_optimizer.state_dict()))
    plan = random_plan(masked)
    mask_(masked, plan, masked_optimizer)
    convert_(converted, plan, converted_optimizer)
    for _ in range(3):
        train_step(masked, masked_optimizer)
        train_step(converted, converted_optimizer)
    images = IMAGES.double()
    torch.testing.assert_close(converted(images), masked(images), rtol=1e-8, atol=1e-8)


def test_memory_that_cannot_follow_is_cleared_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    model = random_network()
    optimizer: torch.optim.Optimizer = torch.optim.Adafactor(model.parameters())
    train_step(model, optimizer)
    with caplog.at_level(logging.WARNING):
        convert_(model, random_plan(model), optimizer)
    assert "Adafactor cannot carry 'row_var'" in caplog.text
    train_step(model, optimizer)


@pytest.mark.parametrize("memory", [[torch.eye(8)], (torch.eye(8),), {"rows": torch.eye(8)}])
def test_memory_in_containers_is_cleared_with_a_warning(memory: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    # As optimizers keep it that precondition every axis.
    weight = model.get_parameter("0.weight")
    optimizer.state[weight] = {"preconditioners": memory, "momentum": torch.zeros(8, 4, 1, 1)}
    with caplog.at_level(logging.WARNING):
        convert_(model, random_plan(model), optimizer)
    assert "SGD cannot carry 'preconditioners' over" in caplog.text
    assert weight not in optimizer.state


def test_training_goes_on_while_an_older_loss_is_still_alive() -> None:
    model = random_network()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    loss = model(IMAGES).square().mean()
    torch.autograd.backward(loss, retain_graph=True)
    convert_(model, random_plan(model), optimizer)
    train_step(model, optimizer)
    assert loss.requires_grad


@pytest.mark.parametrize("fused", [True, False])
def test_momenta_follow_the_layout_of_their_weights(fused: bool) -> None:
    model = random_network().to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=fused)
    train_step(model, optimizer)
    convert_(model, random_plan(model), optimizer)
    weight = model.project.weight
    assert optimizer.state[weight]["exp_avg"].stride() == weight.stride()
    reference = copy.deepcopy(model)
    plain = torch.optim.Adam(reference.parameters(), lr=1e-3, fused=False, foreach=False)
    plain.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    plain.param_groups[0] |= {"fused": False, "foreach": False}
    train_step(model, optimizer)
    train_step(reference, plain)
    torch.testing.assert_close(model.project.weight, reference.project.weight, rtol=1e-4, atol=1e-6)


def test_a_pending_gradient_does_not_move_pruned_weights() -> None:
    model = random_network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.autograd.backward(model(IMAGES).square().mean())
    mask_(model, random_plan(model), optimizer)
    optimizer.step()
    mask = model.get_buffer("expand.mask")
    assert not model.expand.weight[(mask == 0).expand_as(model.expand.weight)].any()


@pytest.mark.parametrize("change_", [convert_, mask_])
def test_the_optimizer_of_a_copy_is_refused_before_anything_changes(change_: Callable[..., nn.Module]) -> None:
    convolution = nn.Conv2d(4, 8, 3)
    model = nn.Sequential(convolution)
    optimizer = torch.optim.SGD(copy.deepcopy(model).parameters(), lr=0.1)
    with pytest.raises(ValueError, match="the optimizer holds no parameter of this model"):
        change_(model, random_plan(model), optimizer)
    assert convolution.weight.shape == (8, 4, 3, 3)
    assert convolution.weight.count_nonzero() == 288


def test_an_optimizer_of_some_of_the_parameters_is_enough() -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Conv2d(8, 8, 3))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    convert_(model, random_plan(model), optimizer)
    assert optimizer.param_groups[0]["params"][0] is model[1].weight


def test_an_optimizer_of_several_models_is_enough() -> None:
    model, other = nn.Sequential(nn.Conv2d(4, 8, 3)), nn.Conv2d(4, 8, 3)
    optimizer = torch.optim.SGD([{"params": other.parameters()}, {"params": model.parameters()}], lr=0.1)
    convert_(model, random_plan(model), optimizer)
    assert type(model[0]) is ss.ShuffledGroupConv2d


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("change_", [convert_, mask_])
def test_an_optimizer_that_comes_after_the_layers_were_grouped_is_refused(
    change_: Callable[..., nn.Module], kind: str
) -> None:
    model = random_network()
    optimizer = OPTIMIZERS[kind](model.parameters())
    train_step(model, optimizer)
    plan = random_plan(model)
    convert_(model, plan)
    complaint = (
        r"layer 'expand' is grouped already, .* dense shape \(48, 16, 1, 1\), .* with the first call, or make a new"
    )
    with pytest.raises(ValueError, match=complaint):
        change_(model, plan, optimizer)


def test_the_second_of_two_optimizers_is_refused_and_a_new_one_trains_on() -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 1), nn.Conv2d(8, 8, 1))
    first, second = (torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9) for layer in model)
    model(torch.randn(1, 4, 3, 3)).sum().backward()
    first.step()
    second.step()
    plan = random_plan(model)
    convert_(model, plan, first)
    with pytest.raises(ValueError, match="layer '1' is grouped already, but the optimizer remembers"):
        convert_(model, plan, second)
    second = torch.optim.SGD(model[1].parameters(), lr=0.1, momentum=0.9)
    convert_(model, plan, second)
    for _ in range(2):
        model(torch.randn(1, 4, 3, 3)).sum().backward()
        first.step()
        second.step()
        convert_(model, plan, first)


def test_an_optimizer_with_one_memory_for_all_is_refused() -> None:
    model = random_network()
    with pytest.raises(ValueError, match="LBFGS remembers all parameters as one vector"):
        convert_(model, random_plan(model), torch.optim.LBFGS(model.parameters()))
    assert type(model.expand) is nn.Conv2d
