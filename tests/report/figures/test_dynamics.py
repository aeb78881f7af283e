"""The curves are those of the metrics, on one axis."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fabricated_run import Fabrication, small_recipe, write_fabricated_run

from strucspars.report.figures.dynamics import StageSpan, dynamics_figure, dynamics_of
from strucspars.report.run_reading import RunData, read_run

SHAPES = {"conv1": (8, 4, 1, 1), "conv2": (8, 8, 3, 3), "conv3": (8, 8, 1, 1)}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunData:
    path = tmp_path_factory.mktemp("runs") / "run"
    write_fabricated_run(path, Fabrication(weight_shapes=SHAPES, recipe=small_recipe()))
    return read_run(path)


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


def test_the_target_is_that_of_the_recipes_kind(run: RunData) -> None:
    assert run.recipe is not None
    recipe = run.recipe
    on_macs = replace(recipe, sparsify=replace(recipe.sparsify, budget="macs", target=0.3))
    assert (dynamics_of(run).target, dynamics_of(run).budget) == (0.5, "params")
    assert dynamics_of(replace(run, recipe=on_macs)).budget == "MACs"
    assert dynamics_of(replace(run, recipe=replace(recipe, kind="slimming"))).target == recipe.slimming.target
    assert dynamics_of(replace(run, recipe=replace(recipe, kind="dense"))).target is None
    assert dynamics_of(replace(run, recipe=None)).target is None


def test_the_alt_text_has_the_numbers(run: RunData) -> None:
    alt = dynamics_figure(dynamics_of(run)).alt
    for words in ("epochs 1 to 4", "78.00% at best", "73.00% at the end", "from 80.00% to 58.00%", "4e-05", "40.00%"):
        assert words in alt


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


def test_one_epoch_can_be_drawn(run: RunData, tmp_path: Path) -> None:
    first = replace(run, rows=run.rows[:1], dynamics=run.dynamics[:1], plan=None)
    assert dynamics_figure(dynamics_of(first)).png()


def test_losses_of_zero_can_be_drawn(run: RunData) -> None:
    rows = tuple({**row, "train_loss": 0.0, "test_loss": 0.0} for row in run.rows)
    assert dynamics_figure(dynamics_of(replace(run, rows=rows))).png()
