"""One layer at a time: every picture is that of its title, every number that of its layer."""

import numpy as np
import pytest

from strucspars.report.figures.importance import LayerPictures, LevelPictures
from strucspars.report.layer_view import layer_views
from strucspars.report.matrix_image import MatrixImage, matrix_image


def picture(number: int) -> MatrixImage:
    """Different for every number."""
    return matrix_image(np.eye(number + 1), brightest=1.0)


START, BEFORE, PERMUTED = picture(20), picture(21), picture(22)
LEVELS = LevelPictures(
    penalty={halvings: picture(halvings) for halvings in range(5)},
    mask={level: picture(9 + level) for level in range(1, 6)},
)


def layer(*, group_level: int = 3, largest_level: int = 5) -> LayerPictures:
    groups = 2 ** (group_level - 1)
    return LayerPictures(
        name="conv",
        weight_shape=(32, 16, 5, 3),
        group_level=group_level,
        num_groups=groups,
        largest_level=largest_level,
        halvings=min(group_level, largest_level - 1),
        kept_norm=(1.0, 0.75, 0.5, 0.25, float("nan")),
        start=START,
        before=BEFORE,
        permuted=PERMUTED,
        boundaries=tuple(place / groups for place in range(1, groups)),
        brightest=1.0,
        alt="an alt",
    )


@pytest.mark.parametrize(("group_level", "halvings"), [(3, 3), (5, 4)])
def test_every_picture_is_that_of_its_title(group_level: int, halvings: int) -> None:
    (view,) = layer_views([layer(group_level=group_level)], LEVELS, is_compressed=True)
    assert {shown.title: shown.address for shown in view.pictures} == {
        "S before training": START.data_uri,
        "S at compression": BEFORE.data_uri,
        "S' in the learned orders": PERMUTED.data_uri,
        "R_g, the penalty": LEVELS.penalty[halvings].data_uri,
        "U_g, what stays": LEVELS.mask[group_level].data_uri,
    }
    assert [bool(shown.blocks) for shown in view.pictures] == [False, False, True, False, False]


def test_the_facts_are_those_of_the_layer() -> None:
    (view,) = layer_views([layer()], LEVELS, is_compressed=True)
    assert view.groups == "4 groups"
    assert view.facts == ("32 output and 16 input channels, kernel 5 x 3. group_level 3 of at most 5: num_groups 4.")


def test_every_level_has_its_kept_norm_and_the_layers_own_is_marked() -> None:
    (view,) = layer_views([layer()], LEVELS, is_compressed=True)
    assert [(level.group_level, level.num_groups, level.text, level.width) for level in view.levels] == [
        (1, 1, "1.000", 100.0),
        (2, 2, "0.750", 75.0),
        (3, 4, "0.500", 50.0),
        (4, 8, "0.250", 25.0),
        (5, 16, "", 0.0),
    ]
    assert [level.group_level for level in view.levels if level.is_chosen] == [3]
