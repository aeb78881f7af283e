"""A file is compared with its network, and reported on."""

import math
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from strucspars.convert.comparison import tolerance
from strucspars.export.checked import Agreement, ExportMismatch, ExportReport, check_agreement
from strucspars.export.program import Arguments, example_batch

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
    batch = example_batch((torch.zeros(2, 3),), dynamic_batch=False)
    model = Fixed(*(expected if isinstance(expected, tuple) else (expected,)))
    return check_agreement(
        model, lambda: lambda arguments: list(found), batch, runtime="Runtime 1.0", path=Path("file.onnx")
    )


def test_every_batch_size_is_compared_and_the_worst_error_is_told() -> None:
    torch.manual_seed(0)
    model, seen = nn.Linear(3, 4), []

    def run(arguments: Arguments, wrong: float = 0.0) -> list[torch.Tensor]:
        seen.append(len(arguments[0]))
        with torch.no_grad():
            right = model(*arguments)
        return [right + right.abs().max() * (5e-5 if len(right) == 2 else wrong)]

    batch = example_batch((torch.randn(2, 3),), dynamic_batch=True)
    agreement = check_agreement(model, lambda: run, batch, runtime="Runtime 1.0", path=Path("file.onnx"))
    assert seen == [2, 1]
    assert agreement.max_relative_error == pytest.approx(5e-5, rel=0.01)
    assert agreement.num_outputs == 1
    with pytest.raises(ExportMismatch, match="at batch size 1: output 0 is off by"):
        check_agreement(model, lambda: partial(run, wrong=0.1), batch, runtime="Runtime 1.0", path=Path("file.onnx"))


def test_a_network_is_compared_in_evaluation_mode_and_stays_as_it_was() -> None:
    norm = nn.BatchNorm1d(3)
    model = nn.Sequential(norm, nn.Dropout(0.5)).train()
    batch = example_batch((torch.randn(4, 3),), dynamic_batch=True)
    check_agreement(
        model,
        lambda: lambda arguments: [arguments[0] / math.sqrt(1 + 1e-5)],
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

    batch = example_batch((torch.zeros(2, 3),), dynamic_batch=True)
    agreement = check_agreement(
        Writing(), lambda: lambda arguments: [arguments[0] + 1], batch, runtime="Runtime 1.0", path=Path("file.onnx")
    )
    assert agreement.max_relative_error == 0


def test_small_differences_agree_and_are_told() -> None:
    agreement = checked(SCORES, SCORES + 1e-5)
    assert (agreement.num_outputs, agreement.batch_sizes) == (1, (2,))
    assert 0 < agreement.max_relative_error < agreement.tolerance == 1e-4


@pytest.mark.parametrize(
    ("found", "complaint"),
    [
        ((SCORES + 0.01,), r"output 0 is off by 0\.0025 of its largest entry, 0\.0001 is allowed"),
        ((SCORES[:1],), r"output 0 has shape \(1, 3\) instead of \(2, 3\)"),
        ((SCORES, SCORES), "it returns output 0, output 1 instead of output 0"),
        ((), "it returns nothing instead of output 0"),
        ((SCORES * NAN,), "off by inf"),
    ],
)
def test_a_difference_is_refused_by_name(found: tuple[torch.Tensor, ...], complaint: str) -> None:
    with pytest.raises(
        ExportMismatch, match=rf"Runtime 1\.0 .* at batch size 2: .*{complaint}.*file\.onnx is not written"
    ):
        checked(SCORES, *found)


def test_every_output_is_compared_and_counted() -> None:
    agreement = checked((SCORES, SCORES), SCORES, SCORES + 1e-5)
    assert agreement.max_relative_error > 0
    assert agreement.num_outputs == 2
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

    batch = example_batch((torch.zeros(2, 3),), dynamic_batch=True)
    with pytest.raises(
        ExportMismatch, match=r"Runtime 1\.0 cannot run the network at batch size 2: shape mismatch; file\.onnx"
    ):
        check_agreement(Fixed(SCORES), lambda: failing, batch, runtime="Runtime 1.0", path=Path("file.onnx"))


def test_a_report_says_none_where_there_are_no_gathers() -> None:
    report = ExportReport(
        path=Path("folder/a_long_name.onnx"),
        format="onnx",
        runtime="Runtime 1.0",
        nbytes=10,
        num_gathers=0,
        gathered_bytes=0,
        agreement=Agreement(batch_sizes=(2,), max_relative_error=0.0, tolerance=1e-4, num_outputs=1),
    )
    assert str(report).splitlines() == [
        "a_long_name.onnx  10 bytes",
        "gathers           none",
        "checked in        Runtime 1.0, batch size 2",
        "off by            0.0e+00 of the largest output; 1e-04 is allowed",
    ]
