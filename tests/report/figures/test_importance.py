"""Importance matrices of layers, permuted and not."""

import io
from dataclasses import replace

import numpy as np
import pytest
from fabricated_run import Fabrication, small_recipe, write_fabricated_run
from PIL import Image

from strucspars.core.criterion import kept_norm_by_level
from strucspars.report.figures.importance import (
    boundaries,
    chosen_layers,
    importance_figure,
    layer_pictures,
    level_pictures,
)
from strucspars.report.layer_importance import layer_importances
from strucspars.report.run_reading import RunData, read_run

SHAPES = {"a.conv1": (64, 32, 1, 1), "a.conv2": (32, 64, 3, 3), "odd": (9, 15, 1, 1), "wide": (256, 512, 1, 1)}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunData:
    path = tmp_path_factory.mktemp("runs") / "run"
    recipe = small_recipe(seed=2)
    write_fabricated_run(path, Fabrication(weight_shapes=SHAPES, recipe=recipe))
    return read_run(path)


def pixels(png: bytes) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    return np.asarray(Image.open(io.BytesIO(png)))


def test_permuted_matrices_have_the_plans_orders(run: RunData) -> None:
    assert run.plan is not None
    for layer, (name, planned) in zip(layer_importances(run), run.plan.layers.items(), strict=True):
        stored = run.importance["end"][name].astype(np.float64)
        assert layer.before is not None
        assert layer.permuted is not None
        np.testing.assert_array_equal(layer.before, stored)
        np.testing.assert_array_equal(layer.permuted, stored[planned.out_perm][:, planned.in_perm])
        assert layer.kept_norm == tuple(kept_norm_by_level(layer.permuted).tolist())
        assert layer.kept_at_level == layer.kept_norm[planned.group_level - 1]


def test_pixels_inside_the_groups_are_lighter_than_those_outside(run: RunData) -> None:
    pictures = [layer for layer in layer_pictures(run) if layer.num_groups > 1]
    assert pictures
    for layer in pictures:
        assert layer.permuted is not None
        image = pixels(layer.permuted.png).astype(float)
        groups = layer.num_groups
        inside = np.equal.outer(
            np.arange(image.shape[0]) * groups // image.shape[0], np.arange(image.shape[1]) * groups // image.shape[1]
        )
        assert image[inside].mean() > 4 * image[~inside].mean()


def test_pictures_are_small_and_know_the_shape_of_the_layer(run: RunData) -> None:
    wide = layer_pictures(run)[-1]
    assert wide.permuted is not None
    assert (wide.permuted.rows, wide.permuted.columns) == (256, 512)
    assert (wide.permuted.height, wide.permuted.width) == (128, 128)
    assert all(
        len(image.png) < 14_000
        for layer in layer_pictures(run)
        for image in (layer.start, layer.before, layer.permuted)
        if image is not None
    )


def test_boundaries_divide_a_side_equally() -> None:
    assert boundaries(1) == ()
    assert boundaries(4) == (0.25, 0.5, 0.75)
    assert boundaries(128) == ()


def test_without_matrices_kept_norms_come_from_the_last_epoch(run: RunData) -> None:
    bare = replace(run, importance={})
    for place, layer in enumerate(layer_pictures(bare)):
        assert layer.before is None
        assert layer.permuted is None
        kept = run.dynamics[-1].kept_norm[place]
        assert layer.kept_norm == tuple(kept[np.isfinite(kept)].tolist())


def test_a_run_in_its_first_stage_shows_its_present_matrices(run: RunData) -> None:
    present = replace(run, plan=None, importance={"start": run.importance["start"], "now": run.importance["end"]})
    layers = list(layer_importances(present))
    assert [layer.group_level for layer in layers] == run.dynamics[-1].group_level.tolist()
    assert all(layer.permuted is not None and layer.start is not None for layer in layers)


def test_levels_are_pictures_of_the_penalty_and_of_the_mask(run: RunData) -> None:
    levels = level_pictures(layer_pictures(run), decay=0.5)
    # The widest layer has 256 channels in common: levels 1 to 9, halvings 0 to 8.
    assert list(levels.penalty) == list(range(9))
    assert list(levels.mask) == list(range(1, 10))
    np.testing.assert_array_equal(pixels(levels.mask[2].png), [[31, 0], [0, 31]])
    np.testing.assert_array_equal(
        pixels(levels.penalty[2].png), [[0, 16, 31, 31], [16, 0, 31, 31], [31, 31, 0, 16], [31, 31, 16, 0]]
    )
    assert pixels(levels.penalty[0].png).tolist() == [[0]]


def test_the_penalty_of_a_layer_has_one_halving_more_than_its_groups_need(run: RunData) -> None:
    for layer in layer_pictures(run):
        assert layer.halvings == min(layer.group_level, layer.largest_level - 1)


def test_chosen_layers_are_grouped_and_spread_over_the_network(run: RunData) -> None:
    grouped = [layer.name for layer in layer_importances(run) if layer.group_level > 1]
    chosen = [layer.name for layer in chosen_layers(run, count=2)]
    assert len(chosen) == min(2, len(grouped))
    assert set(chosen) <= set(grouped)
    assert chosen_layers(replace(run, importance={})) == ()


def test_the_figure_of_a_layer_shows_what_the_groups_keep(run: RunData) -> None:
    layer = chosen_layers(run)[0]
    figure = importance_figure(layer, decay=0.5)
    assert layer.permuted is not None
    images = [axis.images[0].get_array() for axis in figure.figure.axes if axis.images]
    assert len(images) == 6
    kept, original = np.asarray(images[2]), np.asarray(images[3])
    assert kept.sum() == pytest.approx(original.sum())
    share = kept.sum() / np.asarray(images[1]).sum()
    assert share == pytest.approx(layer.kept_at_level)
    assert f"level {layer.group_level}" in figure.alt


def test_a_layer_without_matrix_has_no_figure(run: RunData) -> None:
    layer = next(iter(layer_importances(replace(run, importance={}))))
    with pytest.raises(ValueError, match="was not stored"):
        importance_figure(layer, decay=0.5)
