"""Churn of the channel orders."""

from dataclasses import replace

import numpy as np
import pytest
from fabricated_run import Fabrication, small_recipe, write_fabricated_run
from matplotlib.collections import QuadMesh

from strucspars.core.checks import FloatArray
from strucspars.report.dynamics import Churn, churn_figure, churn_of
from strucspars.report.reading import RunData, read_run

SHAPES = {"conv1": (8, 4, 1, 1), "conv2": (8, 8, 3, 3)}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunData:
    path = tmp_path_factory.mktemp("runs") / "run"
    write_fabricated_run(path, Fabrication(weight_shapes=SHAPES, recipe=small_recipe()))
    return read_run(path)


def test_churn_is_that_of_the_first_stage(run: RunData) -> None:
    data = churn_of(run)
    assert data.epochs.tolist() == [1, 2, 3, 4]
    np.testing.assert_allclose(data.mean, 0.1)
    assert data.by_layer.shape == (2, 4)
    for column, layers in enumerate(run.dynamics):
        np.testing.assert_array_equal(data.by_layer[:, column], layers.churn)


def test_without_stored_layers_the_mean_is_left(run: RunData) -> None:
    data = churn_of(replace(run, dynamics=()))
    assert len(data.epochs) == 4
    assert data.by_layer.size == 0
    assert len(churn_figure(data).figure.axes) == 1


def test_the_alt_text_compares_the_beginning_with_the_end() -> None:
    data = Churn(
        epochs=np.arange(1.0, 5.0),
        mean=np.array([0.4, 0.2, 0.1, 0.05]),
        layer_epochs=np.arange(1.0, 3.0),
        by_layer=np.array([[0.1, 0.0], [0.2, 0.3]]),
    )
    alt = churn_figure(data).alt
    assert "40.00% in the first quarter, 5.00% in the last, 40.00% at most" in alt
    assert "1 of 2 layers did not change" in alt


def test_churn_of_layers_stands_at_the_epochs_that_were_stored(run: RunData) -> None:
    assert churn_of(replace(run, dynamics=run.dynamics[2:])).layer_epochs.tolist() == [3, 4]


def test_the_drawn_churn_is_the_data_with_the_first_layer_at_the_top() -> None:
    data = Churn(
        epochs=np.arange(1.0, 5.0),
        mean=np.array([0.4, 0.1, 0.2, 0.05]),
        layer_epochs=np.array([2.0, 3.0]),
        by_layer=np.array([[0.1, 0.0], [0.2, 0.3], [0.4, 0.5]]),
    )
    above, below, *_ = churn_figure(data).figure.axes
    assert np.asarray(above.lines[0].get_xydata()).tolist() == np.column_stack([data.epochs, data.mean]).tolist()
    assert above.yaxis.get_major_formatter()(0.25, None) == "25%"
    mesh = below.collections[0]
    assert isinstance(mesh, QuadMesh)
    np.testing.assert_array_equal(np.asarray(mesh.get_array()), data.by_layer)
    corners = np.asarray(mesh.get_coordinates())
    assert (corners[0, :, 0].tolist(), corners[:, 0, 1].tolist()) == ([1.5, 2.5, 3.5], [0.5, 1.5, 2.5, 3.5])
    assert below.yaxis_inverted()


def test_where_the_layers_of_an_epoch_are_missing_none_are_drawn(run: RunData) -> None:
    data = churn_of(replace(run, dynamics=(run.dynamics[0], run.dynamics[3])))
    mesh = churn_figure(data).figure.axes[1].collections[0]
    assert isinstance(mesh, QuadMesh)
    columns: FloatArray = np.ma.filled(np.ma.asarray(mesh.get_array()), np.nan)
    np.testing.assert_array_equal(columns[:, [0, 3]], data.by_layer)
    assert np.isnan(columns[:, 1:3]).all()


def test_churn_of_zero_can_be_drawn(run: RunData) -> None:
    still = replace(churn_of(run), by_layer=np.zeros((2, 4)), mean=np.zeros(4))
    assert churn_figure(still).png()
