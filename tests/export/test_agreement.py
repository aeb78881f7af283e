"""What counts as the same outputs."""

import math
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from strucspars.convert.comparison import tolerance
from strucspars.export.agreement import (
    Agreement,
    ExportMismatch,
    checked_agreement,
    chosen_input_names,
    chosen_output_names,
    clear_winners,
    output_tensors,
)
from strucspars.export.example_batch import Arguments, example_batch

SCORES = torch.tensor([[1.0, 2.0, -4.0], [0.5, 0.5, 0.0]])
NAN = math.nan


class Fixed(nn.Module):
    """Puts out the same, whatever comes in."""

    def __init__(self, *outputs: torch.Tensor) -> None:
        super().__init__()
        self.outputs = outputs

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.outputs


def checked(expected: torch.Tensor | tuple[torch.Tensor, ...], *found: torch.Tensor) -> Agreement:
    batch = example_batch(torch.zeros(2, 3), dynamic_batch=False)
    model = Fixed(*(expected if isinstance(expected, tuple) else (expected,)))
    return checked_agreement(model, lambda arguments: list(found), batch, runtime="Runtime 1.0", path=Path("file.onnx"))


def test_winners_count_only_where_they_are_ahead() -> None:
    assert clear_winners(SCORES).tolist() == [True, False]
    for no_scores in (SCORES[0], SCORES[None], SCORES[:, :1], SCORES.long(), SCORES * NAN, torch.zeros(0, 3)):
        assert not clear_winners(no_scores).any()
    assert clear_winners(torch.tensor(1.0)).shape == ()


def test_a_winner_is_ahead_by_what_rounding_of_the_largest_output_explains() -> None:
    assert not clear_winners(1000 * torch.tensor([[1.0, 1.00005, 0.0]])).any()
    assert clear_winners(torch.tensor([[1000.0, 0.0], [0.05, 0.0], [0.2, 0.0]])).tolist() == [True, False, True]


def test_every_batch_size_is_compared_and_the_worst_error_is_told() -> None:
    torch.manual_seed(0)
    model, seen = nn.Linear(3, 4), []

    def run(arguments: Arguments, wrong: float = 0.0) -> list[torch.Tensor]:
        seen.append(len(arguments[0]))
        with torch.no_grad():
            right = model(*arguments)
        return [right + right.abs().max() * (5e-5 if len(right) == 2 else wrong)]

    batch = example_batch(torch.randn(2, 3), dynamic_batch=True)
    agreement = checked_agreement(model, run, batch, runtime="Runtime 1.0", path=Path("file.onnx"))
    assert seen == [2, 1]
    assert agreement.max_relative_error == pytest.approx(5e-5, rel=0.01)
    assert (agreement.num_outputs, agreement.num_winners) == (1, 3)
    with pytest.raises(ExportMismatch, match="at batch size 1: output 0 is off by"):
        checked_agreement(model, partial(run, wrong=0.1), batch, runtime="Runtime 1.0", path=Path("file.onnx"))


def test_a_network_is_compared_in_evaluation_mode_and_stays_as_it_was() -> None:
    norm = nn.BatchNorm1d(3)
    model = nn.Sequential(norm, nn.Dropout(0.5)).train()
    batch = example_batch(torch.randn(4, 3), dynamic_batch=True)
    checked_agreement(
        model,
        lambda arguments: [arguments[0] / math.sqrt(1 + 1e-5)],
        batch,
        runtime="Runtime 1.0",
        path=Path("file.onnx"),
    )
    assert model.training
    assert torch.equal(norm.get_buffer("running_mean"), torch.zeros(3))


def test_a_network_that_writes_into_its_inputs_is_compared_on_the_same_inputs() -> None:
    class Writing(nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return images.add_(1)

    batch = example_batch(torch.zeros(2, 3), dynamic_batch=True)
    agreement = checked_agreement(
        Writing(), lambda arguments: [arguments[0] + 1], batch, runtime="Runtime 1.0", path=Path("file.onnx")
    )
    assert agreement.max_relative_error == 0


def test_small_differences_agree_and_are_told() -> None:
    agreement = checked(SCORES, SCORES + 1e-5)
    assert (agreement.num_outputs, agreement.num_winners, agreement.batch_sizes) == (1, 1, (2,))
    assert 0 < agreement.max_relative_error < agreement.tolerance == 1e-4


@pytest.mark.parametrize(
    ("found", "complaint"),
    [
        ((SCORES + 0.01,), r"output 0 is off by 0\.0025 of its largest entry, 0\.0001 is allowed"),
        ((SCORES[:1],), r"output 0 has shape \(1, 3\) instead of \(2, 3\)"),
        ((SCORES, SCORES), "it puts out output 0, output 1 instead of output 0"),
        ((), "it puts out nothing instead of output 0"),
        ((SCORES * NAN,), "off by inf"),
    ],
)
def test_a_difference_is_refused_by_name(found: tuple[torch.Tensor, ...], complaint: str) -> None:
    with pytest.raises(
        ExportMismatch, match=rf"Runtime 1\.0 .* at batch size 2: .*{complaint}.*file\.onnx is not written"
    ):
        checked(SCORES, *found)


def test_another_winner_is_refused_even_within_the_tolerance() -> None:
    close = torch.tensor([[1.0, 1.00015, 0.0]])
    swapped = torch.tensor([[1.00008, 1.00007, 0.0]])
    with pytest.raises(ExportMismatch, match="another class wins in output 0"):
        checked(close, swapped)


def test_another_winner_is_refused_beside_a_row_that_is_too_close_to_call() -> None:
    with pytest.raises(ExportMismatch, match="another class wins in output 0"):
        checked(torch.tensor([[1.0, 1.00015], [1.0, 1.0]]), torch.tensor([[1.00008, 1.00007], [1.0, 1.0]]))


def test_every_output_is_compared_and_counted() -> None:
    agreement = checked((SCORES, SCORES), SCORES, SCORES + 1e-5)
    assert agreement.max_relative_error > 0
    assert agreement.num_winners == 2
    with pytest.raises(ExportMismatch, match="output 1 is off by"):
        checked((SCORES, SCORES), SCORES, SCORES + 1)


def test_double_precision_may_be_computed_in_single() -> None:
    assert checked(SCORES.double(), SCORES.double() + 1e-5).tolerance == 1e-4


def test_the_widest_tolerance_of_all_outputs_is_told() -> None:
    outputs = (SCORES, SCORES.half())
    assert checked(outputs, *outputs).tolerance == tolerance(SCORES.half())


def test_nothing_finite_is_no_agreement() -> None:
    with pytest.raises(ExportMismatch, match="no finite number"):
        checked(SCORES * NAN, SCORES * NAN)


def test_one_finite_output_is_enough_to_compare() -> None:
    outputs = (SCORES, SCORES * NAN)
    agreement = checked(outputs, *outputs)
    assert (agreement.num_outputs, agreement.max_relative_error) == (2, 0)


def test_a_runtime_that_fails_is_named() -> None:
    def failing(arguments: Arguments) -> list[torch.Tensor]:
        raise RuntimeError("shape mismatch\nin some node")

    batch = example_batch(torch.zeros(2, 3), dynamic_batch=True)
    with pytest.raises(
        ExportMismatch, match=r"Runtime 1\.0 cannot run the network at batch size 2: shape mismatch; file\.onnx"
    ):
        checked_agreement(Fixed(SCORES), failing, batch, runtime="Runtime 1.0", path=Path("file.onnx"))


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
    (values,) = example_batch(torch.zeros(2, 100), dynamic_batch=True).random_like(2)
    assert 0.5 < values.std() < 1.5


def test_a_batch_of_one_is_doubled_for_tracing_alone() -> None:
    batch = example_batch((torch.ones(1, 3), torch.ones(4)), dynamic_batch=True)
    assert [tuple(tensor.shape) for tensor in batch.traceable()] == [(2, 3), (4,)]
    assert [tuple(tensor.shape) for tensor in batch.arguments] == [(1, 3), (4,)]


@pytest.mark.parametrize(
    ("example", "complaint"),
    [
        ((), "example_inputs is empty"),
        ((torch.ones(1), 3), r"example_inputs\[1\] is a int; a file takes tensors only"),
        (torch.ones(0, 3), r"example_inputs\[0\] is empty, of shape \(0, 3\)"),
        ((torch.ones(1), torch.ones(1, 0)), r"example_inputs\[1\] is empty, of shape \(1, 0\)"),
        (torch.tensor(1.0), r"has no axes, so no batch; pass dynamic_batch=False"),
    ],
)
def test_an_example_that_does_not_do_is_refused(example: Arguments, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        example_batch(example, dynamic_batch=True)


def test_names_are_those_of_the_code_or_the_given_ones() -> None:
    class Several(nn.Module):
        def forward(self, images: torch.Tensor, output: torch.Tensor, *others: torch.Tensor) -> None: ...

    assert chosen_input_names(Several(), 2, None) == ("images", "output")
    assert chosen_input_names(Several(), 3, None) == ("input_1", "input_2", "input_3")
    assert chosen_input_names(Several(), 2, ["a", "b"]) == ("a", "b")
    two = [SCORES, (SCORES,)]
    assert chosen_output_names(two, None, input_names=["images"]) == ("output", "output_1")
    assert chosen_output_names(two, None, input_names=["output_1"]) == ("network_output", "network_output_1")
    assert chosen_output_names({"a": SCORES}, None, input_names=["a"]) == ("output",)


def test_only_arguments_by_position_name_inputs() -> None:
    class Mixed(nn.Module):
        def forward(self, images: torch.Tensor, /, *others: torch.Tensor, scale: float = 1.0) -> None: ...

    assert chosen_input_names(Mixed(), 1, None) == ("images",)
    assert chosen_input_names(Mixed(), 2, None) == ("input_1", "input_2")


def test_no_numbered_output_has_the_name_of_an_input() -> None:
    names = chosen_output_names([SCORES, SCORES, SCORES], None, input_names=["output_2"])
    assert names == ("network_output", "network_output_1", "network_output_2")


def test_keys_that_do_not_name_every_output_name_none() -> None:
    one_name_twice = {"a": {"b": SCORES}, "a_b": SCORES}
    assert chosen_output_names(one_name_twice, None, input_names=["images"]) == ("output", "output_1")
    assert chosen_output_names({"": SCORES, "b": SCORES}, None, input_names=["images"]) == ("output", "output_1")


@pytest.mark.parametrize(
    ("names", "complaint"),
    [
        (["a"], "has 1 names, the network has 2"),
        (["a", "a"], "has a name twice"),
        (["a", ""], "not empty"),
        ("ab", "must be a list of texts that are not empty, got 'ab'"),
    ],
)
def test_names_that_do_not_do_are_refused(names: list[str], complaint: str) -> None:
    with pytest.raises(ValueError, match=rf"input_names .*{complaint}"):
        chosen_input_names(nn.Identity(), 2, names)
    with pytest.raises(ValueError, match=rf"output_names .*{complaint}"):
        chosen_output_names([SCORES, SCORES], names, input_names=[])


def test_an_output_cannot_have_the_name_of_an_input() -> None:
    with pytest.raises(ValueError, match="'images' names an input and an output"):
        chosen_output_names(SCORES, ["images"], input_names=["images"])


def test_outputs_that_are_no_tensors_are_refused() -> None:
    with pytest.raises(ValueError, match="puts out a NoneType"):
        output_tensors([SCORES, None])
    with pytest.raises(ValueError, match="no tensor"):
        chosen_output_names([], None, input_names=[])
