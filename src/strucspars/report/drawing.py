"""A figure with everything that a page needs to show it; drawn twice, it is the same to the last byte."""

import html
import io
import re
import unicodedata
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import matplotlib
import matplotlib.style
import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure
from matplotlib.rcsetup import cycler

from strucspars.cost.text_table import shortened
from strucspars.report.named_table import NamedTable

# Okabe and Ito (2008) without black, invisible on dark pages, and yellow, invisible on white ones.
BLUE = "#0072b2"
VERMILLION = "#d55e00"
GREEN = "#009e73"
PURPLE = "#cc79a7"
ORANGE = "#e69f00"
SKY = "#56b4e9"
PALETTE = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY)

# Text and axes. Pages replace this colour by their own, so nothing else may have it.
INK = "#24292e"
# Grids and background marks: faint on white and on black.
FAINT = "#8c959f"
PAPER = "#ffffff"

# From dark to light, also with colour blindness.
SEQUENTIAL = "cividis"

LONGEST_SLUG = 60

STYLE: Mapping[str, Any] = MappingProxyType(
    {
        "axes.edgecolor": FAINT,
        "axes.labelcolor": INK,
        "axes.titlecolor": INK,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": "medium",
        "axes.titlelocation": "left",
        "axes.prop_cycle": cycler(color=PALETTE),
        "figure.facecolor": PAPER,
        "font.size": 9.5,
        "font.family": ["sans-serif"],
        "font.sans-serif": ["DejaVu Sans", "Verdana"],
        "grid.color": FAINT,
        "grid.alpha": 0.25,
        "grid.linewidth": 0.6,
        "image.cmap": SEQUENTIAL,
        "image.interpolation": "nearest",
        "legend.frameon": False,
        "legend.fontsize": "small",
        "lines.linewidth": 1.6,
        "text.color": INK,
        # A `$` in the name of a layer is no formula.
        "text.parse_math": False,
        "xtick.color": INK,
        "ytick.color": INK,
        "savefig.dpi": 160,
        # Text as text: small, searchable, and in the reader's font.
        "svg.fonttype": "none",
    }
)


@contextmanager
def house_style() -> Iterator[None]:
    """Draw in one style, whatever the user's settings of matplotlib are."""
    with matplotlib.style.context(["default", dict(STYLE)]):
        yield


def shades(count: int) -> npt.NDArray[np.uint8]:
    """The sequential colours from lowest to highest, `(count, 3)`.

    >>> shades(2).tolist()
    [[0, 34, 78], [254, 232, 56]]
    """
    colours = matplotlib.colormaps[SEQUENTIAL](np.linspace(0.0, 1.0, count))
    rounded: npt.NDArray[np.uint8] = np.rint(255 * np.asarray(colours)[:, :3]).astype(np.uint8)
    return rounded


# The style sheet that matplotlib writes would apply to the whole page.
_STYLE_SHEET = re.compile(r"<style\b[^>]*>[^<]*</style>")
_ID = re.compile(r'(\bid="|url\(#|href="#)')


@dataclass(frozen=True, eq=False, kw_only=True)
class NamedFigure:
    """A drawn figure.

    Attributes:
        name: for file names: lower-case letters, digits and `-`.
        title: one line.
        caption: what is plotted, and how to read it.
        alt: what it shows, in numbers, for those who cannot see it.
        figure: of matplotlib.
        tables: the same in numbers.
    """

    name: str
    title: str
    caption: str
    alt: str
    figure: Figure
    tables: tuple[NamedTable, ...] = ()

    def __post_init__(self) -> None:
        # A layout of its own for every file would differ a little each time.
        with _drawing(self.name):
            self.figure.draw_without_rendering()
            self.figure.set_layout_engine("none")

    def svg(self) -> str:
        """A whole SVG document on white, for a file; the same figure gives the same text."""
        return self._svg(transparent=False)

    def inline_svg(self) -> str:
        """The `<svg>` element for a page, with the page's text colour, no background, and ids of its own."""
        document = self._svg(transparent=True)
        element = _STYLE_SHEET.sub("", document[document.index("<svg") :]).replace(INK, "currentColor")
        opening, rest = _ID.sub(rf"\1{self.name}-", element).split(">", 1)
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
        # A layer's name may hold any letter; those missing in the font are drawn as boxes.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def drawable(text: str, width: int = 40) -> str:
    """The text in one line of at most `width` characters, without characters that XML cannot hold.

    >>> drawable("layer1" + chr(27) + ".conv")
    'layer1?.conv'
    """
    plain = "".join("?" if unicodedata.category(letter)[0] == "C" else letter for letter in text)
    return shortened(plain, width)


def slug(text: str) -> str:
    """The text as part of a file name.

    >>> slug("layer1.0/Conv <b>"), slug("..")
    ('layer1-0-conv-b', 'unnamed')
    """
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:LONGEST_SLUG].strip("-") or "unnamed"
