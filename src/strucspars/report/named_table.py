"""A table with its cells as plain values, for CSV, LaTeX and a page."""

import csv
import io
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from strucspars.report.named_figure import FILE_NAME

Cell = str | int | float | None
Form = Literal["text", "count", "percent", "points", "number"]

_LATEX = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "%": r"\%",
    "_": r"\_",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "±": r"$\pm$",
}
# A spreadsheet takes a text that begins so for a formula.
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")


@dataclass(frozen=True, kw_only=True)
class TableColumn:
    """A column.

    Attributes:
        title: its heading.
        form: `text` as it is; `count` 1,234; `percent` of a fraction, 12.34%; `points`, a difference in percent points,
            +0.12; `number`, three digits after the point.

    >>> TableColumn(title="removed", form="percent").written(0.4059)
    '40.59%'
    """

    title: str
    form: Form = "text"

    @property
    def is_number(self) -> bool:
        """Whether it is aligned to the right and sorted by value."""
        return self.form != "text"

    def written(self, cell: Cell) -> str:
        """A cell as people read it; nothing for None. A text in a column of numbers stays as it is."""
        if cell is None or isinstance(cell, str):
            return cell or ""
        if not math.isfinite(cell):
            return "no number"
        forms = {"text": "{}", "count": "{:,.0f}", "percent": "{:.2%}", "points": "{:+.2f}", "number": "{:.3f}"}
        return forms[self.form].format(cell)


@dataclass(frozen=True, kw_only=True)
class NamedTable:
    """A table.

    Attributes:
        name: for file names: lower-case letters, digits and `-`.
        title: one line.
        columns: their headings and forms.
        rows: plain values, one per column; None where there is nothing to say.
        notes: sentences below it.

    >>> columns = (TableColumn(title="layer"), TableColumn(title="params", form="count"))
    >>> table = NamedTable(name="layers", title="Layers", columns=columns, rows=(("conv_1", 2304),))
    >>> table.csv()
    'layer,params\\r\\nconv_1,2304\\r\\n'
    >>> table.written_rows()
    (('conv_1', '2,304'),)
    """

    name: str
    title: str
    columns: tuple[TableColumn, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not FILE_NAME.fullmatch(self.name):
            raise ValueError(f"a table's name is made of lower-case letters, digits and '-', got {self.name!r}")
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"table {self.name!r}: a row of {len(row)} cells for {len(self.columns)} columns")

    def written_rows(self) -> tuple[tuple[str, ...], ...]:
        """The cells as people read them; `rows` has what to sort them by."""
        return tuple(
            tuple(column.written(cell) for column, cell in zip(self.columns, row, strict=True)) for row in self.rows
        )

    def csv(self) -> str:
        """Plain values under their headings, by RFC 4180; fractions stay fractions."""
        buffer = io.StringIO()
        writer = csv.writer(buffer)
        writer.writerow([_harmless(column.title) for column in self.columns])
        writer.writerows([[_harmless(cell) for cell in row] for row in self.rows])
        return buffer.getvalue()

    def latex(self) -> str:
        """A `tabular` with the rules of booktabs, everything in it escaped."""
        alignment = "".join("r" if column.is_number else "l" for column in self.columns)
        heading = _latex_line(column.title for column in self.columns)
        lines = [_latex_line(row) for row in self.written_rows()]
        notes = [f"% {' '.join(note.split())}" for note in self.notes]
        begin, end = f"\\begin{{tabular}}{{{alignment}}}", "\\end{tabular}"
        return "\n".join([*notes, begin, "\\toprule", heading, "\\midrule", *lines, "\\bottomrule", end]) + "\n"


def _latex_line(cells: Iterable[str]) -> str:
    return (
        " & ".join("".join(_LATEX.get(letter, letter) for letter in " ".join(cell.split())) for cell in cells) + r" \\"
    )


def _harmless(cell: Cell) -> Cell:
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(_FORMULA_STARTS) else cell
