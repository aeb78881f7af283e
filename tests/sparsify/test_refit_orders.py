import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strucspars.sparsify.refit_orders import RIDGE, Regression, refit_orders


def layer(seed: int, out_channels: int, in_channels: int, area: int = 1) -> Regression:
    """Of correlated inputs, which stand in for each other."""
    generator = torch.Generator().manual_seed(seed)
    width = in_channels * area
    inputs = torch.randn(200, width, generator=generator) @ torch.randn(width, width, generator=generator)
    weight = torch.randn(out_channels, in_channels, area, generator=generator)
    sensitivity = torch.rand(out_channels, generator=generator)
    return Regression.of(weight, torch.cov(inputs.T, correction=0), sensitivity)


def explained(layer: Regression, rows: np.ndarray, columns: np.ndarray, groups: int) -> float:
    """By the definition, group by group."""
    total = 0.0
    for outputs, inputs in zip(np.split(rows, groups), np.split(columns, groups), strict=True):
        patches = torch.tensor((inputs[:, None] * layer.area + np.arange(layer.area)).ravel())
        cross = layer.cross[outputs][:, patches]
        solved = torch.linalg.solve(layer.covariance[patches][:, patches], cross.T)
        total += float(((cross * solved.T).sum(1) * layer.sensitivity[outputs]).sum())
    return total


def halves(width: int) -> list[np.ndarray]:
    everything = range(width)
    firsts = itertools.combinations(everything, width // 2)
    return [np.array([*first, *(each for each in everything if each not in first)]) for first in firsts]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([1, 2, 4]), st.sampled_from([1, 9]))
def test_orders_are_permutations_that_explain_no_less_than_their_start(seed: int, groups: int, area: int) -> None:
    known, generator = layer(seed, 8, 8, area), np.random.default_rng(seed)
    start = generator.permutation(8), generator.permutation(8)
    found = refit_orders(known, start, groups)
    assert all(sorted(order) == list(range(8)) for order in found)
    assert explained(known, *found, groups) >= explained(known, *start, groups) * (1 - 1e-4)


def test_orders_come_near_the_best_of_all() -> None:
    shares = []
    for seed in range(10):
        known = layer(seed, 6, 6)
        every = [explained(known, rows, columns, 2) for rows in halves(6) for columns in halves(6)]
        found = explained(known, *refit_orders(known, (np.arange(6), np.arange(6)), 2), 2)
        shares.append((found - min(every)) / (max(every) - min(every)))
    assert np.mean(shares) > 0.85


@pytest.mark.parametrize("area", [1, 4])
def test_an_input_is_worth_what_the_explained_part_changes_by(area: int) -> None:
    known = layer(3, 4, 4, area)
    found = refit_orders(known, (np.arange(4), np.arange(4)), 1)
    whole = explained(known, np.arange(4), np.arange(4), 1)
    assert explained(known, *found, 1) == pytest.approx(whole, rel=1e-4)
    # All that the ridge leaves of the variance.
    assert whole == pytest.approx(known.variance, rel=10 * RIDGE)


def test_inputs_that_stand_in_for_each_other_are_kept_apart() -> None:
    """Every signal arrives twice, so two groups can have all of them; single connections do not show it."""
    covariance = torch.eye(8).repeat_interleave(2, 0).repeat_interleave(2, 1) + 0.01 * torch.eye(16)
    weight = torch.randn(16, 16, 1, generator=torch.Generator().manual_seed(0))
    known = Regression.of(weight, covariance, torch.ones(16))
    start = np.arange(16), np.arange(16)
    assert explained(known, *start, 2) < 0.8 * known.variance
    assert explained(known, *refit_orders(known, start, 2), 2) > 0.97 * known.variance
