"""Random inputs like given ones."""

import torch

from strucspars.convert.comparison import random_arguments, random_image, random_like


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


def test_numbers_are_drawn_in_their_own_precision_where_asked() -> None:
    images, halves = random_arguments((torch.zeros(2, 3), torch.zeros(4, dtype=torch.float16)), in_double=False)
    assert (images.dtype, halves.dtype) == (torch.float32, torch.float16)
    assert min(images.std(), halves.float().std()) > 0.1


def test_numbers_in_lists_and_dictionaries_are_drawn_too() -> None:
    places = torch.tensor([3, 4])
    batch, pair = random_arguments(({"images": torch.zeros(2, 3), "places": places}, [torch.zeros(4), "mode"]))
    assert batch["images"].dtype == pair[0].dtype == torch.float64
    assert min(batch["images"].std(), pair[0].std()) > 0.1
    assert batch["places"] is places
    assert pair[1] == "mode"


def test_numbers_are_drawn_around_those_of_the_example() -> None:
    example = torch.tensor([99.0, 101.0], dtype=torch.float64)
    drawn = random_like(example, (1000,), torch.Generator().manual_seed(0))
    assert drawn.dtype == example.dtype
    assert abs(drawn.mean() - 100) < 0.2
    assert 0.9 < drawn.std() < 1.1


def test_whole_numbers_are_those_of_the_example_all_of_them() -> None:
    drawn = random_like(torch.tensor([[7, 3], [5, 9]]), (100, 2), torch.Generator().manual_seed(0))
    assert drawn.shape == (100, 2)
    assert set(drawn.flatten().tolist()) == {3, 5, 7, 9}


def test_a_random_image_is_the_same_every_time_and_not_blank() -> None:
    image = random_image((3, 8, 8))
    assert torch.equal(image, random_image((3, 8, 8)))
    assert image.std() > 0.5
