"""Groups of every layer, in network order."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from fabricated_run import Fabrication, small_recipe, write_fabricated_run
from matplotlib.collections import LineCollection

from strucspars.core.plan import GroupingPlan, LayerPlan
from strucspars.report.drawing import PALETTE, NamedFigure
from strucspars.report.layers import cardinality_figure, layers_of
from strucspars.report.reading import RunData, read_run

SHAPES = {"first": (8, 4, 3, 3), "odd": (9, 8, 1, 1), "fc": (16, 16)}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunData:
    path = tmp_path_factory.mktemp("runs") / "run"
    write_fabricated_run(path, Fabrication(weight_shapes=SHAPES, recipe=small_recipe()))
    return read_run(path)


def planned(run: RunData, layers: Mapping[str, tuple[int, tuple[int, ...]]]) -> RunData:
    """The run with a plan of other layers: group level and weight shape by name."""
    plan = {
        name: LayerPlan(
            group_level=level, out_perm=np.arange(shape[0]), in_perm=np.arange(shape[1]), weight_shape=shape
        )
        for name, (level, shape) in layers.items()
    }
    return replace(
        run,
        plan=GroupingPlan(plan),
        weight_shapes={name: shape for name, (_, shape) in layers.items()},
        dynamics=(),
        importance={},
    )


def drawn(run: RunData) -> NamedFigure:
    return cardinality_figure(run, layers_of(run))


def heights(figure: NamedFigure, marker: str) -> list[float]:
    """What the marks of a kind stand at, layer by layer."""
    lines = [line for line in figure.figure.axes[0].lines if line.get_marker() == marker]
    return [height for _, height in sorted(tuple(point) for line in lines for point in np.asarray(line.get_xydata()))]


def test_groups_are_those_of_the_plan_in_its_order(run: RunData) -> None:
    figure = drawn(run)
    assert run.plan is not None
    assert [label.get_text() for label in figure.figure.axes[0].get_xticklabels()] == ["first", "odd", "fc"]
    assert heights(figure, "o") == [layer.num_groups for layer in run.plan.layers.values()]
    assert heights(figure, "_") == [4, 1, 16]
    assert "after compression" in figure.caption


def test_before_there_is_a_plan_groups_are_those_of_the_last_epoch(run: RunData) -> None:
    figure = drawn(replace(run, plan=None))
    assert heights(figure, "o") == [2 ** (level - 1) for level in run.dynamics[-1].group_level]
    assert "after the last epoch" in figure.caption


def test_a_minimum_width_of_groups_lowers_what_is_possible(run: RunData) -> None:
    sparsify = replace(run.recipe.sparsify, min_channels_per_group=4)
    assert heights(drawn(replace(run, recipe=replace(run.recipe, sparsify=sparsify))), "_") == [1, 1, 4]


def test_without_plan_and_dynamics_there_are_no_layers(run: RunData) -> None:
    assert layers_of(replace(run, plan=None, dynamics=())) == ()


def test_the_alt_text_counts_the_layers_of_every_cardinality(run: RunData) -> None:
    levels = {"a": 1, "b": 3, "c": 3, "d": 2}
    assert drawn(planned(run, {name: (level, (4, 4)) for name, level in levels.items()})).alt == (
        "3 of 4 layers have more than one group after compression: 1 with 2, 2 with 4. Dense, all have one."
    )


def test_every_layer_has_its_mark_its_bar_its_name_and_the_colour_of_its_kernel(run: RunData) -> None:
    layers = {"a": (2, (16, 16, 3, 3)), "b": (3, (32, 32, 1, 1)), "c": (4, (64, 64, 3, 3))}
    figure = drawn(planned(run, layers))
    (axis,) = figure.figure.axes
    marks = {
        line.get_color(): np.asarray(line.get_xydata()).tolist() for line in axis.lines if line.get_marker() == "o"
    }
    # Kernels are sorted: 1x1 has the first colour.
    assert marks == {PALETTE[0]: [[2, 4]], PALETTE[1]: [[1, 2], [3, 8]]}
    lines = [each for each in axis.collections if isinstance(each, LineCollection)]
    bars = [np.asarray(segment[1]).tolist() for each in lines for segment in each.get_segments()]
    assert sorted(bars) == [[1, 2], [2, 4], [3, 8]]
    assert heights(figure, "_") == [16, 32, 64]
    names = {label.get_text(): place for label, place in zip(axis.get_xticklabels(), axis.get_xticks(), strict=True)}
    assert names == {"a": 1, "b": 2, "c": 3}


def test_many_layers_with_strange_names_can_be_drawn(run: RunData) -> None:
    for count in (70, 5):
        layers = {f"$\\bad{{{place}}} <i>\x00": (1, (3, 3, 3, 3)) for place in range(count)}
        assert "\x00" not in drawn(planned(run, layers)).svg()
