"""Groups of every layer, in network order."""

from dataclasses import replace

import numpy as np
import pytest
from fabricated_run import Fabrication, small_recipe, write_fabricated_run
from matplotlib.collections import LineCollection

from strucspars.report.cardinality import Cardinality, cardinality_figure, cardinality_of
from strucspars.report.drawing import PALETTE
from strucspars.report.reading import RunData, read_run

SHAPES = {"first": (8, 4, 3, 3), "odd": (9, 8, 1, 1), "fc": (16, 16)}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunData:
    path = tmp_path_factory.mktemp("runs") / "run"
    write_fabricated_run(path, Fabrication(weight_shapes=SHAPES, recipe=small_recipe()))
    return read_run(path)


def test_groups_are_those_of_the_plan_in_its_order(run: RunData) -> None:
    data = cardinality_of(run)
    assert run.plan is not None
    assert data.names == ("first", "odd", "fc")
    assert data.kernels == ("3x3", "1x1", "1x1")
    assert data.groups.tolist() == [layer.num_groups for layer in run.plan.layers.values()]
    assert data.largest.tolist() == [4, 1, 16]
    assert data.is_planned


def test_before_there_is_a_plan_groups_are_those_of_the_last_epoch(run: RunData) -> None:
    data = cardinality_of(replace(run, plan=None))
    assert data.groups.tolist() == [2 ** (level - 1) for level in run.dynamics[-1].group_level]
    assert not data.is_planned


def test_a_minimum_width_of_groups_lowers_what_is_possible(run: RunData) -> None:
    sparsify = replace(run.recipe.sparsify, min_channels_per_group=4)
    assert cardinality_of(replace(run, recipe=replace(run.recipe, sparsify=sparsify))).largest.tolist() == [1, 1, 4]


def test_without_plan_and_dynamics_there_are_no_layers(run: RunData) -> None:
    assert cardinality_of(replace(run, plan=None, dynamics=())).names == ()


def test_the_alt_text_counts_the_layers_of_every_cardinality() -> None:
    data = Cardinality(
        names=("a", "b", "c", "d"),
        kernels=("1x1", "3x3", "1x1", "3x3"),
        groups=np.array([1, 4, 4, 2]),
        largest=np.array([4, 4, 4, 4]),
        is_planned=True,
    )
    assert cardinality_figure(data).alt == (
        "3 of 4 layers have more than one group after compression: 1 with 2, 2 with 4. Dense, all have one."
    )


def test_every_layer_has_its_mark_its_bar_its_name_and_the_colour_of_its_kernel() -> None:
    data = Cardinality(
        names=("a", "b", "c"),
        kernels=("3x3", "1x1", "3x3"),
        groups=np.array([2, 4, 8]),
        largest=np.array([16, 32, 64]),
        is_planned=True,
    )
    (axis,) = cardinality_figure(data).figure.axes
    marks = {
        line.get_color(): np.asarray(line.get_xydata()).tolist() for line in axis.lines if line.get_marker() == "o"
    }
    # Kernels are sorted: 1x1 has the first colour.
    assert marks == {PALETTE[0]: [[2, 4]], PALETTE[1]: [[1, 2], [3, 8]]}
    lines = [each for each in axis.collections if isinstance(each, LineCollection)]
    bars = [np.asarray(segment[1]).tolist() for each in lines for segment in each.get_segments()]
    assert sorted(bars) == [[1, 2], [2, 4], [3, 8]]
    (largest,) = (np.asarray(line.get_xydata()).tolist() for line in axis.lines if line.get_marker() == "_")
    assert largest == [[1, 16], [2, 32], [3, 64]]
    names = {label.get_text(): place for label, place in zip(axis.get_xticklabels(), axis.get_xticks(), strict=True)}
    assert names == {"a": 1, "b": 2, "c": 3}


def test_many_layers_with_strange_names_can_be_drawn() -> None:
    data = Cardinality(
        names=tuple(f"$\\bad{{{place}}} <i>\x00" for place in range(70)),
        kernels=("3x3",) * 70,
        groups=np.ones(70, dtype=np.int64),
        largest=np.ones(70, dtype=np.int64),
        is_planned=False,
    )
    assert cardinality_figure(data).svg()
    few = replace(
        data, names=data.names[:5], kernels=data.kernels[:5], groups=data.groups[:5], largest=data.largest[:5]
    )
    assert "\x00" not in cardinality_figure(few).svg()
