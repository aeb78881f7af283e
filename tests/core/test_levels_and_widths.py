"""Levels and widths chosen at once, against all choices there are."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strucspars.core.levels_and_widths import GAP, ROUNDING, Choices, Conflict, Option, Product, cheapest, choose


def random_choices(seed: int) -> Choices:
    """Two layers in a row between three classes of channels, and a sum that both are part of."""
    generator = np.random.default_rng(seed)

    def options(count: int, values: list[int]) -> list[Option]:
        shares = np.sort(generator.random(count))[::-1] * 0.9 + 0.05
        losses = np.sort(generator.random(count))
        first = [Option(value=values[0], share=1, loss=0)]
        return first + [
            Option(value=value, share=share, loss=loss)
            for value, share, loss in zip(values[1:], shares, losses, strict=False)
        ]

    names = {"layer a": [1, 2, 4], "layer b": [1, 2, 4], "in": [8, 6, 4], "between": [8, 4], "out": [6, 4, 2]}
    products = [
        Product(generator.random(), ("layer a", "in", "between")),
        Product(generator.random(), ("layer b", "between", "out")),
        Product(generator.random(), ("in", "in")),
        Product(generator.random() * 0.1, ("out",)),
        Product(generator.random() * 0.1),
    ]
    conflicts = [Conflict((("layer a", 4), ("in", 6))), Conflict((("layer b", 2), ("layer b", 4), ("out", 2)))]
    return Choices(
        options={name: options(len(values) - 1, values) for name, values in names.items()},
        products=products,
        conflicts=conflicts,
    )


def all_choices(choices: Choices) -> list[dict[str, int]]:
    values = [[option.value for option in options] for options in choices.options.values()]
    every = (dict(zip(choices.options, each, strict=True)) for each in itertools.product(*values))
    return [
        each
        for each in every
        if all(
            sum(each[name] == value for name, value in conflict.options) <= conflict.most
            for conflict in choices.conflicts
        )
    ]


def loss(choices: Choices, chosen: dict[str, int]) -> float:
    losses = {(name, option.value): option.loss for name, options in choices.options.items() for option in options}
    return sum(losses[each] for each in chosen.items())


@given(st.integers(0, 100_000), st.floats(0, 0.95))
def test_the_choice_is_the_best_of_all(seed: int, target: float) -> None:
    choices = random_choices(seed)
    allowed = (1 - target + ROUNDING) * choices.whole
    within = [each for each in all_choices(choices) if choices.cost(each) <= allowed]
    found = choose(choices, target)
    if found is None:
        # Only where the margin of the solver's tolerance cannot be had.
        assert all(choices.cost(each) > allowed - 2e-3 * choices.whole for each in within)
    else:
        assert found in within
        best = min(
            loss(choices, each)
            for each in within
            if choices.cost(each) <= allowed - 2e-3 * choices.whole or each == found
        )
        assert loss(choices, found) <= best * (1 + GAP) + 1e-6


@given(st.integers(0, 100_000))
def test_the_cheapest_choice_costs_no_more_than_any(seed: int) -> None:
    choices = random_choices(seed)
    found = cheapest(choices)
    assert found in all_choices(choices)
    assert choices.cost(found) == pytest.approx(min(map(choices.cost, all_choices(choices))), rel=2e-3)


def test_nothing_to_choose_meets_no_target() -> None:
    choices = Choices(options={}, products=[Product(1)])
    assert choose(choices, 0.0) == {}
    assert choose(choices, 0.1) is None
