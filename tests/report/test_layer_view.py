"""One layer at a time: every picture is that of its title, every number that of its layer."""

import numpy as np
import pytest

from strucspars.core.hierarchy import group_penalty
from strucspars.report.layer_view import LayerView, layer_view, matrix_address
from strucspars.report.layers import LayerImportance, brightest

START, BEFORE, PERMUTED = (np.random.default_rng(seed).random((32, 16)) for seed in range(3))


def view(*, group_level: int = 3, largest_level: int = 5) -> LayerView:
    layer = LayerImportance(
        place=0,
        name="conv",
        weight_shape=(32, 16, 5, 3),
        group_level=group_level,
        largest_level=largest_level,
        kept_norm=(1.0, 0.75, 0.5, 0.25),
        out_perm=np.arange(32),
        in_perm=np.arange(16),
        start=START,
        before=BEFORE,
        permuted=PERMUTED,
    )
    return layer_view(layer, "at compression", decay=0.5)


@pytest.mark.parametrize(("group_level", "halvings"), [(3, 3), (5, 4)])
def test_every_picture_is_that_of_its_title(group_level: int, halvings: int) -> None:
    pictures = view(group_level=group_level).pictures
    light = brightest(PERMUTED)
    assert {shown.title: shown.address for shown in pictures} == {
        "S before training": matrix_address(START, brightest(START)),
        "S at compression": matrix_address(BEFORE, light),
        "S' in the learned orders": matrix_address(PERMUTED, light),
        "R_g, the penalty": matrix_address(group_penalty(halvings, decay=0.5), 1.0),
        "U_g, what stays": matrix_address(np.eye(2 ** (group_level - 1)), 1.0),
    }
    assert [bool(shown.blocks) for shown in pictures] == [False, False, True, False, False]


def test_the_facts_are_those_of_the_layer() -> None:
    assert view().groups == "4 groups"
    assert view().facts == "32 output and 16 input channels, kernel 5 x 3. group_level 3 of at most 5: num_groups 4."
