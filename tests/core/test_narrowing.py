"""Fewer channels: what the choice promises, checked by brute force, and orders of those that stay."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strucspars.core.narrowing import (
    KeptChannels,
    ModuleChannels,
    most_important,
    narrower_widths,
    order_of_all,
    order_of_kept,
)
from strucspars.core.plan import GroupingPlan, LayerPlan


def is_even(kept: tuple[int, ...], groups: np.ndarray) -> bool:
    counts = np.bincount(groups[list(kept)], minlength=groups.max() + 1)
    return bool((counts == counts[0]).all())


@given(st.integers(0, 10_000), st.integers(0, 3))
def test_the_kept_channels_are_the_best_of_all_even_choices(seed: int, num_partitions: int) -> None:
    generator = np.random.default_rng(seed)
    width = int(generator.choice([4, 6, 8, 12]))
    numbers = [
        int(generator.choice([each for each in (1, 2, 3, 4) if width % each == 0])) for _ in range(num_partitions)
    ]
    partitions = [generator.permutation(width) // (width // number) for number in numbers]
    count, scores = int(generator.integers(1, width + 1)), generator.random(width)
    even = [
        sum(scores[list(kept)])
        for kept in itertools.combinations(range(width), count)
        if all(is_even(kept, groups) for groups in partitions)
    ]
    found = most_important(scores, count, partitions)
    if not even:
        assert found is None
    else:
        assert found is not None
        assert len(found) == count
        assert all(is_even(tuple(found), groups) for groups in partitions)
        assert scores[found].sum() == pytest.approx(max(even))


@given(st.integers(0, 10_000))
def test_two_partitions_never_contradict_each_other(seed: int) -> None:
    generator = np.random.default_rng(seed)
    partitions = [generator.permutation(24) // (24 // number) for number in generator.choice([2, 3, 4, 6, 8], 2)]
    step = np.lcm(*(groups.max() + 1 for groups in partitions))
    for count in range(step, 25, step):
        assert most_important(generator.random(24), count, partitions) is not None


def test_equal_scores_keep_the_first_channels_of_every_group() -> None:
    kept = most_important(np.zeros(6), 4, [np.array([0, 1, 0, 1, 0, 1])])
    assert kept is not None
    assert kept.tolist() == [0, 1, 2, 3]


@given(st.integers(0, 10_000), st.sampled_from([1, 2, 4]))
def test_an_order_of_kept_channels_can_be_completed(seed: int, groups: int) -> None:
    generator = np.random.default_rng(seed)
    per_group, width = int(generator.integers(1, 4)), 12
    kept = np.sort(generator.permutation(width)[: min(per_group, 12 // groups) * groups])
    perm = generator.permutation(len(kept))
    complete = order_of_all(perm, kept, width, groups)
    assert sorted(complete) == list(range(width))
    assert order_of_kept(complete, kept, groups).tolist() == perm.tolist()


def test_widths_suit_the_groups_and_the_multiple() -> None:
    assert narrower_widths(64, [4], multiple=8) == [64, 56, 48, 40, 32, 24, 16, 8]
    assert narrower_widths(5, multiple=8) == [5]
    assert narrower_widths(8, [3], multiple=4) == [8]


@pytest.mark.parametrize("kept", [(), (2, 1), (1, 1), (-1, 0), (0, 4), (0.5,)])
def test_kept_channels_ascend_inside_the_class(kept: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="kept channels must"):
        KeptChannels(4, kept)


def narrow_plan(*kept: int) -> GroupingPlan:
    layer = LayerPlan(group_level=2, out_perm=np.arange(4), in_perm=np.arange(4)[::-1], weight_shape=(4, 4, 1, 1))
    sides = {"conv": ModuleChannels(outputs=("conv",)), "norm": ModuleChannels(outputs=("conv",))}
    return GroupingPlan({"conv": layer}, kept_channels={"conv": KeptChannels(4, kept)}, narrowed=sides)


def test_a_plan_with_kept_channels_survives_json() -> None:
    plan = narrow_plan(1, 2)
    assert GroupingPlan.from_json(plan.to_json()) == plan != narrow_plan(0, 3)
    assert plan.narrowed_layer("conv").weight_shape == (2, 4, 1, 1)
    assert "2 of 4 channels stay" in repr(plan)


def test_a_plan_without_them_is_a_file_for_earlier_versions() -> None:
    assert "kept" not in GroupingPlan({}).to_json().replace("min_kept_norm", "")


def test_groups_of_a_plan_that_lose_unequally_are_refused() -> None:
    with pytest.raises(ValueError, match=r"layer 'conv': its groups must keep the same number .* \[2, 1\]"):
        narrow_plan(0, 1, 2)


def test_classes_of_a_plan_have_the_widths_of_its_layers() -> None:
    layer = narrow_plan(1, 2).layers["conv"]
    with pytest.raises(ValueError, match=r"layer 'conv': its classes have \(6, 0\) channels"):
        GroupingPlan(
            {"conv": layer},
            kept_channels={"a": KeptChannels(6, (0,))},
            narrowed={"conv": ModuleChannels(outputs=("a",))},
        )
    with pytest.raises(ValueError, match="module 'norm': the plan keeps no channels of a class 'b'"):
        GroupingPlan({}, narrowed={"norm": ModuleChannels(outputs=("b",))})
