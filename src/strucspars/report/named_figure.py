"""A figure with everything that a page needs to show it; drawn twice, it is the same to the last byte."""

import html
import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from strucspars.report.colours import INK, house_style

FILE_NAME = re.compile(r"[a-z0-9][a-z0-9-]*")
_ID = re.compile(r' id="([^"]*)"')
_REFERENCE = re.compile(r'(url\(#|href="#)([^")]*)')


@dataclass(frozen=True, eq=False, kw_only=True)
class NamedFigure:
    """A drawn figure.

    Attributes:
        name: for file names: lower-case letters, digits and `-`.
        title: one line.
        caption: what is plotted, and how to read it.
        alt: what is to be seen, in numbers, for whoever cannot see it.
        figure: of matplotlib.

    >>> NamedFigure(name="empty", title="Nothing", caption="", alt="nothing", figure=Figure()).svg()[:5]
    '<?xml'
    """

    name: str
    title: str
    caption: str
    alt: str
    figure: Figure

    def __post_init__(self) -> None:
        if not FILE_NAME.fullmatch(self.name):
            raise ValueError(f"a figure's name is made of lower-case letters, digits and '-', got {self.name!r}")
        # Laid out anew for every file, it would come out a little different each time.
        with _drawing(self.name):
            self.figure.draw_without_rendering()
            self.figure.set_layout_engine("none")

    def svg(self) -> str:
        """A whole SVG document on white, for a file; the same figure gives the same text."""
        return self._svg(transparent=False)

    def inline_svg(self) -> str:
        """The `<svg>` element for a page.

        It has no background, takes the page's text colour (`currentColor`), is as wide as its place, and has no id
        that could meet one of another figure. Screen readers get `alt`.
        """
        document = self._svg(transparent=True)
        element = _own_ids(document[document.index("<svg") :], self.name).replace(INK, "currentColor")
        opening, rest = element.split(">", 1)
        opening = re.sub(r' (width|height)="[^"]*"', "", opening)
        return f'{opening} width="100%" role="img" aria-label="{html.escape(self.alt)}">{rest}'

    def png(self) -> bytes:
        """A PNG file on white; the same figure gives the same bytes."""
        buffer = io.BytesIO()
        with _drawing(self.name):
            self.figure.savefig(buffer, format="png", metadata={"Software": None})
        return buffer.getvalue()

    def _svg(self, *, transparent: bool) -> str:
        buffer = io.StringIO()
        nothing: dict[str, Any] = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        with _drawing(self.name):
            self.figure.savefig(buffer, format="svg", transparent=transparent, metadata=nothing)
        return buffer.getvalue()


@contextmanager
def _drawing(salt: str) -> Iterator[None]:
    with house_style(), matplotlib.rc_context({"svg.hashsalt": salt}), warnings.catch_warnings():
        # A layer's name may hold any letter; one that the font lacks is drawn as a box.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def _own_ids(svg: str, prefix: str) -> str:
    """The same with the ids that nothing refers to gone, and the others under the figure's name."""
    wanted = {found for _, found in _REFERENCE.findall(svg)}
    kept = _ID.sub(lambda match: f' id="{prefix}-{match[1]}"' if match[1] in wanted else "", svg)
    return _REFERENCE.sub(lambda match: f"{match[1]}{prefix}-{match[2]}", kept)
