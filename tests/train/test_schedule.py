import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strucspars.train.recipe import Schedule, StageRecipe
from strucspars.train.steps import learning_rates


def all_rates(stage: StageRecipe, steps: int) -> list[float]:
    return [rate for epoch in range(1, stage.epochs + 1) for rate in learning_rates(stage, epoch, steps)]


@given(st.integers(1, 40), st.integers(1, 30))
def test_steps_divide_the_rate_by_ten_at_half_and_three_quarters_of_all_steps(epochs: int, steps: int) -> None:
    rates = all_rates(StageRecipe(epochs=epochs, lr=0.1, schedule="steps"), steps)
    total = epochs * steps
    for place, rate in enumerate(rates):
        passed = (place >= total / 2) + (place >= 3 * total / 4)
        # Between two steps the change may come at the nearer one.
        if all(abs(place - share * total) > 0.5 or place == share * total for share in (0.5, 0.75)):
            assert rate == pytest.approx(0.1 * 0.1**passed)
    assert rates == sorted(rates, reverse=True)


def test_the_papers_finetuning_changes_at_the_first_step_of_epochs_81_and_121() -> None:
    stage = StageRecipe(epochs=160, lr=0.1, schedule="steps", lr_warmup=10 / 160)
    ends = {epoch: (learning_rates(stage, epoch, 782)[0], learning_rates(stage, epoch, 782)[-1]) for epoch in (80, 81)}
    assert ends == {80: pytest.approx((0.1, 0.1)), 81: pytest.approx((0.01, 0.01))}
    assert learning_rates(stage, 120, 782)[-1] == pytest.approx(0.01)
    assert learning_rates(stage, 121, 782)[0] == pytest.approx(0.001)


@given(st.sampled_from(["constant", "steps", "cosine"]), st.integers(1, 5), st.integers(1, 20))
def test_the_warm_up_rises_in_equal_steps_to_the_full_rate(schedule: Schedule, warmup: int, steps: int) -> None:
    stage = StageRecipe(epochs=3 * warmup, lr=0.4, schedule=schedule, lr_warmup=1 / 3)
    rates = all_rates(stage, steps)[: warmup * steps]
    assert rates == pytest.approx([0.4 * (place + 1) / (warmup * steps) for place in range(warmup * steps)])


@given(st.integers(2, 40), st.integers(1, 30), st.integers(0, 1))
def test_the_cosine_falls_from_the_full_rate_to_nearly_zero(epochs: int, steps: int, warmup: int) -> None:
    stage = StageRecipe(epochs=epochs, lr=0.2, schedule="cosine", lr_warmup=warmup / epochs)
    rates = all_rates(stage, steps)[warmup * steps :]
    assert rates[0] == pytest.approx(0.2)
    assert rates == sorted(rates, reverse=True)
    last_step = math.pi / len(rates)
    assert 0 < rates[-1] <= 0.2 * last_step**2 / 4 + 1e-12
    assert sum(rates) / len(rates) == pytest.approx(0.1 * (1 + 1 / len(rates)))


def test_a_constant_rate_is_constant() -> None:
    assert set(all_rates(StageRecipe(epochs=5, lr=0.3), 7)) == {0.3}
