"""Labels beside the marks of a plot, where they hide neither a mark nor each other."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes

from strucspars.core.arrays import FloatArray
from strucspars.report.colours import INK

FONT_SIZE = 7.5
# Half the width of a mark, in points.
MARK_RADIUS = 4.5
# From the edge of a mark to its label, in points, the best first; mirrored for labels above.
_STEPS = np.array([(1, -0.1), (2, 0), (1, 0.1), (-1, -0.1), (-2, 0), (-1, 0.1), (0, -1), (0, 1)], dtype=float)
OFFSETS = np.concatenate([_STEPS, 5 * _STEPS, 12 * _STEPS])
# Kept free around a label, in points.
PADDING = 1.5


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A mark that labels stay clear of.

    Attributes:
        place: its x and y.
        deviation: half the height of its error bar.
        label: text to write beside it; empty for none.
        is_labelled_above: whether above and to the left is the first place to try, else below and to the right.
        colour: of the label.
    """

    place: tuple[float, float]
    deviation: float = 0.0
    label: str = ""
    is_labelled_above: bool = False
    colour: str = INK


def write_labels(axis: Axes, marks: Sequence[Mark]) -> None:
    """Write every label at the nearest free place, else at that where it hides least.

    Places are those of the figure's layout, so all else must be there, and `draw_without_rendering` have been called.
    """
    taken = _boxes_of_marks(axis, marks)
    for mark in marks:
        if mark.label:
            taken = np.vstack([taken, _write(axis, mark, taken)])


def overlaps(box: FloatArray, others: FloatArray) -> FloatArray:
    """Areas that boxes (left, bottom, right, top) have in common with others, broadcast against each other.

    >>> overlaps(np.array([0.0, 0.0, 2.0, 2.0]), np.array([[1.0, 1.0, 3.0, 3.0], [2.0, 0.0, 3.0, 1.0]]))
    array([1., 0.])
    """
    widths = np.minimum(box[..., 2], others[..., 2]) - np.maximum(box[..., 0], others[..., 0])
    heights = np.minimum(box[..., 3], others[..., 3]) - np.maximum(box[..., 1], others[..., 1])
    areas: FloatArray = widths.clip(min=0) * heights.clip(min=0)
    return areas


def _boxes_of_marks(axis: Axes, marks: Sequence[Mark]) -> FloatArray:
    places = np.array([mark.place for mark in marks], dtype=float).reshape(-1, 2)
    bars = np.array([(0.0, mark.deviation) for mark in marks]).reshape(-1, 2)
    radius = MARK_RADIUS * _pixels_per_point(axis)
    low, high = axis.transData.transform(places - bars), axis.transData.transform(places + bars)
    return np.hstack([low - radius, high + radius])


def _write(axis: Axes, mark: Mark, taken: FloatArray) -> FloatArray:
    """Write one label; returns its box."""
    text = axis.annotate(
        mark.label,
        mark.place,
        xytext=(0, 0),
        textcoords="offset points",
        va="center",
        fontsize=FONT_SIZE,
        color=mark.colour,
    )
    # The layout is settled: a label must not move what the places were computed from.
    text.set_in_layout(False)
    extent, frame = text.get_window_extent(), axis.get_window_extent()
    scale = _pixels_per_point(axis)
    size = np.array([extent.width, extent.height]) + 2 * PADDING * scale
    offsets = -OFFSETS if mark.is_labelled_above else OFFSETS
    centres = offsets * scale + np.sign(offsets) * (size / 2 + MARK_RADIUS * scale)
    middles = axis.transData.transform(mark.place) + centres
    boxes = np.hstack([middles - size / 2, middles + size / 2])
    outside = size.prod() - overlaps(boxes, np.array(frame.extents))
    hidden = overlaps(boxes[:, None], taken).sum(axis=1) + outside
    best = int(hidden.round(6).argmin())
    text.set_horizontalalignment("center")
    text.set_position(tuple(centres[best] / scale))
    box: FloatArray = boxes[best]
    return box


def _pixels_per_point(axis: Axes) -> float:
    return float(axis.figure.dpi) / 72
