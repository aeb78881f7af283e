import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strucspars.core.budget import LayerBudget, removed_fraction, search_threshold

fractions = st.floats(0, 1).map(lambda value: round(value, 3))


@st.composite
def networks(draw: st.DrawFn) -> list[LayerBudget]:
    layers = [LayerBudget("rest", draw(st.integers(1, 500)), draw(st.integers(0, 500)))]
    for index in range(draw(st.integers(1, 6))):
        kept = (1.0, *sorted(draw(st.lists(fractions, max_size=4)), reverse=True))
        level = draw(st.none() | st.integers(1, len(kept)))
        option = draw(st.sampled_from(["fixed_level", "largest_level"]))
        params, macs = draw(st.integers(0, 5000)), draw(st.integers(0, 5000))
        layers.append(LayerBudget(f"conv{index}", params, macs, kept, **{option: level}))
    return layers


def removed_at(layers: list[LayerBudget], threshold: float) -> float:
    return removed_fraction(layers, {layer.name: layer.level_at(threshold) for layer in layers})


@given(networks(), st.floats(0, 0.99))
def test_the_threshold_is_the_largest_that_meets_the_target(layers: list[LayerBudget], target: float) -> None:
    reachable = removed_at(layers, 0.0)
    if reachable < target:
        with pytest.raises(ValueError, match=f"with every layer at its largest level {reachable:.4f} of all params"):
            search_threshold(layers, target)
        return
    found = search_threshold(layers, target)
    assert found.removed_fraction >= target
    assert found.removed_fraction == removed_at(layers, found.min_kept_norm)
    for higher in np.linspace(found.min_kept_norm, 1, 50):
        assert higher == found.min_kept_norm or removed_at(layers, higher) < target


@given(networks(), fractions)
def test_fixed_and_largest_levels_are_respected(layers: list[LayerBudget], threshold: float) -> None:
    for layer in layers:
        level = layer.level_at(threshold)
        if layer.fixed_level is not None:
            assert level == layer.fixed_level
        if layer.largest_level is not None:
            assert level <= layer.largest_level


def test_the_whole_network_is_the_denominator() -> None:
    layers = [LayerBudget("conv", 600, kept_norm=(1.0, 0.95)), LayerBudget("bn", 200), LayerBudget("fc", 200)]
    assert search_threshold(layers, 0.3).removed_fraction == pytest.approx(0.3)
    with pytest.raises(ValueError, match=r"0\.3000 of all params would be removed"):
        search_threshold(layers, 0.31)


def test_macs_are_counted_by_their_own_numbers() -> None:
    layers = [
        LayerBudget("early", params=100, macs=9000, kept_norm=(1.0, 0.5)),
        LayerBudget("late", params=900, macs=1000, kept_norm=(1.0, 0.9)),
    ]
    by_params = search_threshold(layers, 0.45, "params")
    by_macs = search_threshold(layers, 0.45, "macs")
    assert by_params.group_levels == {"early": 1, "late": 2}
    assert by_macs.group_levels == {"early": 2, "late": 2}
    assert by_macs.removed_fraction == 0.5


def test_target_zero_groups_only_what_loses_nothing() -> None:
    layers = [LayerBudget("a", 10, kept_norm=(1.0, 1.0)), LayerBudget("b", 10, kept_norm=(1.0, 0.999))]
    assert search_threshold(layers, 0.0).group_levels == {"a": 2, "b": 1}


@pytest.mark.parametrize("target", [-0.1, 1.0, 35, float("nan")])
def test_a_bad_target_is_named(target: float) -> None:
    with pytest.raises(ValueError, match=r"target is the removed fraction of all params and must lie in \[0, 1\)"):
        search_threshold([LayerBudget("conv", 10)], target)


def test_bad_layers_are_named() -> None:
    with pytest.raises(ValueError, match="layer names must differ, got 'a' more than once"):
        search_threshold([LayerBudget("a", 1), LayerBudget("b", 1), LayerBudget("a", 1)], 0.0)
    with pytest.raises(ValueError, match="layers have no macs at all"):
        search_threshold([LayerBudget("a", 1)], 0.0, "macs")
    with pytest.raises(ValueError, match="layers have no params at all"):
        search_threshold([], 0.0)
    with pytest.raises(ValueError, match="budget must be 'params' or 'macs', got 'flops'"):
        search_threshold([LayerBudget("a", 1)], 0.0, "flops")  # type: ignore[arg-type]  # the bad value is the point
    with pytest.raises(ValueError, match="layer 'a': params and macs must not be negative"):
        LayerBudget("a", -1)
    with pytest.raises(ValueError, match=r"layer 'a': fixed_level must lie in 1\.\.2 \(at most 2 groups\), got 3"):
        LayerBudget("a", 1, kept_norm=(1.0, 0.9), fixed_level=3)
    with pytest.raises(ValueError, match=r"layer 'a': largest_level must lie in 1\.\.1"):
        LayerBudget("a", 1, largest_level=0)


@pytest.mark.parametrize("kept", [(), (0.9,), (1.0, 0.5, 0.6), (1.0, -0.1), (1.0, float("nan"))])
def test_bad_kept_norms_are_named(kept: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match=r"layer 'a': kept_norm must start at 1.0 and never rise"):
        LayerBudget("a", 1, kept_norm=kept)
