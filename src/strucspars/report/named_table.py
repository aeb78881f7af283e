"""A table of plain values, written for CSV, LaTeX, a terminal and Markdown; pages write it by a template."""

import csv
import io
import math
import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from strucspars.cost.text_table import Column, markdown_table, short_count, text_table
from strucspars.paper.noise import Difference, Sample

PlainCell = str | int | float | None
Cell = PlainCell | Sample | Difference
Unit = Literal["text", "count", "size", "percent", "points", "number"]

NOTE_WIDTH = 120
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
_FORMATS = {"text": "{}", "count": "{:,.0f}", "percent": "{:.2%}", "points": "{:+.2f}", "number": "{:.3f}"}
# Spreadsheets read a text that begins with one of these as a formula.
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")


@dataclass(frozen=True, kw_only=True)
class TableColumn:
    """A column.

    Attributes:
        title: its heading.
        unit: `text` as it is; `count` 1,234; `size`, a count in three digits, 1.23K; `percent` of a fraction, 12.34%;
            `points`, a difference in percent points, +0.12; `number`, three digits after the point.
    """

    title: str
    unit: Unit = "text"

    @property
    def is_number(self) -> bool:
        """Whether it is aligned to the right and sorted by value."""
        return self.unit != "text"

    def written(self, cell: Cell) -> str:
        """A cell as people read it; empty for None. A text in a column of numbers stays as it is."""
        if isinstance(cell, Sample):
            mean = self.written(cell.mean)
            if cell.deviation is None or self.unit == "size":
                return mean
            # One percent sign for both saves width; a deviation has no sign.
            return f"{mean.removesuffix('%')} ± {self.written(cell.deviation).lstrip('+')}"
        if isinstance(cell, Difference):
            return f"{cell.points:+.2f}{', noise' if cell.is_within_noise else ''}"
        if cell is None or isinstance(cell, str):
            return cell or ""
        if not math.isfinite(cell):
            return "no number"
        return short_count(cell) if self.unit == "size" else _FORMATS[self.unit].format(cell)


@dataclass(frozen=True, kw_only=True)
class NamedTable:
    """A table.

    Attributes:
        name: for file names: lower-case letters, digits and `-`.
        rows: one cell per column; None where there is no value.
        notes: sentences below it.
    """

    name: str
    title: str
    columns: tuple[TableColumn, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()

    def without_empty_columns(self) -> "NamedTable":
        """The same table without columns that have no value in any row."""
        kept = [place for place in range(len(self.columns)) if any(row[place] is not None for row in self.rows)]
        return replace(
            self,
            columns=tuple(self.columns[place] for place in kept),
            rows=tuple(tuple(row[place] for place in kept) for row in self.rows),
        )

    def written_rows(self) -> tuple[tuple[str, ...], ...]:
        """The cells as people read them."""
        return tuple(
            tuple(column.written(cell) for column, cell in zip(self.columns, row, strict=True)) for row in self.rows
        )

    def sorting_rows(self) -> tuple[tuple[PlainCell, ...], ...]:
        """The values to sort the rows by."""
        return tuple(tuple(_parts(cell)[0] for cell in row) for row in self.rows)

    def text(self, max_width: int = 120) -> str:
        """For a terminal, the notes below."""
        notes = (textwrap.fill(note, NOTE_WIDTH) for note in self.notes)
        return "\n".join((text_table(self._text_columns(), max_width), *notes))

    def markdown(self) -> str:
        """For a page in Markdown, without the notes."""
        return markdown_table(self._text_columns())

    def csv(self) -> str:
        """Plain values under their headings, by RFC 4180; fractions stay fractions, deviations get own columns."""
        suffixes = [_part_titles([row[place] for row in self.rows]) for place in range(len(self.columns))]
        titles = [
            f"{column.title}{suffix}" for column, parts in zip(self.columns, suffixes, strict=True) for suffix in parts
        ]
        buffer = io.StringIO()
        writer = csv.writer(buffer)
        writer.writerow([_harmless(title) for title in titles])
        for row in self.rows:
            cells = [_parts(cell, len(parts)) for cell, parts in zip(row, suffixes, strict=True)]
            writer.writerow([_harmless(part) for parts in cells for part in parts])
        return buffer.getvalue()

    def latex(self) -> str:
        """A `tabular` with the rules of booktabs, everything in it escaped."""
        alignment = "".join("r" if column.is_number else "l" for column in self.columns)
        heading = _latex_line(column.title for column in self.columns)
        lines = [_latex_line(row) for row in self.written_rows()]
        notes = [f"% {' '.join(note.split())}" for note in self.notes]
        begin, end = f"\\begin{{tabular}}{{{alignment}}}", "\\end{tabular}"
        return "\n".join([*notes, begin, "\\toprule", heading, "\\midrule", *lines, "\\bottomrule", end]) + "\n"

    def _text_columns(self) -> list[Column]:
        # In a narrow table, a column says to which it belongs by standing beside it.
        titles = [re.sub("^paper .*", "paper", column.title) for column in self.columns]
        titles = [re.sub(".* to paper$", "to paper", title) for title in titles]
        cells = list(zip(*self.written_rows(), strict=True)) or [() for _ in titles]
        return [
            Column(title, texts, is_text=not column.is_number)
            for title, column, texts in zip(titles, self.columns, cells, strict=True)
        ]


def _latex_line(cells: Iterable[str]) -> str:
    return (
        " & ".join("".join(_LATEX.get(letter, letter) for letter in " ".join(cell.split())) for cell in cells) + r" \\"
    )


def _part_titles(cells: Sequence[Cell]) -> tuple[str, ...]:
    """The endings of the headings of all plain columns that a column's cells take."""
    if any(isinstance(cell, Sample) for cell in cells):
        return "", ", deviation", ", runs"
    if any(isinstance(cell, Difference) for cell in cells):
        return ", points", ", within noise"
    return ("",)


def _parts(cell: Cell, count: int = 1) -> tuple[PlainCell, ...]:
    """The cell as plain values, the first of which is sorted by; `count` of them where it is empty."""
    if isinstance(cell, Sample):
        return cell.mean, cell.deviation, cell.count
    if isinstance(cell, Difference):
        return cell.points, "yes" if cell.is_within_noise else "no"
    return (cell, *(None,) * (count - 1))


def _harmless(cell: PlainCell) -> PlainCell:
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(_FORMULA_STARTS) else cell
