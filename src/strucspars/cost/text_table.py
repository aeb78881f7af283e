"""Plain-text tables that fit the screen, and the same as Markdown."""

from collections.abc import Sequence
from dataclasses import dataclass

GAP = "  "
UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K"))
# Shorter names cannot be told apart.
MIN_SHRUNK_WIDTH = 12


@dataclass(frozen=True)
class Column:
    """A title and the cells under it. Text is aligned to the left, and shortened where the table is too wide."""

    title: str
    cells: Sequence[str]
    is_text: bool = False


def text_table(columns: Sequence[Column], max_width: int = 120) -> str:
    """Lay out columns side by side. Empty ones are left out, long texts shortened in the middle, numbers never cut.

    >>> print(text_table([Column("layer", ["conv", "fc"], is_text=True), Column("params", ["64", "1,000"])]))
    layer  params
    -------------
    conv       64
    fc      1,000
    """
    filled = [column for column in columns if any(column.cells)]
    widths = _fitting_widths(filled, max_width)
    lines = [
        GAP.join(_cell(text, width, column.is_text) for text, width, column in zip(row, widths, filled, strict=True))
        for row in zip(*((column.title, *column.cells) for column in filled), strict=True)
    ]
    rule = "-" * (sum(widths) + len(GAP) * (len(widths) - 1))
    return "\n".join(line.rstrip() for line in (*lines[:1], rule, *lines[1:]))


def markdown_table(columns: Sequence[Column]) -> str:
    """The same columns for a page in Markdown; empty ones are left out.

    >>> print(markdown_table([Column("layer", ["conv", "fc"], is_text=True), Column("params", ["64", "1,000"])]))
    | layer | params |
    | --- | ---: |
    | conv | 64 |
    | fc | 1,000 |
    """
    filled = [column for column in columns if any(column.cells)]
    rules = ["---" if column.is_text else "---:" for column in filled]
    rows = [[column.title for column in filled], rules, *zip(*(column.cells for column in filled), strict=True)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def shortened(text: str, width: int) -> str:
    """The text in at most `width` characters: the middle is left out.

    >>> shortened("features.denseblock4.denselayer16.conv2", 22)
    'features....er16.conv2'
    """
    if len(text) <= width:
        return text
    kept = max(width - 3, 0)
    return f"{text[: kept // 2]}...{text[len(text) - (kept - kept // 2) :]}"


def _fitting_widths(columns: Sequence[Column], max_width: int) -> list[int]:
    """Widths of the columns; the widest text is shortened, character by character."""
    widths = [max(map(len, (column.title, *column.cells))) for column in columns]
    excess = sum(widths) + len(GAP) * (len(widths) - 1) - max_width
    texts = [place for place, column in enumerate(columns) if column.is_text]
    for _ in range(excess):
        widest = max(texts, key=widths.__getitem__, default=None)
        if widest is None or widths[widest] <= MIN_SHRUNK_WIDTH:
            break
        widths[widest] -= 1
    return widths


def _cell(text: str, width: int, is_text: bool) -> str:
    return shortened(text, width).ljust(width) if is_text else text.rjust(width)


def short_count(count: float) -> str:
    """Three digits and a unit: 640, 98.5K, 4.09G."""
    for size, unit in UNITS:
        # What rounds up to the next unit is written in it.
        if abs(count) >= 0.9995 * size:
            return f"{count / size:.3g}{unit}"
    return f"{count:.3g}"


def percent(fraction: float | None) -> str:
    """A fraction in percent with two digits after the point; empty for None."""
    return "" if fraction is None else f"{fraction:.2%}"


def duration(seconds: float) -> str:
    """A time in the units that matter.

    >>> duration(0.42), duration(75), duration(3 * 3600 + 120)
    ('0.4 s', '1 min 15 s', '3 h 2 min')
    """
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
