"""A figure with everything that a page needs to show it. Drawing it again gives the same bytes."""

import html
import io
import re
import unicodedata
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.style
import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure

from strucspars.cost.text_table import shortened
from strucspars.report.named_table import NamedTable

SHEET = Path(__file__).with_name("figures.mplstyle")
STYLE: dict[str, Any] = dict(matplotlib.rc_params_from_file(SHEET, use_default_template=False).items())
PALETTE = tuple(STYLE["axes.prop_cycle"].by_key()["color"])
BLUE, VERMILLION, GREEN, PURPLE, *_ = PALETTE
# The page replaces this colour by its own.
INK = STYLE["text.color"]
FAINT = STYLE["grid.color"]
SEQUENTIAL = STYLE["image.cmap"]
LONGEST_SLUG = 60


@contextmanager
def house_style() -> Iterator[None]:
    """Draw in one style, independent of the user's matplotlib settings."""
    with matplotlib.style.context(["default", STYLE]):
        yield


def shades(count: int) -> npt.NDArray[np.uint8]:
    """The sequential colours from lowest to highest, `(count, 3)`."""
    colours = matplotlib.colormaps[SEQUENTIAL](np.linspace(0.0, 1.0, count))
    rounded: npt.NDArray[np.uint8] = np.rint(255 * np.asarray(colours)[:, :3]).astype(np.uint8)
    return rounded


# The style sheet that matplotlib writes would apply to the whole page.
_STYLE_SHEET = re.compile(r"<style\b[^>]*>[^<]*</style>")
_ID = re.compile(r'(\bid="|url\(#|href="#)')


@dataclass(frozen=True, eq=False, kw_only=True)
class NamedFigure:
    """A drawn figure: its name for files, its caption for a page, and what it shows in words for a screen reader."""

    name: str
    title: str
    caption: str
    alt: str
    figure: Figure
    tables: tuple[NamedTable, ...] = ()

    def svg(self) -> str:
        """A whole SVG document on white, for a file; the same figure gives the same text."""
        before, opening, rest = self._parts
        return f'{before}{opening}><rect width="100%" height="100%" fill="#ffffff"/>{rest}'

    def inline_svg(self) -> str:
        """The `<svg>` element for a page, with the page's text colour, no background, and unique ids."""
        _, opening, rest = self._parts
        opening = re.sub(r' (width|height)="[^"]*"', "", opening)
        rest = _ID.sub(rf"\1{self.name}-", _STYLE_SHEET.sub("", rest)).replace(INK, "currentColor")
        return f'{opening} width="100%" role="img" aria-label="{html.escape(self.alt)}">{rest}'

    def png(self) -> bytes:
        """A PNG file on white; the same figure gives the same bytes."""
        buffer = io.BytesIO()
        with _drawing(self.name):
            self._laid_out.savefig(buffer, format="png", metadata={"Software": None})
        return buffer.getvalue()

    @cached_property
    def _laid_out(self) -> Figure:
        """The figure with a fixed layout: computed anew for every file, the layout would differ slightly."""
        with _drawing(self.name):
            self.figure.draw_without_rendering()
            self.figure.set_layout_engine("none")
        return self.figure

    @cached_property
    def _parts(self) -> tuple[str, str, str]:
        """An SVG document without background, split around `<svg` and the end of its opening tag."""
        buffer = io.StringIO()
        nothing: dict[str, Any] = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        with _drawing(self.name):
            self._laid_out.savefig(buffer, format="svg", transparent=True, metadata=nothing)
        document = buffer.getvalue()
        start = document.index("<svg")
        opening, rest = document[start:].split(">", 1)
        return document[:start], opening, rest


@contextmanager
def _drawing(salt: str) -> Iterator[None]:
    with house_style(), matplotlib.rc_context({"svg.hashsalt": salt}), warnings.catch_warnings():
        # A layer's name may hold any letter; those missing in the font are drawn as boxes.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def drawable(text: str, width: int = 40) -> str:
    """The text in one line of at most `width` characters, without characters that XML cannot hold."""
    plain = "".join("?" if unicodedata.category(letter)[0] == "C" else letter for letter in text)
    return shortened(plain, width)


def slug(text: str) -> str:
    """The text as part of a file name.

    >>> slug("layer1.0/Conv <b>"), slug("..")
    ('layer1-0-conv-b', 'unnamed')
    """
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:LONGEST_SLUG].strip("-") or "unnamed"
