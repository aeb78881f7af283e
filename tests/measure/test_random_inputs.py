"""Random inputs like given ones."""

import torch

from strucspars.measure.random_inputs import random_arguments, random_like


def test_a_single_number_is_an_example_too() -> None:
    drawn = random_like(torch.tensor([3.0]), (100,), torch.Generator().manual_seed(0))
    assert 0.5 < drawn.std() < 1.5


def test_only_floating_point_numbers_are_drawn_and_in_double_precision() -> None:
    places, empty = torch.tensor([3, 4]), torch.zeros(0, 3)
    images, *others = random_arguments((torch.zeros(2, 3), places, empty, "mode", None))
    assert images.dtype == torch.float64
    assert images.std() > 0.1
    assert others[0] is places
    assert others[1] is empty
    assert others[2:] == ["mode", None]
