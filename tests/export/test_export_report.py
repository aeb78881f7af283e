"""What is said of an export."""

from pathlib import Path

import pytest

from strucspars.export.agreement import Agreement
from strucspars.export.checked import ExportReport


def report(*, num_winners: int = 0) -> ExportReport:
    agreement = Agreement(
        batch_sizes=(2,), max_relative_error=0.0, tolerance=1e-4, num_outputs=1, num_winners=num_winners
    )
    return ExportReport(
        path=Path("folder/a_long_name.onnx"),
        format="onnx",
        runtime="Runtime 1.0",
        nbytes=10,
        num_gathers=0,
        gathered_bytes=0,
        agreement=agreement,
    )


def test_what_there_is_none_of_is_not_counted() -> None:
    assert str(report()).splitlines() == [
        "a_long_name.onnx  10 bytes",
        "gathers           none",
        "checked in        Runtime 1.0, batch size 2",
        "off by            0.0e+00 of the largest output; 1e-04 is allowed",
    ]


@pytest.mark.parametrize(("num_winners", "words"), [(1, "the same in 1 row"), (2, "the same in 2 rows")])
def test_winners_are_counted_in_rows(num_winners: int, words: str) -> None:
    assert str(report(num_winners=num_winners)).splitlines()[-1] == f"winners           {words}"
