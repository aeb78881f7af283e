"""The curves are those of the metrics, on one axis."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fabricated_run import Fabrication, small_recipe, write_fabricated_run
from matplotlib.axes import Axes
from matplotlib.patches import StepPatch

from strucspars.core.checks import FloatArray
from strucspars.report.drawing import BLUE, GREEN, INK, PURPLE, VERMILLION
from strucspars.report.dynamics import StageSpan, dynamics_figure, dynamics_of
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


def test_epochs_of_all_stages_stand_on_one_axis_with_the_compression_between(run: RunData) -> None:
    data = dynamics_of(run)
    assert data.stages == (
        StageSpan(stage="sparsify", first=1, last=4),
        StageSpan(stage="finetune", first=5, last=7),
    )
    assert data.epochs == 7
    assert data.compressed_after == 4
    assert (data.before_top1, data.after_top1) == (0.8, 0.58)


def test_curves_are_the_metrics_and_nothing_where_there_are_none(run: RunData) -> None:
    curves = dynamics_of(run).curves
    np.testing.assert_allclose(curves["train_loss"], [1, 2 / 3, 0.5, 0.4, 1, 2 / 3, 0.5])
    np.testing.assert_allclose(curves["test_top1"], [0.63, 0.68, 0.73, 0.78, 0.63, 0.68, 0.73])
    np.testing.assert_allclose(curves["lambda"], [1e-5, 2e-5, 3e-5, 4e-5, np.nan, np.nan, np.nan])
    np.testing.assert_allclose(curves["removed_fraction"][:4], [0.1, 0.2, 0.3, 0.4])


def test_level_shares_count_layers_and_add_up_to_one(run: RunData) -> None:
    data = dynamics_of(run)
    np.testing.assert_array_equal(data.level_epochs, [1, 2, 3, 4])
    np.testing.assert_allclose(data.level_shares.sum(axis=0), 1)
    for column, layers in enumerate(run.dynamics):
        for row, share in enumerate(data.level_shares[:, column]):
            assert share == pytest.approx((layers.group_level == row + 1).mean())


def test_levels_stand_at_the_epochs_that_were_stored(run: RunData) -> None:
    data = dynamics_of(replace(run, dynamics=run.dynamics[2:]))
    assert data.level_epochs.tolist() == [3, 4]
    assert data.level_shares.shape[1] == 2
    beyond = replace(run, rows=run.rows[:3])
    assert dynamics_of(beyond).level_epochs.tolist() == [1, 2, 3]


def test_the_target_is_that_of_the_recipes_kind(run: RunData) -> None:
    recipe = run.recipe
    on_macs = replace(recipe, sparsify=replace(recipe.sparsify, budget="macs", target=0.3))
    assert (dynamics_of(run).target, dynamics_of(run).budget) == (0.5, "params")
    assert dynamics_of(replace(run, recipe=on_macs)).budget == "MACs"
    assert dynamics_of(replace(run, recipe=replace(recipe, kind="slimming"))).target == recipe.slimming.target
    assert dynamics_of(replace(run, recipe=replace(recipe, kind="dense"))).target is None


def test_the_alt_text_has_the_numbers(run: RunData) -> None:
    alt = dynamics_figure(dynamics_of(run)).alt
    for words in ("epochs 1 to 4", "78.00% at best", "73.00% at the end", "from 80.00% to 58.00%", "4e-05", "40.00%"):
        assert words in alt
    assert "starts at 63.00%" in alt
    assert "Compression after epoch 4 takes it" in alt


def test_a_compression_before_any_training_stands_inside_the_axes(run: RunData) -> None:
    one_shot = dynamics_of(replace(run, rows=tuple(row for row in run.rows if row["stage"] != "sparsify"), dynamics=()))
    assert one_shot.compressed_after == 0
    drawn = dynamics_figure(one_shot)
    assert drawn.figure.axes[0].get_xlim()[0] < 0.5
    assert dynamics_figure(dynamics_of(run)).figure.axes[0].get_xlim()[0] == 0.5


def test_the_caption_explains_what_is_drawn_and_nothing_else(run: RunData) -> None:
    assert "lambda is the strength" in dynamics_figure(dynamics_of(run)).caption
    assert "The removed fraction is" in dynamics_figure(dynamics_of(run)).caption
    finetuned = replace(run, rows=tuple(row for row in run.rows if row["stage"] != "sparsify"), dynamics=())
    caption = dynamics_figure(dynamics_of(finetuned)).caption
    assert "The dashed line is the compression" in caption
    assert "lambda" not in caption
    assert "removed fraction" not in caption


def test_there_are_only_panels_with_something_in_them(run: RunData) -> None:
    assert len(dynamics_figure(dynamics_of(run)).figure.axes) == 5
    plain = tuple({**row, "stage": "train"} for row in run.rows if row["stage"] == "finetune")
    dense = dynamics_of(replace(run, rows=plain, dynamics=()))
    assert len(dynamics_figure(dense).figure.axes) == 2
    assert dense.compressed_after is None


def test_the_drawn_lines_are_the_data(run: RunData) -> None:
    data = dynamics_of(run)
    accuracy = dynamics_figure(data).figure.axes[1]
    lines = {str(line.get_label()): line for line in accuracy.lines}
    np.testing.assert_allclose(np.asarray(lines["test"].get_ydata(), dtype=float), data.curves["test_top1"][:4])


def test_every_panel_draws_its_own_curves_at_their_epochs(unlike: RunData) -> None:
    data = dynamics_of(unlike)
    loss, accuracy, strength, removed, _ = dynamics_figure(data).figure.axes
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
        np.testing.assert_array_equal(values, data.curves[curve])


def test_the_compression_is_marked_between_the_stages_with_its_accuracies(run: RunData) -> None:
    figure = dynamics_figure(dynamics_of(run)).figure
    for axis in figure.axes:
        assert [np.asarray(line.get_xdata()).tolist() for line in axis.lines if line.get_linestyle() == "--"] == [
            [4.5, 4.5]
        ]
    places, accuracies = drawn(figure.axes[1], INK)
    assert (places.tolist(), accuracies.tolist()) == ([4.5, 4.5], [0.8, 0.58])
    assert [text.get_text() for text in figure.axes[1].texts] == ["58.00%"]


def test_the_target_is_drawn_where_it_is_and_inside_the_panel(run: RunData) -> None:
    recipe = replace(run.recipe, sparsify=replace(run.recipe.sparsify, target=0.9))
    axis = dynamics_figure(dynamics_of(replace(run, recipe=recipe))).figure.axes[3]
    assert [np.asarray(line.get_ydata()).tolist() for line in axis.lines if line.get_linestyle() == ":"] == [[0.9, 0.9]]
    assert [text.get_text() for text in axis.texts] == ["target 90%"]
    assert axis.get_ylim()[1] > 0.9


def test_the_losses_of_all_but_the_first_steps_are_inside_the_panel(unlike: RunData) -> None:
    data = dynamics_of(unlike)
    axis = dynamics_figure(data).figure.axes[0]
    assert axis.get_ylim()[1] > data.curves["test_loss"][1]


def test_levels_are_stacked_from_the_fewest_groups_up(run: RunData) -> None:
    data = dynamics_of(run)
    axis = dynamics_figure(data).figure.axes[4]
    steps = {str(patch.get_label()): patch.get_data() for patch in axis.patches if isinstance(patch, StepPatch)}
    labels = ["1 group", "2 groups", "4 groups", "8 groups"][: len(data.level_shares)]
    assert len(labels) > 1
    assert set(steps) == set(labels)
    for place, label in enumerate(labels):
        np.testing.assert_allclose(steps[label][0], data.level_shares[: place + 1].sum(axis=0))
        np.testing.assert_array_equal(steps[label][1], [0.5, 1.5, 2.5, 3.5, 4.5])


def test_where_the_levels_of_an_epoch_are_missing_none_are_drawn(run: RunData) -> None:
    axis = dynamics_figure(dynamics_of(replace(run, dynamics=(run.dynamics[0], *run.dynamics[2:])))).figure.axes[4]
    shares, edges, _ = next(patch.get_data() for patch in axis.patches if isinstance(patch, StepPatch))
    assert edges.tolist() == [0.5, 1.5, 2.5, 3.5, 4.5]
    assert np.isnan(shares).tolist() == [False, True, False, False]


def test_one_epoch_can_be_drawn(run: RunData, tmp_path: Path) -> None:
    first = replace(run, rows=run.rows[:1], dynamics=run.dynamics[:1], plan=None)
    assert dynamics_figure(dynamics_of(first)).png()


def test_losses_of_zero_can_be_drawn(run: RunData) -> None:
    rows = tuple({**row, "train_loss": 0.0, "test_loss": 0.0} for row in run.rows)
    assert dynamics_figure(dynamics_of(replace(run, rows=rows))).png()
