import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strucspars.core.controller import LambdaSchedule, LambdaState, default_lambda_step, next_lambda

SCHEDULE = LambdaSchedule(target=0.5, epochs=10, lambda_step=1.0, warmup=0)
fractions = st.floats(0, 1)


def lambdas(schedule: LambdaSchedule, removed_fractions: list[float]) -> list[float]:
    state, values = LambdaState(), []
    for fraction in removed_fractions:
        state = next_lambda(schedule, state, fraction)
        values.append(state.lambda_value)
    return values


def test_lambda_rises_while_sparsity_lags_behind_the_straight_line() -> None:
    # Ten epochs to 0.5: the first owes 0.05, exactly met; the second a ninth of the remaining 0.45, missed.
    assert lambdas(SCHEDULE, [0.05, 0.06, 0.06]) == [0.0, 1.0, 2.0]


def test_lambda_holds_while_sparsity_keeps_up() -> None:
    assert lambdas(SCHEDULE, [0.1, 0.2, 0.3, 0.4, 0.5]) == [0.0] * 5


def test_lambda_falls_above_the_target_but_never_below_zero() -> None:
    assert lambdas(SCHEDULE, [0.0, 0.0, 0.7, 0.7, 0.7]) == [1.0, 2.0, 1.0, 0.0, 0.0]


def test_above_the_target_a_fall_back_does_not_raise_lambda() -> None:
    # The paper's formula would: the gain of -0.3 is less than the expected (0.5 - 0.9) / 8.
    assert lambdas(SCHEDULE, [0.0, 0.9, 0.6]) == [1.0, 0.0, 0.0]


def test_warm_up_freezes_lambda_at_zero_and_then_starts_from_there() -> None:
    assert lambdas(replace(SCHEDULE, warmup=3 / SCHEDULE.epochs), [0.0] * 5) == [0.0, 0.0, 0.0, 1.0, 2.0]


def test_warm_up_epochs_count_as_epochs() -> None:
    schedule = LambdaSchedule(target=0.5, epochs=4, lambda_step=1.0, warmup=2 / 4)
    # Third of four epochs: two are left for 0.5, so 0.25 is due.
    assert lambdas(schedule, [0.0, 0.0, 0.25]) == [0.0, 0.0, 0.0]
    assert lambdas(schedule, [0.0, 0.0, 0.24]) == [0.0, 0.0, 1.0]


def test_past_the_schedule_the_whole_rest_is_due() -> None:
    assert lambdas(replace(SCHEDULE, epochs=1), [0.5, 0.4, 0.45]) == [0.0, 1.0, 2.0]


@given(st.lists(fractions, max_size=30))
def test_lambda_is_never_negative_and_moves_by_at_most_one_step(observed: list[float]) -> None:
    before = 0.0
    for value in lambdas(SCHEDULE, observed):
        assert value >= 0
        assert abs(value - before) in (0.0, 1.0)
        before = value


@given(st.lists(fractions, min_size=1, max_size=20), st.data())
def test_a_resumed_controller_continues_as_if_uninterrupted(observed: list[float], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(observed)))
    state = LambdaState()
    for fraction in observed[:cut]:
        state = next_lambda(SCHEDULE, state, fraction)
    restored = LambdaState(state.epoch, state.lambda_value, state.removed_fraction)
    for fraction in observed[cut:]:
        restored = next_lambda(SCHEDULE, restored, fraction)
    assert restored.lambda_value == lambdas(SCHEDULE, observed)[-1]


@given(st.integers(1, 500), st.integers(1, 5000), st.floats(1e-4, 10))
def test_the_default_step_shrinks_weights_as_much_as_the_papers_schedule(epochs: int, steps: int, lr: float) -> None:
    step = default_lambda_step(epochs, steps_per_epoch=steps, lr=lr)
    assert lr * steps * step * epochs**2 == pytest.approx(0.1 * 782 * 2e-6 * 100**2)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("target", 1.0),
        ("target", -0.1),
        ("target", math.nan),
        ("epochs", 0),
        ("epochs", 2.5),
        ("lambda_step", 0.0),
        ("lambda_step", math.inf),
        ("lambda_step", "2e-6"),
        ("warmup", -0.1),
        ("warmup", 1),
    ],
)
def test_a_bad_schedule_is_named(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"{field} .*got {value!r}"):
        replace(SCHEDULE, **{field: value})  # type: ignore[arg-type]  # assorted bad input


@pytest.mark.parametrize("fraction", [-0.1, 1.1, math.nan])
def test_a_bad_observation_is_named(fraction: float) -> None:
    with pytest.raises(ValueError, match=r"removed_fraction must lie in \[0, 1\]"):
        next_lambda(SCHEDULE, LambdaState(), fraction)


@pytest.mark.parametrize(
    ("epochs", "steps", "lr", "named"),
    [
        (0, 1, 0.1, "epochs"),
        (math.nan, 1, 0.1, "epochs"),
        (2.5, 1, 0.1, "epochs"),
        (1, 0, 0.1, "steps_per_epoch"),
        (1, 1, 0.0, "lr"),
        (1, 1, 1e-320, "lr"),
        (1, 1, math.nan, "lr"),
        (1, 1, math.inf, "lr"),
    ],
)
def test_a_bad_schedule_for_the_default_step_is_named(epochs: int, steps: int, lr: float, named: str) -> None:
    with pytest.raises(ValueError, match=f"{named} must be"):
        default_lambda_step(epochs, steps_per_epoch=steps, lr=lr)


def test_lambda_holds_where_the_target_is_met_exactly() -> None:
    assert lambdas(SCHEDULE, [0.0, 0.5, 0.5]) == [1.0, 1.0, 1.0]
    assert lambdas(SCHEDULE, [0.0, 0.0, 0.6, 0.5]) == [1.0, 2.0, 1.0, 1.0]  # from above, though that is a loss
