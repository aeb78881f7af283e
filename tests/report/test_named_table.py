"""Tables as CSV and LaTeX."""

import csv
import io
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from strucspars.paper.noise import Difference, Sample
from strucspars.report.named_table import Cell, NamedTable, Unit


def table(*cells: Cell, unit: str = "text", notes: tuple[str, ...] = ()) -> NamedTable:
    columns: dict[str, Any] = {"value": unit}
    return NamedTable(name="some", title="Some", columns=columns, rows=tuple((cell,) for cell in cells), notes=notes)


def test_every_unit_is_written_as_people_read_it() -> None:
    cells: dict[str, Cell] = {
        "text": "conv",
        "count": 1234567,
        "size": 1234567,
        "percent": 0.12345,
        "points": -0.5,
        "number": 0.89984,
    }
    written = {unit: table(cell, unit=unit).written_rows()[0][0] for unit, cell in cells.items()}
    assert written == {
        "text": "conv",
        "count": "1,234,567",
        "size": "1.23M",
        "percent": "12.35%",
        "points": "-0.50",
        "number": "0.900",
    }


def test_nothing_and_no_number_are_no_crash() -> None:
    assert table(None, float("nan"), "within noise", unit="percent").written_rows() == [
        [""],
        ["no number"],
        ["within noise"],
    ]


def test_samples_are_one_cell_to_read_and_several_to_compute_with() -> None:
    several, single = (Sample(mean=0.9145, deviation=spread, count=n) for spread, n in ((0.0017, 3), (None, 1)))
    samples = table(several, single, None, unit="percent")
    assert samples.written_rows() == [["91.45 ± 0.17%"], ["91.45%"], [""]]
    assert samples.sorting_rows() == [[0.9145], [0.9145], [None]]
    assert samples.csv().splitlines() == [
        'value,"value, deviation","value, runs"',
        "0.9145,0.0017,3",
        "0.9145,,1",
        ",,",
    ]
    assert r"91.45 $\pm$ 0.17\%" in samples.latex()


def test_differences_say_whether_they_are_noise() -> None:
    noise, more = Difference(points=-0.217, is_within_noise=True), Difference(points=1.5, is_within_noise=False)
    differences = table(noise, more, None, unit="points")
    assert differences.written_rows() == [["-0.22, noise"], ["+1.50"], [""]]
    assert differences.sorting_rows() == [[-0.217], [1.5], [None]]
    assert differences.csv().splitlines()[1:] == ["-0.217,yes", "1.5,no", ","]


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=1))
def test_csv_comes_back_as_it_was_but_for_formulas(texts: list[str]) -> None:
    read = list(csv.reader(io.StringIO(table(*texts).csv(), newline="")))
    assert [row[0] if row else "" for row in read[1:]] == [
        f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t", "\r") and text else text for text in texts
    ]


def test_csv_keeps_full_precision() -> None:
    assert table(0.1 + 0.2, unit="percent").csv().splitlines()[1] == "0.30000000000000004"


def test_latex_escapes_everything_that_means_something_there() -> None:
    text = table(r"\input{x}_$&#%~^<>|", "two\nlines", notes=("a\n\\end{document}",)).latex()
    assert r"\textbackslash{}input\{x\}\_\$\&\#\%\textasciitilde{}\textasciicircum{}" in text
    assert "two lines" in text
    assert text.splitlines()[0] == r"% a \end{document}"
    assert text.count("\\\\") == 3


def test_a_terminal_and_markdown_have_the_same_cells() -> None:
    columns: dict[str, Unit] = {"row": "text", "top-1": "percent", "paper top-1": "text"}
    both = NamedTable(name="some", title="Some", columns=columns, rows=(("a", 0.5, "51%"), ("b", None, None)))
    assert [line.split() for line in both.text().splitlines()[2:]] == [["a", "50.00%", "51%"], ["b"]]
    assert both.markdown().splitlines()[0] == "| row | top-1 | paper |"
    assert both.markdown().splitlines()[2] == "| a | 50.00% | 51% |"


def test_columns_without_a_value_can_be_left_out() -> None:
    columns: dict[str, Unit] = {"row": "text", "empty": "text", "zero": "count"}
    shown = NamedTable(name="some", title="Some", columns=columns, rows=(("a", None, 0),)).without_empty_columns()
    assert shown.columns == {"row": "text", "zero": "count"}
    assert shown.rows == (("a", 0),)
