"""Strided convolutions of one position."""

import pytest
from torch import nn

from strucspars.channels.rules import skipped_positions


@pytest.mark.parametrize(
    ("layer", "steps"),
    [
        (nn.Conv2d(4, 4, 1, stride=2), (2, 2)),
        (nn.Conv2d(4, 4, 1, stride=(1, 2)), (1, 2)),
        (nn.Conv1d(4, 4, 1, stride=3, padding="valid"), (3,)),
        (nn.Conv3d(4, 4, 1, stride=2, padding=0), (2, 2, 2)),
        (nn.Conv2d(4, 4, 1), ()),
        (nn.Conv2d(4, 4, (1, 3), stride=2), ()),
        (nn.Conv2d(4, 4, 1, stride=2, padding=(0, 1)), ()),
        (nn.Conv2d(4, 4, 1, stride=2, padding=1, padding_mode="circular"), ()),
        (nn.Linear(4, 4), ()),
    ],
)
def test_positions_are_skipped_by_strided_convolutions_of_one_position_without_padding(
    layer: nn.Module, steps: tuple[int, ...]
) -> None:
    assert skipped_positions(layer) == steps
