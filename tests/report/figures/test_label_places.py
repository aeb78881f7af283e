"""Labels beside marks."""

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Annotation

from strucspars.core.checks import FloatArray
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


def _labels(notes: list[Annotation]) -> list[Annotation]:
    """Without the lines from labels to marks, which are annotations too."""
    return [note for note in notes if note.get_text()]


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
    axis, notes = _labelled(marks)
    texts = _labels(notes)
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


def _distances(texts: list[Annotation], axis: Axes, marks: list[Mark]) -> FloatArray:
    """From labels to the middles of marks, (labels, marks), in pixels."""
    boxes, places = _boxes(texts)[:, None], axis.transData.transform([mark.place for mark in marks])
    distances: FloatArray = np.linalg.norm(
        np.maximum(boxes[..., :2] - places, places - boxes[..., 2:]).clip(min=0), axis=-1
    )
    return distances


# Networks of one size, as they are in the trade-off of CIFAR-10: ours one above the other, the paper's between them.
SAME_SIZE = [
    Mark(place=(236, 93.26), label="60%"),
    Mark(place=(236, 93.98), label="distilled"),
    Mark(place=(236, 92.80)),
    Mark(place=(236, 92.35), label="low-rate"),
    Mark(place=(236, 91.49), label="60%"),
    Mark(place=(233, 91.01), label="80%", is_labelled_above=True),
    Mark(place=(234, 93.48), label="60%", is_labelled_above=True),
    Mark(place=(131, 89.18)),
    Mark(place=(590, 95.0)),
]


@pytest.mark.parametrize("marks", [SAME_SIZE, SAME_SIZE[::-1]])
def test_labels_stand_nearest_to_their_own_marks_whatever_the_order(marks: list[Mark]) -> None:
    axis, notes = _labelled(marks)
    texts = _labels(notes)
    own = [number for number, mark in enumerate(marks) if mark.label]
    assert _distances(texts, axis, marks).argmin(axis=1).tolist() == own
    assert notes == texts


def test_a_label_that_is_not_nearest_to_its_mark_has_a_line_to_it() -> None:
    axis, notes = _labelled([*CROWD, Mark(place=(9, 95), deviation=2.0)])
    texts = _labels(notes)
    nearest = _distances(texts, axis, CROWD).argmin(axis=1)
    others = [mark.place for number, mark in enumerate(CROWD) if nearest[number] != number]
    tied = [note.xy for note in notes if note.arrow_patch is not None]
    assert others
    assert set(others) <= set(tied)
    assert len(tied) < len(CROWD)


def test_labels_do_not_move_the_axes() -> None:
    bare, _ = _labelled([Mark(place=mark.place) for mark in CROWD])
    labelled, _ = _labelled(CROWD)
    assert labelled.get_window_extent().extents == pytest.approx(bare.get_window_extent().extents)


def test_no_free_place_still_gives_a_label() -> None:
    _, texts = _labelled([Mark(place=(0, 0), label="x" * 300)])
    assert len(texts) == 1


def test_no_marks_no_labels() -> None:
    assert _labelled([])[1] == []
