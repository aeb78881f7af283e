"""A table of plain values, written for CSV, LaTeX, a terminal and Markdown; pages write it by a template."""

import csv
import io
import math
import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import compress
from typing import Literal

from strucspars.cost.text_table import Column, markdown_table, short_count, text_table
from strucspars.paper.noise import Difference, Sample

PlainCell = str | int | float | None
Cell = PlainCell | Sample | Difference
Unit = Literal["text", "count", "size", "percent", "points", "number"]

NOTE_WIDTH = 120
_LATEX = str.maketrans(
    {letter: f"\\{letter}" for letter in "{}$&#%_"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$"}
    | {"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}"}
)
_FORMATS = {"text": "{}", "count": "{:,.0f}", "percent": "{:.2%}", "points": "{:+.2f}", "number": "{:.3f}"}
# Spreadsheets read a text that begins with one of these as a formula.
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")


def written(cell: Cell, unit: Unit) -> str:
    """A cell as people read it; empty for None. A text in a column of numbers is written unchanged."""
    if isinstance(cell, Sample):
        mean = written(cell.mean, unit)
        if cell.deviation is None or unit == "size":
            return mean
        # One percent sign for both saves width; a deviation has no sign.
        return f"{mean.removesuffix('%')} ± {written(cell.deviation, unit).lstrip('+')}"
    if isinstance(cell, Difference):
        return f"{cell.points:+.2f}{', noise' if cell.is_within_noise else ''}"
    if cell is None or isinstance(cell, str):
        return cell or ""
    if not math.isfinite(cell):
        return "no number"
    return short_count(cell) if unit == "size" else _FORMATS[unit].format(cell)


@dataclass(frozen=True, kw_only=True)
class NamedTable:
    """A table; cells are None where there is no value.

    Attributes:
        name: for file names: lower-case letters, digits and `-`.
        columns: units by title: `text`; `count` 1,234; `size`, a count in three digits, 1.23K; `percent` of a fraction,
            12.34%; `points`, a difference in percent points, +0.12; `number`, three digits after the point.
    """

    name: str
    title: str
    columns: Mapping[str, Unit]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()

    def without_empty_columns(self) -> "NamedTable":
        """The same table without columns that have no value in any row."""
        is_filled = [any(row[place] is not None for row in self.rows) for place in range(len(self.columns))]
        return replace(
            self,
            columns=dict(compress(self.columns.items(), is_filled)),
            rows=tuple(tuple(compress(row, is_filled)) for row in self.rows),
        )

    def written_rows(self) -> list[list[str]]:
        """The cells as people read them."""
        return [[written(*each) for each in zip(row, self.columns.values(), strict=True)] for row in self.rows]

    def sorting_rows(self) -> list[list[PlainCell]]:
        """The values to sort the rows by."""
        return [[next(iter(_parts(cell).values())) for cell in row] for row in self.rows]

    def text(self, max_width: int = 120) -> str:
        """The table for a terminal, with its notes below."""
        notes = (textwrap.fill(note, NOTE_WIDTH) for note in self.notes)
        return "\n".join((text_table(self._text_columns(), max_width), *notes))

    def markdown(self) -> str:
        """The table for a page in Markdown, without its notes."""
        return markdown_table(self._text_columns())

    def csv(self) -> str:
        """Plain values under their headings, by RFC 4180; fractions stay fractions, deviations get own columns."""
        columns = [[_parts(row[place]) for row in self.rows] for place in range(len(self.columns))]
        # An empty cell has fewer parts than the others of its column.
        parts = [max(cells, key=len, default={"": None}) for cells in columns]
        buffer = io.StringIO()
        writer = csv.writer(buffer)
        headed = zip(self.columns, parts, strict=True)
        writer.writerow([_harmless(f"{title}{part}") for title, known in headed for part in known])
        for row in self.rows:
            cells = zip(map(_parts, row), parts, strict=True)
            writer.writerow([_harmless(values.get(part)) for values, known in cells for part in known])
        return buffer.getvalue()

    def latex(self) -> str:
        """A `tabular` with the rules of booktabs, everything in it escaped."""
        alignment = "".join("l" if unit == "text" else "r" for unit in self.columns.values())
        heading, *lines = [
            " & ".join(" ".join(cell.split()).translate(_LATEX) for cell in row) + r" \\"
            for row in (self.columns, *self.written_rows())
        ]
        notes = [f"% {' '.join(note.split())}" for note in self.notes]
        begin, end = f"\\begin{{tabular}}{{{alignment}}}", "\\end{tabular}"
        return "\n".join([*notes, begin, "\\toprule", heading, "\\midrule", *lines, "\\bottomrule", end]) + "\n"

    def _text_columns(self) -> list[Column]:
        # In a narrow table, a column says to which it belongs by being beside it.
        titles = [re.sub(".* to paper$", "to paper", re.sub("^paper .*", "paper", title)) for title in self.columns]
        cells = list(zip(*self.written_rows(), strict=True)) or [() for _ in titles]
        return [
            Column(title, texts, is_text=unit == "text")
            for title, unit, texts in zip(titles, self.columns.values(), cells, strict=True)
        ]


def _parts(cell: Cell) -> Mapping[str, PlainCell]:
    """The cell as plain values by what they add to the heading; rows are sorted by the first."""
    if isinstance(cell, Sample):
        return {"": cell.mean, ", deviation": cell.deviation, ", runs": cell.count}
    if isinstance(cell, Difference):
        return {", points": cell.points, ", within noise": "yes" if cell.is_within_noise else "no"}
    return {"": cell}


def _harmless(cell: PlainCell) -> PlainCell:
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(_FORMULA_STARTS) else cell
