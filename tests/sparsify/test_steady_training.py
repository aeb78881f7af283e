"""Sparse training by the default controller in any loop, and what it says when it cannot work."""

import copy
import io
import re
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from sparse_training import labelled_images, network
from torch import nn
from torch.nn import functional
from torch.optim import SGD, AdamW, Optimizer

import strucspars as ss
from strucspars.core.controller import LambdaState
from strucspars.sparsify.advice import Advice
from strucspars.sparsify.reports import EpochReport

CONFIG = ss.SparsifyConfig(target=0.4, epochs=10)


def fitted(
    model: nn.Module, optimizer: Optimizer, sparsifier: ss.Sparsifier, epochs: int, *, steps: int = 5
) -> list[EpochReport]:
    """A loop of two lines: attached before it, and the end of the epoch."""
    images, labels = labelled_images()
    reports = []
    for _ in range(epochs):
        for _ in range(steps):
            optimizer.zero_grad()
            torch.autograd.backward(functional.cross_entropy(model(images), labels))
            optimizer.step()
        reports.append(sparsifier.end_epoch())
    return reports


def started(
    make: Any, config: ss.SparsifyConfig = CONFIG, model: nn.Module | None = None
) -> tuple[nn.Module, Optimizer, ss.Sparsifier]:
    model = network() if model is None else model
    optimizer: Optimizer = make(model.parameters())
    return model, optimizer, ss.Sparsifier(model, config).attach(optimizer)


def normalised() -> nn.Sequential:
    first, *others = network()
    return nn.Sequential(first, nn.BatchNorm2d(16), others[0], others[1], nn.BatchNorm2d(32), *others[2:])


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: SGD(parameters, lr=0.1),
        lambda parameters: SGD(parameters, lr=0.02, momentum=0.9),
        lambda parameters: AdamW(parameters, lr=1e-3),
        lambda parameters: AdamW(parameters, lr=3e-3),
    ],
)
@pytest.mark.parametrize(("epochs", "steps", "importance"), [(8, 30, "l1"), (40, 6, "l2")])
def test_the_target_is_met_at_any_rate_and_by_any_optimizer(
    make: Any, epochs: int, steps: int, importance: str
) -> None:
    config = replace(CONFIG, epochs=epochs, importance=importance)
    model, optimizer, sparsifier = started(make, config, normalised())
    reports = fitted(model, optimizer, sparsifier, epochs, steps=steps)
    assert abs(reports[-1].removed_fraction - CONFIG.target) <= 0.06
    kept = [report.kept_norm for report in reports]
    assert min(after - before for before, after in pairwise(kept)) > -0.05
    plan = sparsifier.plan()
    assert plan.min_kept_norm is not None
    assert plan.min_kept_norm > 0.88


def test_only_connections_outside_the_targets_groups_are_penalised() -> None:
    model, optimizer, sparsifier = started(lambda parameters: SGD(parameters, lr=0.1))
    fitted(model, optimizer, sparsifier, 2)
    plan = sparsifier.plan()
    found = torch.autograd.grad(sparsifier.penalty(), [model.get_parameter(f"{name}.weight") for name in plan.layers])
    for gradient, layer in zip(found, plan.layers.values(), strict=True):
        penalised = (gradient != 0).flatten(2).any(dim=2).float().mean().item()
        assert penalised == pytest.approx(1 - 1 / layer.num_groups)


def test_a_run_resumed_within_an_epoch_continues_exactly() -> None:
    def make(parameters: Any) -> Optimizer:
        return AdamW(parameters, lr=3e-3)

    model, optimizer, sparsifier = started(make)
    fitted(model, optimizer, sparsifier, 4)
    images, labels = labelled_images()
    torch.autograd.backward(functional.cross_entropy(model(images), labels))
    optimizer.step()
    file = io.BytesIO()
    torch.save(copy.deepcopy((model.state_dict(), optimizer.state_dict(), sparsifier.state_dict())), file)
    file.seek(0)
    parts: tuple[Any, ...] = started(make)
    with torch.no_grad():
        parts[0][2].weight.add_(1)
    for part, state in zip(parts, torch.load(file, weights_only=True), strict=True):
        part.load_state_dict(state)
    ours, theirs = fitted(model, optimizer, sparsifier, 3), fitted(parts[0], parts[1], parts[2], 3)
    assert [replace(report, seconds=0) for report in ours] == [replace(report, seconds=0) for report in theirs]
    torch.testing.assert_close(parts[0].state_dict(), model.state_dict(), rtol=0, atol=0)


def test_without_an_optimizer_to_ask_the_options_tell_the_reach() -> None:
    config = replace(CONFIG, steps_per_epoch=5, lr=0.1)
    found = []
    for attached in (False, True):
        model = network()
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        sparsifier = ss.Sparsifier(model, config)
        if attached:
            sparsifier.attach(optimizer)
        fitted(model, optimizer, sparsifier, 1)
        found.append(sparsifier.state_dict()["controller"]["reach"])
    assert found[0] == pytest.approx(found[1])


def test_a_step_of_the_papers_controller_needs_that_controller() -> None:
    with pytest.raises(ValueError, match=r"lambda_step is of the paper's controller, .* set controller='paper'"):
        replace(CONFIG, lambda_step=1e-3)
    with pytest.raises(ValueError, match="controller must be one of auto, paper, got 'none'"):
        replace(CONFIG, controller="none")  # type: ignore[arg-type]  # bad input


def test_defaults_suit_any_number_of_epochs() -> None:
    for epochs in (1, 2, 6):
        assert ss.SparsifyConfig(epochs=epochs).steady_schedule.warmup_epochs == 1


IDLE = LambdaState(epoch=5, lambda_value=1e-3, removed_fraction=0.0, outside_norm=0.44, first_outside_norm=0.45)


@pytest.mark.parametrize(
    ("state", "steps", "told"),
    [
        (LambdaState(epoch=1), 49, "the schedule is short: 10 epochs of 49 steps, where training needs about 500"),
        (LambdaState(epoch=3), 0, "no optimizer step of epoch 3 reached the layers"),
        (IDLE, 100, "the penalty does nothing so far: with 5 of 10 epochs left, .* 56 % .*, 55 % at the beginning"),
        (replace(IDLE, is_bounded=True), 100, "the target is out of reach with 5 of 10 epochs left: .* harms the loss"),
        (replace(IDLE, epoch=10), 100, "the target was not reached: the groups that remove 40 % keep 56 %"),
    ],
)
def test_what_cannot_work_is_said_once_with_a_remedy(
    state: LambdaState, steps: int, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    advice = Advice()
    for _ in range(2):
        advice.after_epoch(CONFIG, state, steps=steps)
    (record,) = caplog.records
    assert re.search(told, record.getMessage())
    assert "ss.compress(model, target, calibration=batches)" in record.getMessage() or "attach" in record.getMessage()


@pytest.mark.parametrize(
    "state",
    [
        LambdaState(epoch=1),
        replace(IDLE, epoch=4),
        replace(IDLE, outside_norm=0.3),
        replace(IDLE, epoch=10, outside_norm=0.1, removed_fraction=0.36),
    ],
)
@pytest.mark.parametrize("steps", [50, None])
def test_nothing_is_said_while_all_is_well(
    state: LambdaState, steps: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    Advice().after_epoch(CONFIG, state, steps=steps)
    assert not caplog.records


def test_a_short_schedule_is_reported_by_the_first_epoch(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer, sparsifier = started(lambda parameters: SGD(parameters, lr=0.1), replace(CONFIG, epochs=3))
    fitted(model, optimizer, sparsifier, 1)
    assert "the schedule is short: 3 epochs of 5 steps" in caplog.text
