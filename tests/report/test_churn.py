"""Churn of the channel orders."""

from dataclasses import replace

import numpy as np
import pytest
from fabricated_run import Fabrication, small_recipe, write_fabricated_run
from matplotlib.collections import QuadMesh

from strucspars.core.checks import FloatArray
from strucspars.report.drawing import NamedFigure
from strucspars.report.dynamics import churn_figure
from strucspars.report.reading import RunData, read_run

SHAPES = {"conv1": (8, 4, 1, 1), "conv2": (8, 8, 3, 3)}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunData:
    path = tmp_path_factory.mktemp("runs") / "run"
    write_fabricated_run(path, Fabrication(weight_shapes=SHAPES, recipe=small_recipe()))
    return read_run(path)


def with_churn(run: RunData, mean: list[float], layers: FloatArray) -> RunData:
    """The run with the mean of every epoch, and layers `(layers, epochs)` stored from the first."""
    rows = [{"stage": "sparsify", "epoch": epoch, "mean_churn": each} for epoch, each in enumerate(mean, start=1)]
    return replace(run, rows=rows, dynamics=[replace(run.dynamics[0], churn=churn) for churn in layers.T])


def drawn(run: RunData) -> NamedFigure:
    figure = churn_figure(run)
    assert figure is not None
    return figure


def mesh_of(figure: NamedFigure) -> QuadMesh:
    mesh = figure.figure.axes[1].collections[0]
    assert isinstance(mesh, QuadMesh)
    return mesh


def test_churn_is_that_of_the_first_stage(run: RunData) -> None:
    figure = drawn(run)
    line = np.asarray(figure.figure.axes[0].lines[0].get_xydata())
    np.testing.assert_allclose(line, [[1, 0.1], [2, 0.1], [3, 0.1], [4, 0.1]])
    by_layer = np.asarray(mesh_of(figure).get_array())
    np.testing.assert_array_equal(by_layer, np.stack([layers.churn for layers in run.dynamics], axis=1))


def test_without_stored_layers_the_mean_is_left(run: RunData) -> None:
    assert len(drawn(replace(run, dynamics=())).figure.axes) == 1


def test_without_a_first_stage_there_is_no_figure(run: RunData) -> None:
    assert churn_figure(replace(run, rows=[row for row in run.rows if row["stage"] != "sparsify"])) is None


def test_the_alt_text_compares_the_beginning_with_the_end(run: RunData) -> None:
    alt = drawn(with_churn(run, [0.4, 0.2, 0.1, 0.05], np.array([[0.1, 0.0], [0.2, 0.3]]))).alt
    assert "40.00% in the first quarter, 5.00% in the last, 40.00% at most" in alt
    assert "1 of 2 layers did not change" in alt


def test_the_drawn_churn_is_the_data_with_the_first_layer_at_the_top(run: RunData) -> None:
    by_layer = np.array([[0.1, 0.0], [0.2, 0.3], [0.4, 0.5]])
    figure = drawn(with_churn(run, [0.4, 0.1], by_layer))
    above, below, *_ = figure.figure.axes
    assert np.asarray(above.lines[0].get_xydata()).tolist() == [[1, 0.4], [2, 0.1]]
    assert above.yaxis.get_major_formatter()(0.25, None) == "25%"
    np.testing.assert_array_equal(np.asarray(mesh_of(figure).get_array()), by_layer)
    corners = np.asarray(mesh_of(figure).get_coordinates())
    assert (corners[0, :, 0].tolist(), corners[:, 0, 1].tolist()) == ([0.5, 1.5, 2.5], [0.5, 1.5, 2.5, 3.5])
    assert below.yaxis_inverted()


def test_churn_of_zero_can_be_drawn(run: RunData) -> None:
    assert drawn(with_churn(run, [0.0] * 4, np.zeros((2, 4)))).png()
