"""Labels beside the marks of a plot, where they hide neither a mark nor each other. All lengths are in points."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.text import Annotation

from strucspars.core.checks import FloatArray
from strucspars.report.drawing import INK

FONT_SIZE = 7.5
# Half the width of a mark.
MARK_RADIUS = 4.5
# Kept free around a label.
PADDING = 1.5
# By so much a label should be nearer to its own mark than to any other.
CLEARANCE = 2.0
# A label that is further from its mark, or nearer to another, has a line to it.
LONGEST_DISTANCE = 12.0
# How far from the edge of a mark there are places to try, how many along its side, and how many of all are tried.
GAPS = np.array([0.0, 2, 4, 8, 12, 18, 24, 30])
NUM_ALONGSIDE = 9
NUM_TRIED = 200
# What is bad about a place, where a point further from the mark costs 1: a square point hidden, a point nearer to
# another mark, a point away from the usual place.
HIDING_COST, CONFUSION_COST, MOVING_COST = 100.0, 4.0, 0.05
# Who chooses first has the best of it: several orders are tried, and in each all choose again, knowing the others.
NUM_ORDERS, NUM_ROUNDS = 30, 2


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A mark that labels stay clear of.

    Attributes:
        place: its x and y.
        deviation: half the height of its error bar.
        label: text to write beside it; empty for none.
        is_labelled_above: whether above and to the left is the usual place, else below and to the right.
        colour: of the label.
    """

    place: tuple[float, float]
    deviation: float = 0.0
    label: str = ""
    is_labelled_above: bool = False
    colour: str = INK


@dataclass(frozen=True, eq=False, kw_only=True)
class _Places:
    """Boxes for a label, (places, 4), and what each costs as long as there are no other labels, (places,)."""

    boxes: FloatArray
    costs: FloatArray


def write_labels(axis: Axes, marks: Sequence[Mark]) -> None:
    """Write every label close to its mark, nearer to it than to others, where it hides nothing.

    Where there is no room for that, it stands where least is wrong, and a line leads from it to its mark. Places are
    those of the figure's layout, so all else must be there, and `draw_without_rendering` have been called.
    """
    scale = 72 / float(axis.figure.dpi)
    bars, frame = _bars(axis, marks, scale), scale * np.array(axis.get_window_extent().extents)
    texts, places = {}, {}
    for number, mark in enumerate(marks):
        if mark.label:
            texts[number] = _text(axis, mark)
            size = scale * np.array(texts[number].get_window_extent().size) + 2 * PADDING
            places[number] = _places(size, number, bars, frame, is_usually_above=mark.is_labelled_above)
    for number, box in _chosen(places).items():
        middle, distances = _middles(bars[number]), np.linalg.norm(_apart(box, bars), axis=1)
        texts[number].set_position(tuple(_middles(box) - middle))
        if distances[number] > min(distances.min(), LONGEST_DISTANCE):
            _tie(axis, marks[number], np.clip(middle, box[:2], box[2:]) - middle)


def overlaps(box: FloatArray, others: FloatArray) -> FloatArray:
    """Areas that boxes (left, bottom, right, top) have in common with others, broadcast against each other.

    >>> overlaps(np.array([0.0, 0.0, 2.0, 2.0]), np.array([[1.0, 1.0, 3.0, 3.0], [2.0, 0.0, 3.0, 1.0]]))
    array([1., 0.])
    """
    widths = np.minimum(box[..., 2], others[..., 2]) - np.maximum(box[..., 0], others[..., 0])
    heights = np.minimum(box[..., 3], others[..., 3]) - np.maximum(box[..., 1], others[..., 1])
    areas: FloatArray = widths.clip(min=0) * heights.clip(min=0)
    return areas


def _apart(boxes: FloatArray, others: FloatArray) -> FloatArray:
    """How far apart boxes are from others, along x and y; broadcast against each other."""
    gaps: FloatArray = np.maximum(boxes[..., :2] - others[..., 2:], others[..., :2] - boxes[..., 2:]).clip(min=0)
    return gaps


def _middles(boxes: FloatArray) -> FloatArray:
    middles: FloatArray = (boxes[..., :2] + boxes[..., 2:]) / 2
    return middles


def _bars(axis: Axes, marks: Sequence[Mark], scale: float) -> FloatArray:
    """The error bars, (marks, 4), as boxes without width; a mark without one is a point."""
    places = np.array([mark.place for mark in marks], dtype=float).reshape(-1, 2)
    deviations = np.array([(0.0, mark.deviation) for mark in marks]).reshape(-1, 2)
    ends = (axis.transData.transform(places + side * deviations) for side in (-1, 1))
    return scale * np.hstack(list(ends))


def _text(axis: Axes, mark: Mark) -> Annotation:
    text = axis.annotate(
        mark.label,
        mark.place,
        xytext=(0, 0),
        textcoords="offset points",
        ha="center",
        va="center",
        fontsize=FONT_SIZE,
        color=mark.colour,
    )
    # The layout is settled: a label must not move what the places were computed from.
    text.set_in_layout(False)
    return text


def _tie(axis: Axes, mark: Mark, start: FloatArray) -> None:
    """Draw a line to a mark from its label; the start is given as seen from the mark."""
    line = {"arrowstyle": "-", "color": mark.colour, "linewidth": 0.6, "shrinkA": 0.0, "shrinkB": 0.0}
    tie = axis.annotate("", mark.place, xytext=tuple(start), textcoords="offset points", arrowprops=line)
    tie.set_in_layout(False)


def _places(size: FloatArray, own: int, bars: FloatArray, frame: FloatArray, *, is_usually_above: bool) -> _Places:
    """The best places for a label of that size, all around its own mark, close and further away."""
    reach, middle = size / 2 + MARK_RADIUS, _middles(bars[own])
    sides = (np.linspace(-along, along, NUM_ALONGSIDE) for along in reach)
    x, y = (np.concatenate([side[0] - GAPS[:0:-1], side, side[-1] + GAPS[1:]]) for side in sides)
    middles = middle + np.stack(np.meshgrid(x, y), axis=-1).reshape(-1, 2)
    boxes = np.hstack([middles - size / 2, middles + size / 2])
    usual = middle + reach * ((-1, 1) if is_usually_above else (1, -1))
    costs = _costs(boxes, own, bars, frame) + MOVING_COST * np.linalg.norm(middles - usual, axis=1)
    best = costs.round(6).argsort(kind="stable")[:NUM_TRIED]
    return _Places(boxes=boxes[best], costs=costs[best])


def _costs(boxes: FloatArray, own: int, bars: FloatArray, frame: FloatArray) -> FloatArray:
    """What marks and frame have against each box for the label of a mark."""
    apart = _apart(boxes[:, None], bars)
    distances = np.linalg.norm(apart, axis=-1)
    # The own mark, and any on the same spot, add the same everywhere.
    confusion = (distances[:, [own]] + CLEARANCE - distances).clip(min=0).sum(axis=1)
    marks = bars + MARK_RADIUS * np.array([-1, -1, 1, 1])
    outside = (boxes[:, 2:] - boxes[:, :2]).prod(axis=1) - overlaps(boxes, frame)
    hidden = overlaps(boxes[:, None], marks).sum(axis=1) + outside
    # Not the distance itself, by which corners would be further away than sides.
    costs: FloatArray = apart[:, own].max(axis=1) + HIDING_COST * hidden + CONFUSION_COST * confusion
    return costs


def _chosen(places: Mapping[int, _Places]) -> dict[int, FloatArray]:
    """For every label the box that costs least, the others being where they are."""
    generator = np.random.default_rng(0)
    orders = [list(places), *(generator.permutation(list(places)).tolist() for _ in range(NUM_ORDERS - 1))]
    outcomes = (_chosen_in_turn([(number, places[number]) for number in order]) for order in orders)
    return min(outcomes, key=lambda outcome: outcome[0])[1]


def _chosen_in_turn(turns: Sequence[tuple[int, _Places]]) -> tuple[float, dict[int, FloatArray]]:
    """What the choices cost together, and the boxes."""
    chosen: dict[int, FloatArray] = {}
    costs: dict[int, float] = {}
    for _ in range(NUM_ROUNDS):
        for number, places in turns:
            others = np.array([box for other, box in chosen.items() if other != number]).reshape(-1, 4)
            hidden = overlaps(places.boxes[:, None], others).sum(axis=1)
            with_others = (places.costs + HIDING_COST * hidden).round(6)
            best = int(with_others.argmin())
            chosen[number], costs[number] = places.boxes[best], float(with_others[best])
    return round(sum(costs.values()), 6), chosen
