import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strucspars.core.budget import (
    LayerBudget,
    Shuffle,
    ThresholdSearch,
    cheapest_levels,
    largest_removed_fraction,
    levels_by_loss,
    removed_fraction,
    search_threshold,
    without_surplus,
)
from strucspars.core.hierarchy import max_group_level, num_groups
from strucspars.core.importance import kept_norm_by_level, largest_group_level, level_keeping

fractions = st.floats(0, 1).map(lambda value: round(value, 3))


@st.composite
def networks(draw: st.DrawFn) -> list[LayerBudget]:
    layers = [LayerBudget("rest", draw(st.integers(1, 500)))]
    for index in range(draw(st.integers(1, 6))):
        kept = (1.0, *sorted(draw(st.lists(fractions, max_size=4)), reverse=True))
        option = draw(st.sampled_from(["fixed_level", "largest_level"]))
        levels = {option: draw(st.none() | st.integers(1, len(kept)))}
        costs = sorted(draw(st.lists(st.integers(0, 5000), min_size=len(kept), max_size=len(kept))), reverse=True)
        by_level = draw(st.sampled_from([None, costs]))
        layers.append(LayerBudget(f"conv{index}", costs[0], kept_norm=kept, cost_by_level=by_level, **levels))
    return layers


def removed_at(layers: list[LayerBudget], threshold: float) -> float:
    return removed_fraction(layers, {layer.name: layer.level_at(threshold) for layer in layers})


@given(networks(), st.floats(0, 0.99))
def test_the_threshold_is_the_largest_that_meets_the_target(layers: list[LayerBudget], target: float) -> None:
    reachable = removed_at(layers, 0.0)
    if reachable < target:
        with pytest.raises(ValueError, match="cannot be reached: with every layer at its largest level") as refusal:
            search_threshold(layers, target)
        named = float(str(refusal.value).split("largest level, ")[1].split()[0])
        assert reachable - 1e-4 < named <= reachable
        assert search_threshold(layers, named).removed_fraction >= named
        return
    found = search_threshold(layers, target)
    assert found.removed_fraction >= target
    assert found.removed_fraction == removed_at(layers, found.min_kept_norm)
    for higher in np.linspace(found.min_kept_norm, 1, 50):
        assert higher == found.min_kept_norm or removed_at(layers, higher) < target


@given(networks(), fractions)
def test_fixed_and_largest_levels_are_respected(layers: list[LayerBudget], threshold: float) -> None:
    for layer in layers:
        free = level_keeping(layer.kept_norm, threshold)
        if layer.fixed_level is not None:
            assert layer.level_at(threshold) == layer.fixed_level
        else:
            assert layer.level_at(threshold) == min(free, layer.largest_level or free)


@given(networks())
def test_the_largest_removed_fraction_is_in_reach_and_nothing_above_it(layers: list[LayerBudget]) -> None:
    most = largest_removed_fraction(layers)
    assert most == removed_at(layers, 0.0)
    assert search_threshold(layers, most).removed_fraction == most
    with pytest.raises(ValueError, match="cannot be reached"):
        search_threshold(layers, np.nextafter(most, 1))


channel_counts = st.sampled_from([4, 6, 16, 24, 32])


@given(st.lists(st.tuples(channel_counts, channel_counts), min_size=1, max_size=4), st.integers(1, 12), fractions)
def test_groups_keep_a_minimum_width_with_the_core_alone(
    shapes: list[tuple[int, int]], width: int, share: float
) -> None:
    layers, matrices = [], {}
    for index, shape in enumerate(shapes):
        matrices[f"conv{index}"] = matrix = np.random.default_rng(index).random(shape)
        limit = max_group_level(*shape, min_channels_per_group=width)
        kept = kept_norm_by_level(matrix).tolist()
        layers.append(LayerBudget(f"conv{index}", matrix.size, kept_norm=kept, largest_level=limit))
    target = share * largest_removed_fraction(layers)
    found = search_threshold(layers, target)
    assert found.removed_fraction >= target
    for name, level in found.group_levels.items():
        assert level == 1 or min(matrices[name].shape) // num_groups(level) >= width
        assert level == largest_group_level(matrices[name], found.min_kept_norm, min_channels_per_group=width)


@given(networks(), st.floats(0, 0.9))
def test_without_surplus_no_layer_can_be_lowered_and_none_is_raised(layers: list[LayerBudget], target: float) -> None:
    if removed_at(layers, 0.0) < target:
        return
    found = search_threshold(layers, target)
    trimmed = without_surplus(layers, found, target)
    assert target <= trimmed.removed_fraction <= found.removed_fraction
    for layer in layers:
        level = trimmed.group_levels[layer.name]
        assert level <= found.group_levels[layer.name]
        if layer.fixed_level is not None:
            assert level == layer.fixed_level
        elif level > 1:
            lower = dict(trimmed.group_levels) | {layer.name: level - 1}
            assert removed_fraction(layers, lower) < target


def test_the_layer_that_keeps_least_is_lowered_first() -> None:
    layers = [LayerBudget(name, 100, kept_norm=(1.0, kept)) for name, kept in (("a", 0.6), ("b", 0.5), ("c", 0.7))]
    everything = ThresholdSearch(0.5, {"a": 2, "b": 2, "c": 2}, 0.5)
    assert without_surplus(layers, everything, target=0.3).group_levels == {"a": 2, "b": 1, "c": 2}


def test_the_whole_network_is_the_denominator() -> None:
    layers = [LayerBudget("conv", 600, kept_norm=(1.0, 0.95)), LayerBudget("bn", 200), LayerBudget("fc", 200)]
    assert search_threshold(layers, 0.3).removed_fraction == pytest.approx(0.3)
    with pytest.raises(ValueError, match=r"0\.3000 of the whole cost would be removed"):
        search_threshold(layers, 0.31)


def test_costs_by_level_decide_what_a_level_saves() -> None:
    layers = [
        LayerBudget("slow", 9000, kept_norm=(1.0, 0.9), cost_by_level=(9000, 8999)),
        LayerBudget("fast", 1000, kept_norm=(1.0, 0.5), cost_by_level=(1000, 100)),
    ]
    assert search_threshold(layers, 0.05).group_levels == {"slow": 2, "fast": 2}
    assert largest_removed_fraction(layers) == 0.0901
    for costs in ((10, 11), (9, 3), (10,), (10, float("nan")), 10):
        with pytest.raises(ValueError, match=r"layer 'a': cost_by_level must have 2 costs from 10\.0 on"):
            LayerBudget("a", 10, kept_norm=(1.0, 0.5), cost_by_level=costs)  # type: ignore[arg-type]  # bad input


def test_target_zero_groups_only_what_loses_nothing() -> None:
    layers = [LayerBudget("a", 10, kept_norm=(1.0, 1.0)), LayerBudget("b", 10, kept_norm=(1.0, 0.999))]
    assert search_threshold(layers, 0.0).group_levels == {"a": 2, "b": 1}


@pytest.mark.parametrize("target", [-0.1, 1.0, 35, float("nan"), "0.5", None])
def test_a_bad_target_is_named(target: float) -> None:
    with pytest.raises(ValueError, match=r"target is a removed fraction and must lie in \[0, 1\)"):
        search_threshold([LayerBudget("conv", 10)], target)


def test_bad_layers_are_named() -> None:
    with pytest.raises(ValueError, match="layer names must differ, got 'a' more than once"):
        search_threshold([LayerBudget("a", 1), LayerBudget("b", 1), LayerBudget("a", 1)], 0.0)
    with pytest.raises(ValueError, match="the layers cost nothing"):
        search_threshold([], 0.0)
    for cost in (-1, float("nan"), float("inf"), "3"):
        with pytest.raises(ValueError, match="layer 'a': cost must be finite and not negative"):
            LayerBudget("a", cost)  # type: ignore[arg-type]  # assorted bad input
    with pytest.raises(ValueError, match=r"layer 'a': fixed_level must lie in 1\.\.2 \(at most 2 groups\), got 3"):
        LayerBudget("a", 1, kept_norm=(1.0, 0.9), fixed_level=3)
    with pytest.raises(ValueError, match="layer 'a': largest_level must be a whole number from 1 on, got 0"):
        LayerBudget("a", 1, largest_level=0)


def test_levels_that_fit_no_layer_are_refused() -> None:
    layers = [LayerBudget("conv", 10, kept_norm=(1.0, 0.9)), LayerBudget("fc", 10)]
    with pytest.raises(ValueError, match="group_levels: there is no layer 'cnov'"):
        removed_fraction(layers, {"cnov": 2})
    with pytest.raises(ValueError, match=r"layer 'fc': group level must lie in 1\.\.1"):
        removed_fraction(layers, {"fc": 2})
    assert removed_fraction(layers, {}) == 0.0


@pytest.mark.parametrize("kept", [(), (0.9,), (1.0, 0.5, 0.6), (1.0, -0.1), (1.0, float("nan")), 1.0, (1.0, "0.5")])
def test_bad_kept_norms_are_named(kept: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match=r"layer 'a': kept_norm must be numbers from 1\.0 on that never rise"):
        LayerBudget("a", 1, kept_norm=kept)


def test_the_layer_to_lower_is_the_one_that_keeps_least_at_its_present_level() -> None:
    # At its third level "a" would keep less than "b", but it is at its second.
    layers = [LayerBudget("a", 100, kept_norm=(1.0, 0.8, 0.1)), LayerBudget("b", 100, kept_norm=(1.0, 0.6, 0.5))]
    found = ThresholdSearch(0.6, {"a": 2, "b": 2}, 0.5)
    assert without_surplus(layers, found, target=0.25).group_levels == {"a": 2, "b": 1}


def test_the_callers_kept_norms_are_copied_and_numpy_numbers_become_plain_ones() -> None:
    kept = [1.0, np.float32(0.5)]
    layer = LayerBudget("conv", np.int32(2**31 - 1), kept_norm=kept)  # type: ignore[arg-type]  # numpy's
    kept[1] = 0.9
    assert layer.kept_norm == (1.0, 0.5)
    assert [type(number) for number in (layer.cost, *layer.kept_norm)] == [float] * 3
    # Numbers of 32 bits would not hold the sum of two such layers.
    other = LayerBudget("other", np.int32(2**31 - 1), kept_norm=(1.0, 0.5))  # type: ignore[arg-type]  # numpy's
    assert removed_fraction([layer, other], {"conv": 2}) == 0.25


@st.composite
def choices(draw: st.DrawFn) -> tuple[list[LayerBudget], dict[str, list[float]], list[Shuffle]]:
    """Up to four layers, their losses, and shuffles between some of them."""
    layers, losses = [], {}
    for place in range(draw(st.integers(1, 4))):
        more = draw(st.lists(st.floats(0, 1), min_size=1, max_size=3))
        layers.append(LayerBudget(str(place), draw(st.integers(1, 50)), kept_norm=[1.0] * (1 + len(more))))
        losses[str(place)] = np.cumsum([0.0, *more]).tolist()
    sides = st.lists(st.sampled_from(list(losses)), min_size=1, max_size=4).map(tuple)
    return layers, losses, draw(st.lists(st.builds(Shuffle, st.floats(0, 20), sides, st.integers(0, 1)), max_size=3))


def all_levels(losses: Mapping[str, Sequence[float]]) -> list[dict[str, int]]:
    by_layer = (range(1, len(values) + 1) for values in losses.values())
    return [dict(zip(losses, levels, strict=True)) for levels in itertools.product(*by_layer)]


@given(choices(), st.floats(0, 0.95))
def test_levels_by_loss_are_the_best_of_all_that_meet_the_target(
    drawn: tuple[list[LayerBudget], dict[str, list[float]], list[Shuffle]], share: float
) -> None:
    layers, losses, shuffles = drawn
    target = share * removed_fraction(layers, cheapest_levels(layers, shuffles), shuffles)
    found = levels_by_loss(layers, losses, target, shuffles)

    def loss(levels: Mapping[str, int]) -> float:
        return float(sum(losses[name][level - 1] for name, level in levels.items()))

    # The solver's tolerance may cost a thousandth of the whole.
    enough = [each for each in all_levels(losses) if removed_fraction(layers, each, shuffles) >= target + 1.1e-3]
    assert removed_fraction(layers, found, shuffles) >= target
    assert not enough or loss(found) <= min(map(loss, enough)) * (1 + 1e-4) + 1e-9


@given(choices())
def test_the_cheapest_levels_remove_most(
    drawn: tuple[list[LayerBudget], dict[str, list[float]], list[Shuffle]],
) -> None:
    layers, losses, shuffles = drawn
    most = max(removed_fraction(layers, each, shuffles) for each in all_levels(losses))
    assert removed_fraction(layers, cheapest_levels(layers, shuffles), shuffles) >= most - 1e-6
    assert most >= 0


def test_a_layer_stays_whole_where_its_shuffle_costs_more_than_its_groups_save() -> None:
    layers = [LayerBudget(name, cost, kept_norm=(1.0, 0.5)) for name, cost in (("a", 100), ("b", 10))]
    losses = {"a": [0.0, 1.0], "b": [0.0, 0.1]}
    assert levels_by_loss(layers, losses, target=0.5) == {"a": 2, "b": 2}
    found = levels_by_loss(layers, losses, target=0.4, shuffles=[Shuffle(8, ("a", "b"))])
    assert found == {"a": 2, "b": 1}


def test_copies_can_cost_more_than_groups_save() -> None:
    layers = [LayerBudget(name, 10, kept_norm=(1.0, 0.5)) for name in ("a", "b")]
    assert removed_fraction(layers, {"a": 2, "b": 2}, [Shuffle(12, ("a", "b"))]) == -0.1
