"""Optimizers that take the penalty along: equal to the calls by hand, whatever the loop around them."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sparse_training import CONFIG, gradients, labelled_images, network, sparsifier_with_penalty
from torch import nn
from torch.nn import functional
from torch.optim import ASGD, LBFGS, SGD, Adagrad, Adam, AdamW, NAdam, Optimizer, RAdam, RMSprop

import strucspars as ss

LAYERS = ("2.weight", "4.weight")
Make = Callable[[Any], Optimizer]
Step = Callable[[nn.Module, Optimizer], None]


def momentum_sgd(parameters: Any) -> Optimizer:
    return SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-4)


class SignDescent(Optimizer):
    """An optimizer that no list knows."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # called without one
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(0.01 * parameter.grad.sign())


def loss_of(model: nn.Module) -> torch.Tensor:
    images, labels = labelled_images()
    return functional.cross_entropy(model(images), labels)


def strengths_of(model: nn.Module, sparsifier: ss.Sparsifier) -> dict[str, torch.Tensor]:
    """lambda * R_g of every weight: the size of the penalty's derivative, while no weight is zero."""
    found = torch.autograd.grad(sparsifier.penalty(), [model.get_parameter(name) for name in LAYERS])
    return {name: gradient.abs() for name, gradient in zip(LAYERS, found, strict=True)}


def plain_step(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.zero_grad()
    torch.autograd.backward(loss_of(model))
    optimizer.step()


def trained(make: Make, step: Step = plain_step, steps: int = 3) -> nn.Module:
    """By a loop that knows nothing of sparsity."""
    model = network()
    optimizer = make(model.parameters())
    sparsifier_with_penalty(model).attach(optimizer)
    for _ in range(steps):
        step(model, optimizer)
    return model


def trained_by_hand(make: Make, steps: int = 3) -> nn.Module:
    """The penalty's gradient before the step, or the soft threshold after it, written out."""
    model = network()
    optimizer, sparsifier = make(model.parameters()), sparsifier_with_penalty(model)
    strengths = strengths_of(model, sparsifier)
    for _ in range(steps):
        optimizer.zero_grad()
        torch.autograd.backward(loss_of(model))
        if isinstance(optimizer, SGD | ASGD):
            sparsifier.regularize_()
        optimizer.step()
        if not isinstance(optimizer, SGD | ASGD):
            for name, strength in strengths.items():
                weight, threshold = model.get_parameter(name), optimizer.param_groups[0]["lr"] * strength
                weight.data = weight.sign() * (weight.abs() - threshold).clamp(min=0)
    return model


def assert_same(model: nn.Module, other: nn.Module) -> None:
    torch.testing.assert_close(model.state_dict(), other.state_dict(), rtol=1e-5, atol=1e-7)


OPTIMIZERS: tuple[Make, ...] = (
    momentum_sgd,
    *(lambda parameters, kind=kind: kind(parameters, lr=0.01) for kind in (ASGD, Adam, AdamW, Adagrad, NAdam)),
    *(lambda parameters, kind=kind: kind(parameters, lr=0.01) for kind in (RAdam, RMSprop)),
    SignDescent,
)


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_an_attached_optimizer_steps_as_if_the_penalty_were_written_out(make: Make) -> None:
    assert_same(trained(make), trained_by_hand(make))


def scaled_step(model: nn.Module, optimizer: Optimizer, *, unscale: bool = False, clip: float | None = None) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer.zero_grad()
    torch.autograd.backward(scaler.scale(loss_of(model)))
    if unscale:
        scaler.unscale_(optimizer)
    if clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    scaler.step(optimizer)


def accumulated_step(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.zero_grad()
    for _ in range(4):
        torch.autograd.backward(loss_of(model) / 4)
    optimizer.step()


def step_of_closure(model: nn.Module, optimizer: Optimizer, *, by_name: bool = False) -> None:
    def closure() -> Any:
        optimizer.zero_grad()
        loss = loss_of(model)
        torch.autograd.backward(loss)
        return loss

    value: Any = optimizer.step(closure=closure) if by_name else optimizer.step(closure)
    assert isinstance(value, torch.Tensor)


STEPS: dict[str, Step] = {
    "scaled": scaled_step,
    "unscaled": lambda model, optimizer: scaled_step(model, optimizer, unscale=True),
    "accumulated": accumulated_step,
    "closure": step_of_closure,
    "closure by name": lambda model, optimizer: step_of_closure(model, optimizer, by_name=True),
}


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", [SGD, AdamW])
def test_every_kind_of_step_takes_the_penalty_once_and_unscaled(kind: Any, fused: bool, step: Step) -> None:
    def make(parameters: Any) -> Optimizer:
        made: Optimizer = kind(parameters, lr=0.01, fused=fused)
        return made

    assert_same(trained(make, step), trained_by_hand(make))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", [SGD, AdamW])
def test_a_step_that_the_scaler_skips_moves_nothing(kind: Any, fused: bool) -> None:
    def overflow(model: nn.Module, optimizer: Optimizer) -> None:
        scaler = torch.amp.GradScaler("cpu")
        torch.autograd.backward(scaler.scale(loss_of(model)))
        next(model.parameters()).grad.fill_(torch.inf)  # type: ignore[union-attr]  # after backward
        scaler.step(optimizer)

    model = trained(lambda parameters: kind(parameters, lr=0.01, fused=fused), overflow)
    assert_same(model, network())


def test_groups_and_optimizers_shrink_their_weights_by_their_own_rates() -> None:
    rates = {"2.weight": 0.01, "4.weight": 0.03}
    moved = {}
    for several in (False, True):
        model = network()
        groups = [{"params": [model.get_parameter(name)], "lr": rate} for name, rate in rates.items()]
        optimizers = [AdamW([group]) for group in groups] if several else [AdamW(groups)]
        plain = copy.deepcopy(model)
        sparsifier = sparsifier_with_penalty(model)
        strengths = strengths_of(model, sparsifier)
        for optimizer in optimizers:
            sparsifier.attach(optimizer)
        torch.autograd.backward(loss_of(model))
        for optimizer in optimizers:
            optimizer.step()
        torch.autograd.backward(loss_of(plain))
        AdamW([{"params": [plain.get_parameter(name)], "lr": rate} for name, rate in rates.items()]).step()
        for name, rate in rates.items():
            expected = plain.get_parameter(name).sign() * (
                plain.get_parameter(name).abs() - rate * strengths[name]
            ).clamp(min=0)
            torch.testing.assert_close(model.get_parameter(name).data, expected.data)
        count = sparsifier.state_dict()["count"]
        moved[several] = (count["steps"], count["reach"])
    assert moved[True] == moved[False] == ([1, 1], [0.01, 0.03])


def test_a_schedule_and_momentum_are_counted_step_by_step() -> None:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.5)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    sparsifier = ss.Sparsifier(model, CONFIG).attach(optimizer)
    for _ in range(3):
        plain_step(model, optimizer)
        schedule.step()
    count = sparsifier.state_dict()["count"]
    assert (count["steps"], count["reach"]) == ([3, 3], [pytest.approx(0.35)] * 2)
    sparsifier.end_epoch()
    assert sparsifier.state_dict()["count"]["steps"] == [0, 0]


def test_maximising_shrinks_too() -> None:
    model, up = network(), network()
    for network_, maximize in ((model, False), (up, True)):
        optimizer = SGD(network_.parameters(), lr=0.05, maximize=maximize)
        sparsifier_with_penalty(network_).attach(optimizer)
        torch.autograd.backward(-loss_of(network_) if maximize else loss_of(network_))
        optimizer.step()
    assert_same(model, up)


@pytest.mark.parametrize("kind", [SGD, AdamW])
def test_weights_that_the_step_leaves_alone_are_not_shrunk(kind: Any) -> None:
    model = network()
    optimizer = kind(model.parameters(), lr=0.05)
    sparsifier = sparsifier_with_penalty(model).attach(optimizer)
    optimizer.step()  # no gradient anywhere
    assert_same(model, network())
    model.get_parameter("2.weight").requires_grad_(False)
    plain_step(model, optimizer)
    assert torch.equal(model.get_parameter("2.weight"), network().get_parameter("2.weight"))
    assert sparsifier.state_dict()["count"]["steps"] == [0, 1]


class Accelerated(Optimizer):
    """In the manner of accelerate: an `Optimizer` without an initialised base, which holds another one."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # as accelerate declares it
        self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


@pytest.mark.parametrize("make", [momentum_sgd, SignDescent])
def test_a_wrapped_optimizer_is_attached_inside(make: Make) -> None:
    assert_same(trained(lambda parameters: Accelerated(make(parameters))), trained_by_hand(make))


def test_the_optimizer_itself_stays_what_it_was() -> None:
    model = network()
    optimizer, plain = momentum_sgd(model.parameters()), momentum_sgd(network().parameters())
    sparsifier_with_penalty(model).attach(optimizer)
    assert optimizer.state_dict() == plain.state_dict()
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert not twin._optimizer_step_pre_hooks
        assert not twin._optimizer_step_post_hooks


def test_a_detached_optimizer_takes_no_penalty() -> None:
    model = network()
    optimizer = momentum_sgd(model.parameters())
    sparsifier = sparsifier_with_penalty(model).attach(optimizer)
    sparsifier.detach()
    plain_step(model, optimizer)
    plain = network()
    plain_step(plain, momentum_sgd(plain.parameters()))
    assert_same(model, plain)
    sparsifier.attach(optimizer)


@pytest.mark.parametrize("change", [ss.convert_, ss.mask_])
def test_finetuning_with_the_same_optimizer_is_not_penalised(change: Any) -> None:
    model = network()
    optimizer = momentum_sgd(model.parameters())
    sparsifier = sparsifier_with_penalty(model).attach(optimizer)
    plan = sparsifier.plan()
    ss.convert_(model, plan, optimizer) if change is ss.convert_ else ss.mask_(model, plan)
    optimizer.zero_grad()
    torch.autograd.backward(loss_of(model))
    before = gradients(model)
    optimizer.step()
    torch.testing.assert_close(gradients(model), before, rtol=0, atol=0)
    assert sum(sparsifier.state_dict()["count"]["steps"]) == 0


def test_the_penalty_is_not_added_twice() -> None:
    model = network()
    optimizer = momentum_sgd(model.parameters())
    sparsifier = sparsifier_with_penalty(model).attach(optimizer)
    with pytest.raises(ValueError, match=r"adds the penalty by itself; remove regularize_\(\) .*, or call detach\(\)"):
        sparsifier.regularize_()
    with pytest.raises(ValueError, match="attached already"):
        sparsifier.attach(Accelerated(optimizer))


def test_an_optimizer_that_compares_losses_is_refused() -> None:
    with pytest.raises(ValueError, match=r"LBFGS .* add sparsifier\.penalty\(\) to the loss"):
        ss.Sparsifier(network(), CONFIG).attach(LBFGS(network().parameters()))


def test_a_run_that_is_resumed_within_an_epoch_continues_exactly() -> None:
    model = network()
    optimizer = momentum_sgd(model.parameters())
    sparsifier = sparsifier_with_penalty(model).attach(optimizer)
    plain_step(model, optimizer)
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict(), sparsifier.state_dict()), file)
    file.seek(0)
    states = torch.load(file, weights_only=True)
    again = network(seed=9)
    other = momentum_sgd(again.parameters())
    resumed = ss.Sparsifier(again, CONFIG).attach(other)
    parts: tuple[Any, ...] = (again, other, resumed)
    for part, state in zip(parts, states, strict=True):
        part.load_state_dict(state)
    for each, stepped in ((model, optimizer), (again, other)):
        plain_step(each, stepped)
    sparsifier.end_epoch(), resumed.end_epoch()
    assert_same(model, again)
    assert str(resumed.state_dict()) == str(sparsifier.state_dict())
