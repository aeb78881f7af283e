"""The curves are those of the metrics, on one axis."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fabricated_run import Fabrication, small_recipe, write_fabricated_run
from matplotlib.axes import Axes
from matplotlib.patches import StepPatch

from strucspars.core.checks import FloatArray
from strucspars.report.drawing import BLUE, GREEN, INK, PURPLE, VERMILLION, NamedFigure
from strucspars.report.dynamics import dynamics_figure
from strucspars.report.reading import RunData, read_run

SHAPES = {"conv1": (8, 4, 1, 1), "conv2": (8, 8, 3, 3), "conv3": (8, 8, 1, 1)}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunData:
    path = tmp_path_factory.mktemp("runs") / "run"
    write_fabricated_run(path, Fabrication(weight_shapes=SHAPES, recipe=small_recipe()))
    return read_run(path)


@pytest.fixture(scope="module")
def unlike(run: RunData) -> RunData:
    """The run with curves of which no two, and no two epochs, are alike."""
    rows = [
        {**row, "train_loss": 2 / place, "test_loss": 3 / place, "train_top1": 0.1 * place, "test_top1": 0.09 * place}
        for place, row in enumerate(run.rows, start=1)
    ]
    return replace(run, rows=tuple(rows))


def drawn(axis: Axes, colour: str) -> tuple[FloatArray, FloatArray]:
    """Where the lines of a colour go through, one stage after the other."""
    lines = [line for line in axis.lines if line.get_color() == colour]
    epochs = np.concatenate([np.asarray(line.get_xdata(), dtype=float) for line in lines])
    values = np.concatenate([np.asarray(line.get_ydata(), dtype=float) for line in lines])
    return epochs, values


def figure_of(run: RunData) -> NamedFigure:
    figure = dynamics_figure(run)
    assert figure is not None
    return figure


def metric(run: RunData, name: str) -> list[float]:
    """The values of a metric in all epochs; NaN where there is none."""
    return [row.get(name, np.nan) for row in run.rows if row["stage"] != "compress"]


def without_first_stage(run: RunData) -> RunData:
    return replace(run, rows=tuple(row for row in run.rows if row["stage"] != "sparsify"), dynamics=())


def test_the_target_is_that_of_the_recipes_kind(run: RunData) -> None:
    recipe = run.recipe
    slimming = replace(recipe, kind="slimming", slimming=replace(recipe.slimming, target=0.4))
    for changed, words in (
        (recipe, "The removed fraction of params comes to 40.00%, the target is 50.00%."),
        (replace(recipe, sparsify=replace(recipe.sparsify, budget="macs", target=0.3)), "of MACs comes to 40.00%, the"),
        (slimming, "of params comes to 40.00%, the target is 40.00%."),
        (replace(recipe, kind="dense"), "of params comes to 40.00%."),
    ):
        assert words in figure_of(replace(run, recipe=changed)).alt


def test_the_alt_text_has_the_numbers(run: RunData) -> None:
    alt = figure_of(run).alt
    for words in ("epochs 1 to 4", "78.00% at best", "73.00% at the end", "from 80.00% to 58.00%", "4e-05", "40.00%"):
        assert words in alt
    assert "starts at 63.00%" in alt
    assert "Compression after epoch 4 takes it" in alt


def test_a_compression_before_any_training_is_marked_inside_the_axes(run: RunData) -> None:
    axes = figure_of(without_first_stage(run)).figure.axes
    assert [np.asarray(line.get_xdata()).tolist() for line in axes[0].lines if line.get_linestyle() == "--"] == [
        [0.5] * 2
    ]
    assert axes[0].get_xlim()[0] < 0.5
    assert figure_of(run).figure.axes[0].get_xlim()[0] == 0.5


def test_the_caption_explains_what_is_drawn_and_nothing_else(run: RunData) -> None:
    assert "lambda is the strength" in figure_of(run).caption
    assert "The removed fraction is" in figure_of(run).caption
    caption = figure_of(without_first_stage(run)).caption
    assert "The dashed line is the compression" in caption
    assert "lambda" not in caption
    assert "removed fraction" not in caption


def test_there_are_only_panels_with_something_in_them(run: RunData) -> None:
    assert len(figure_of(run).figure.axes) == 5
    plain = tuple({**row, "stage": "train"} for row in run.rows if row["stage"] == "finetune")
    dense = figure_of(replace(run, rows=plain, dynamics=()))
    assert len(dense.figure.axes) == 2
    assert not any(line.get_linestyle() == "--" for axis in dense.figure.axes for line in axis.lines)


def test_every_panel_draws_its_own_curves_at_their_epochs(unlike: RunData) -> None:
    loss, accuracy, strength, removed, _ = figure_of(unlike).figure.axes
    for axis, colour, curve in (
        (loss, BLUE, "train_loss"),
        (loss, VERMILLION, "test_loss"),
        (accuracy, BLUE, "train_top1"),
        (accuracy, VERMILLION, "test_top1"),
        (strength, GREEN, "lambda"),
        (removed, PURPLE, "removed_fraction"),
    ):
        epochs, values = drawn(axis, colour)
        assert epochs.tolist() == [1, 2, 3, 4, 5, 6, 7]
        np.testing.assert_array_equal(values, metric(unlike, curve))


def test_the_compression_is_marked_between_the_stages_with_its_accuracies(run: RunData) -> None:
    figure = figure_of(run).figure
    for axis in figure.axes:
        assert [np.asarray(line.get_xdata()).tolist() for line in axis.lines if line.get_linestyle() == "--"] == [
            [4.5, 4.5]
        ]
    places, accuracies = drawn(figure.axes[1], INK)
    assert (places.tolist(), accuracies.tolist()) == ([4.5, 4.5], [0.8, 0.58])
    assert [text.get_text() for text in figure.axes[1].texts] == ["58.00%"]


def test_the_target_is_drawn_where_it_is_and_inside_the_panel(run: RunData) -> None:
    recipe = replace(run.recipe, sparsify=replace(run.recipe.sparsify, target=0.9))
    axis = figure_of(replace(run, recipe=recipe)).figure.axes[3]
    assert [np.asarray(line.get_ydata()).tolist() for line in axis.lines if line.get_linestyle() == ":"] == [[0.9, 0.9]]
    assert [text.get_text() for text in axis.texts] == ["target 90%"]
    assert axis.get_ylim()[1] > 0.9


def test_the_losses_of_all_but_the_first_steps_are_inside_the_panel(unlike: RunData) -> None:
    assert figure_of(unlike).figure.axes[0].get_ylim()[1] > metric(unlike, "test_loss")[1]


def test_levels_are_stacked_from_the_fewest_groups_up(run: RunData) -> None:
    axis = figure_of(run).figure.axes[4]
    steps = {str(patch.get_label()): patch.get_data() for patch in axis.patches if isinstance(patch, StepPatch)}
    levels = np.stack([layers.group_level for layers in run.dynamics], axis=1)
    labels = ["1 group", "2 groups", "4 groups", "8 groups"][: levels.max()]
    assert len(labels) > 1
    assert set(steps) == set(labels)
    for level, label in enumerate(labels, start=1):
        np.testing.assert_allclose(steps[label][0], (levels <= level).sum(axis=0) / len(SHAPES))
        np.testing.assert_array_equal(steps[label][1], [0.5, 1.5, 2.5, 3.5, 4.5])
    np.testing.assert_array_equal(steps[labels[-1]][0], 1)


def test_one_epoch_can_be_drawn(run: RunData, tmp_path: Path) -> None:
    first = replace(run, rows=run.rows[:1], dynamics=run.dynamics[:1], plan=None)
    assert figure_of(first).png()


def test_losses_of_zero_can_be_drawn(run: RunData) -> None:
    rows = tuple({**row, "train_loss": 0.0, "test_loss": 0.0} for row in run.rows)
    assert figure_of(replace(run, rows=rows)).png()
