"""What exports start from: example inputs, names, and libraries that keep quiet."""

import logging

import pytest
import torch
from torch import nn

from strucspars.export.program import (
    Arguments,
    choose_input_names,
    choose_output_names,
    example_batch,
    first_line,
    output_tensors,
    without_chatter,
)

SCORES = torch.tensor([[1.0, 2.0, -4.0], [0.5, 0.5, 0.0]])


def test_inputs_without_axes_are_no_batch() -> None:
    assert example_batch((torch.ones(2, 3), torch.tensor(1.0)), dynamic_batch=True).is_batched == (True, False)
    assert example_batch((torch.tensor(1.0),), dynamic_batch=False).sizes == (1,)


def test_another_batch_size_is_tried_than_that_of_the_example_and_of_tracing() -> None:
    assert example_batch((torch.ones(1, 3),), dynamic_batch=True).sizes == (1, 3)
    assert example_batch((torch.ones(2, 3),), dynamic_batch=True).sizes == (2, 1)


def test_an_example_that_was_computed_takes_no_gradients_along() -> None:
    computed = torch.ones(2, 3, requires_grad=True) * 2
    assert not any(tensor.requires_grad for tensor in example_batch((computed,), dynamic_batch=True).arguments)


def test_random_inputs_are_like_the_example_and_the_same_every_time() -> None:
    example = (torch.rand(4, 50) + 3, torch.tensor([[7], [9], [9], [8]]), torch.randn(5, 2).half(), torch.zeros(4) > 0)
    batch = example_batch(example, dynamic_batch=True)
    assert batch.is_batched == (True, True, False, True)
    assert batch.sizes == (4, 1)
    values, places, fixed, truths = batch.random_like(6)
    assert 2.5 < values.mean() < 4.5
    assert values.std() < 1
    assert set(places.flatten().tolist()) <= {7, 8, 9}
    assert [tuple(each.shape) for each in (values, places, fixed, truths)] == [(6, 50), (6, 1), (5, 2), (6,)]
    assert [each.dtype for each in (fixed, truths)] == [torch.float16, torch.bool]
    torch.testing.assert_close(batch.random_like(6), (values, places, fixed, truths), rtol=0, atol=0)


def test_a_constant_example_is_not_repeated() -> None:
    (values,) = example_batch((torch.zeros(2, 100),), dynamic_batch=True).random_like(2)
    assert 0.5 < values.std() < 1.5


@pytest.mark.parametrize(
    ("example", "complaint"),
    [
        ((), "example_inputs is empty"),
        ((torch.ones(1), 3), r"example_inputs\[1\] is a int, but must be a tensor of at least one sample"),
        ((torch.ones(0, 3),), r"example_inputs\[0\] is of shape \(0, 3\), but must be"),
        ((torch.ones(1), torch.ones(1, 0)), r"example_inputs\[1\] is of shape \(1, 0\), but must be"),
        ((torch.tensor(1.0),), r"has no axes and therefore no batch; pass dynamic_batch=False"),
    ],
)
def test_an_example_that_does_not_do_is_refused(example: Arguments, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        example_batch(example, dynamic_batch=True)


def test_names_are_those_of_the_code_or_the_given_ones() -> None:
    class Several(nn.Module):
        def forward(self, images: torch.Tensor, output: torch.Tensor, *others: torch.Tensor) -> None: ...

    assert choose_input_names(Several(), 2, None) == ("images", "output")
    assert choose_input_names(Several(), 3, None) == ("input_1", "input_2", "input_3")
    assert choose_input_names(Several(), 2, ["a", "b"]) == ("a", "b")
    two = [SCORES, (SCORES,)]
    assert choose_output_names(two, None, input_names=["images"]) == ("output", "output_1")
    assert choose_output_names(two, None, input_names=["output_1"]) == ("network_output", "network_output_1")
    assert choose_output_names({"a": SCORES}, None, input_names=["images"]) == ("a",)
    assert choose_output_names({"a": SCORES}, None, input_names=["a"]) == ("output",)


def test_only_arguments_by_position_name_inputs() -> None:
    class Mixed(nn.Module):
        def forward(self, images: torch.Tensor, /, *others: torch.Tensor, scale: float = 1.0) -> None: ...

    assert choose_input_names(Mixed(), 1, None) == ("images",)
    assert choose_input_names(Mixed(), 2, None) == ("input_1", "input_2")


def test_keys_that_do_not_name_every_output_name_none() -> None:
    one_name_twice = {"a": {"b": SCORES}, "a_b": SCORES}
    assert choose_output_names(one_name_twice, None, input_names=["images"]) == ("output", "output_1")
    assert choose_output_names({"": SCORES, "b": SCORES}, None, input_names=["images"]) == ("output", "output_1")


@pytest.mark.parametrize(
    ("names", "complaint"),
    [
        (["a"], "must be 2 different names"),
        (["a", "a"], "must be 2 different names"),
        (["a", ""], "not empty"),
        ("ab", "must be a list of texts that are not empty, got 'ab'"),
    ],
)
def test_names_that_do_not_do_are_refused(names: list[str], complaint: str) -> None:
    with pytest.raises(ValueError, match=rf"input_names .*{complaint}"):
        choose_input_names(nn.Identity(), 2, names)
    with pytest.raises(ValueError, match=rf"output_names .*{complaint}"):
        choose_output_names([SCORES, SCORES], names, input_names=[])


def test_an_output_cannot_have_the_name_of_an_input() -> None:
    with pytest.raises(ValueError, match="'images' names an input and an output"):
        choose_output_names(SCORES, ["images"], input_names=["images"])


def test_outputs_that_are_no_tensors_are_refused() -> None:
    with pytest.raises(ValueError, match="returns a NoneType"):
        output_tensors([SCORES, None])
    with pytest.raises(ValueError, match="no tensor"):
        choose_output_names([], None, input_names=[])


@pytest.mark.parametrize("level", [logging.NOTSET, logging.INFO])
def test_logs_are_heard_after_an_exporter_as_they_were_before(level: int) -> None:
    logging.disable(level)
    try:
        with without_chatter():
            assert logging.root.manager.disable == logging.ERROR
        assert logging.root.manager.disable == level
        with pytest.raises(KeyError), without_chatter():
            raise KeyError
        assert logging.root.manager.disable == level
    finally:
        logging.disable(logging.NOTSET)


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("\x1b[31mbad shape\x1b[0m", "bad shape"),
        ("\n  \n  bad shape.\nin a node", "bad shape"),
        ("Error:", "Error"),
        ("", "RuntimeError"),
        (" \n", "RuntimeError"),
    ],
)
def test_the_first_line_of_an_error_stands_inside_a_sentence(message: str, line: str) -> None:
    assert first_line(RuntimeError(message)) == line
