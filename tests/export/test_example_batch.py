"""Which inputs are taken for batches, and what is said of it."""

import pytest
import torch

from strucspars.cost.counting import ExampleInputs
from strucspars.export.example_batch import example_batch, random_image


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        (
            (torch.ones(1, 3), torch.ones(1)),
            "example_inputs[0] and example_inputs[1] were taken for batches, as the first axis of each has length 1; "
            "where one of them is none, give an example batch of 2 or more, or pass dynamic_batch=False",
        ),
        (
            (torch.ones(2, 3), torch.ones(2), torch.ones(3), torch.ones(2, 1)),
            "example_inputs[0], example_inputs[1] and example_inputs[3] were taken for batches, as the first axis of "
            "each has length 2; where one of them is none, give an example batch of another size, or pass "
            "dynamic_batch=False",
        ),
        ((torch.ones(2, 3), torch.ones(1)), ""),
        (torch.ones(1, 3), ""),
    ],
)
def test_it_is_said_which_inputs_were_taken_for_batches_and_why(inputs: ExampleInputs, words: str) -> None:
    assert example_batch(inputs, dynamic_batch=True).batch_words == words


def test_with_a_fixed_batch_nothing_is_said() -> None:
    assert example_batch((torch.ones(1, 3), torch.ones(1)), dynamic_batch=False).batch_words == ""


def test_inputs_without_axes_are_no_batch() -> None:
    assert example_batch((torch.ones(2, 3), torch.tensor(1.0)), dynamic_batch=True).is_batched == (True, False)
    assert example_batch(torch.tensor(1.0), dynamic_batch=False).sizes == (1,)


def test_another_batch_size_is_tried_than_that_of_the_example_and_of_tracing() -> None:
    assert example_batch(torch.ones(1, 3), dynamic_batch=True).sizes == (1, 3)
    assert example_batch(torch.ones(2, 3), dynamic_batch=True).sizes == (2, 1)


def test_an_example_that_was_computed_takes_no_gradients_along() -> None:
    computed = torch.ones(2, 3, requires_grad=True) * 2
    assert not any(tensor.requires_grad for tensor in example_batch(computed, dynamic_batch=True).arguments)


def test_a_random_image_is_the_same_every_time_and_not_blank() -> None:
    image = random_image((3, 8, 8))
    assert torch.equal(image, random_image((3, 8, 8)))
    assert image.std() > 0.5
