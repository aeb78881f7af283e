"""Colours that colour-blind readers can tell apart, on light and on dark pages; and the one style of all figures."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import matplotlib
import matplotlib.style
import numpy as np
import numpy.typing as npt
from matplotlib.rcsetup import cycler

# Okabe and Ito (2008), without black, which vanishes on dark pages, and yellow, which vanishes on white ones.
BLUE = "#0072b2"
VERMILLION = "#d55e00"
GREEN = "#009e73"
PURPLE = "#cc79a7"
ORANGE = "#e69f00"
SKY = "#56b4e9"
PALETTE = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY)

# Text and axes. Pages replace this very colour by their own, so nothing else may have it.
INK = "#24292e"
# Grids and what stands back: faint on white and on black alike.
FAINT = "#8c959f"
PAPER = "#ffffff"

# From dark to light, even for those who see no red or no green.
SEQUENTIAL = "cividis"

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
    """Draw in the one style, whatever the user's own settings of matplotlib are."""
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
