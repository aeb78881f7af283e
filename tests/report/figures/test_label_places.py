"""Labels beside marks."""

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Annotation

from strucspars.core.arrays import FloatArray
from strucspars.report.figures.label_places import MARK_RADIUS, Mark, overlaps, write_labels


def _labelled(marks: list[Mark]) -> tuple[Axes, list[Annotation]]:
    figure = Figure(figsize=(6, 3), layout="constrained")
    axis = figure.subplots()
    for mark in marks:
        axis.errorbar(*mark.place, yerr=mark.deviation, marker="s")
    axis.margins(0.15)
    figure.draw_without_rendering()
    write_labels(axis, marks)
    figure.draw_without_rendering()
    return axis, [child for child in axis.get_children() if isinstance(child, Annotation)]


def _boxes(texts: list[Annotation]) -> FloatArray:
    return np.array([text.get_window_extent().extents for text in texts])


def _mark_boxes(axis: Axes, marks: list[Mark]) -> FloatArray:
    radius = MARK_RADIUS * axis.figure.dpi / 72
    places = axis.transData.transform([mark.place for mark in marks])
    return np.hstack([places - radius, places + radius])


CROWD = [Mark(place=(1 + 0.01 * k, 90 + 0.15 * k), label=f"label {k}", is_labelled_above=k % 2 == 1) for k in range(6)]
CORNERS = [Mark(place=place, label="a long label") for place in ((0, 0), (0, 1), (1, 0), (1, 1))]


@pytest.mark.parametrize("marks", [CROWD, CORNERS, [*CROWD, Mark(place=(9, 95), deviation=2.0)]])
def test_labels_hide_neither_marks_nor_each_other_and_stay_inside(marks: list[Mark]) -> None:
    axis, texts = _labelled(marks)
    boxes = _boxes(texts)
    between = overlaps(boxes[:, None], boxes) * (1 - np.eye(len(boxes)))
    assert len(texts) == sum(bool(mark.label) for mark in marks)
    assert not between.any()
    assert not overlaps(boxes[:, None], _mark_boxes(axis, marks)).any()
    frame = np.array(axis.get_window_extent().extents)
    assert overlaps(boxes, frame) == pytest.approx((boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1]))


def test_a_lone_label_goes_below_and_to_the_right_or_above_and_to_the_left() -> None:
    marks = [Mark(place=(0, 0), label="ours"), Mark(place=(5, 5), label="theirs", is_labelled_above=True)]
    axis, texts = _labelled(marks)
    middles = (_boxes(texts)[:, :2] + _boxes(texts)[:, 2:]) / 2
    places = axis.transData.transform([mark.place for mark in marks])
    assert np.sign(middles - places).tolist() == [[1, -1], [-1, 1]]


def test_labels_do_not_move_the_axes() -> None:
    bare, _ = _labelled([Mark(place=mark.place) for mark in CROWD])
    labelled, _ = _labelled(CROWD)
    assert labelled.get_window_extent().extents == pytest.approx(bare.get_window_extent().extents)


def test_no_free_place_still_gives_a_label() -> None:
    _, texts = _labelled([Mark(place=(0, 0), label="x" * 300)])
    assert len(texts) == 1


def test_no_marks_no_labels() -> None:
    assert _labelled([])[1] == []
