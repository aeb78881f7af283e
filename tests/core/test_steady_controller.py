"""The controller for any schedule, on a simulated layer whose loss pulls the weights back to where they were."""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from strucspars.core.controller import (
    LARGEST_SHARE_OF_FORCE,
    LambdaState,
    ObservedEpoch,
    SteadySchedule,
    next_steady_lambda,
)

SCHEDULE = SteadySchedule(min_kept_norm=0.9, epochs=10)


def trained(
    epochs: int,
    steps: int,
    lr: float,
    *,
    pull: float = 0.0,
    cosine: bool = False,
    rising: float = 0.0,
    force: float | None = None,
) -> tuple[list[float], list[LambdaState]]:
    """Norm outside the groups and state after every epoch; `pull` is how much of a change a reach of 1 undoes."""
    generator = np.random.default_rng(0)
    start = generator.normal(size=400)
    weights, outside = start.copy(), np.arange(400) % 2 == 0
    schedule, state = SteadySchedule(min_kept_norm=0.9, epochs=epochs), LambdaState()
    norms, states = [], []
    for epoch in range(epochs):
        reach, strength = 0.0, state.lambda_value * float(np.abs(weights).mean())
        for step in range(steps):
            rate = lr * (1 + math.cos(math.pi * (epoch * steps + step) / (epochs * steps))) / 2 if cosine else lr
            rate *= min(1.0, (epoch * steps + step + 1) / (rising * epochs * steps)) if rising else 1.0
            weights -= rate * pull * (weights - start)
            shrunk = np.sign(weights) * np.maximum(np.abs(weights) - rate * strength, 0)
            weights = np.where(outside, shrunk, weights)
            reach += rate
        norms.append(float(np.abs(weights[outside]).sum() / np.abs(weights).sum()))
        observed = ObservedEpoch(removed_fraction=0.0, outside_norm=norms[-1], reach=reach, force=force)
        state = next_steady_lambda(schedule, state, observed)
        states.append(state)
    return norms, states


@pytest.mark.parametrize("cosine", [False, True])
@pytest.mark.parametrize(
    ("epochs", "steps", "loss"),
    [
        # Five epochs have too few decisions to find the strength that a stronger loss needs.
        *((5, 100, loss) for loss in (0.0, 0.3)),
        *((epochs, steps, loss) for epochs, steps in ((10, 50), (30, 16), (100, 5)) for loss in (0.0, 0.3, 3.0, 30.0)),
    ],
)
@pytest.mark.parametrize("lr", [1e-4, 0.1])
def test_the_target_is_reached_without_swings(lr: float, epochs: int, steps: int, loss: float, cosine: bool) -> None:
    # `loss` is how often the whole training could bring the weights back.
    norms, states = trained(epochs, steps, lr, pull=loss / (lr * epochs * steps), cosine=cosine)
    assert norms[-1] <= 0.1
    falls = [before - after for before, after in pairwise(norms)]
    assert min(falls) > -0.05
    assert norms[SCHEDULE.warmup_epochs] > 0.15
    strengths = [state.lambda_value for state in states]
    assert strengths == sorted(strengths)


@pytest.mark.parametrize("loss", [0.0, 3.0])
def test_rising_rates_do_not_multiply_the_strength(loss: float) -> None:
    norms, _ = trained(20, 25, 0.1, pull=loss / 50, rising=0.4, cosine=True)
    assert norms[-1] <= 0.1
    assert max(before - after for before, after in pairwise(norms)) < 0.15


@pytest.mark.parametrize("pull", [0.0, 0.02])
def test_it_arrives_by_the_planned_epoch(pull: float) -> None:
    norms, states = trained(50, 10, 0.1, pull=pull)
    arrival = SteadySchedule(min_kept_norm=0.9, epochs=50).arrival
    assert max(norms[arrival:]) <= 0.1 < norms[arrival // 2]
    assert len({state.lambda_value for state in states[arrival + 1 :]}) == 1


def test_the_penalty_is_never_stronger_than_the_loss_allows() -> None:
    norms, states = trained(10, 10, 0.1, pull=0.5, force=0.02)
    assert max(state.lambda_value for state in states) == LARGEST_SHARE_OF_FORCE * 0.02
    assert states[-1].is_bounded
    assert norms[-1] > 0.3


def test_lambda_stays_zero_in_the_warm_up_and_without_anything_to_shrink() -> None:
    schedule = replace(SCHEDULE, epochs=20, warmup=0.25)
    observed = ObservedEpoch(removed_fraction=0.0, outside_norm=0.5, reach=1.0)
    state, values = LambdaState(), []
    for _ in range(7):
        state = next_steady_lambda(schedule, state, observed)
        values.append(state.lambda_value)
    assert values[:4] == [0.0] * 4
    assert min(values[4:]) > 0
    done = replace(observed, outside_norm=0.0)
    assert next_steady_lambda(SCHEDULE, LambdaState(), done).lambda_value == 0


def test_twice_the_reach_needs_half_the_strength() -> None:
    first, second = (
        next_steady_lambda(SCHEDULE, LambdaState(), ObservedEpoch(removed_fraction=0, outside_norm=0.5, reach=reach))
        for reach in (3.0, 6.0)
    )
    assert first.lambda_value == pytest.approx(2 * second.lambda_value)


def test_a_schedule_of_one_epoch_and_steps_that_reach_nothing_have_finite_answers() -> None:
    for epochs in (1, 2, 3):
        observed = ObservedEpoch(removed_fraction=0.0, outside_norm=1.0, reach=0.0, force=1.0)
        state = next_steady_lambda(SteadySchedule(min_kept_norm=1.0, epochs=epochs), LambdaState(), observed)
        assert 0 <= state.lambda_value <= LARGEST_SHARE_OF_FORCE


def test_a_bad_observation_is_named() -> None:
    with pytest.raises(ValueError, match=r"removed_fraction must lie in \[0, 1\]"):
        next_steady_lambda(SCHEDULE, LambdaState(), ObservedEpoch(removed_fraction=2, outside_norm=0.5, reach=1.0))
