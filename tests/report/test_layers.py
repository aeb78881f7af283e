"""Layers in pictures and numbers: importance matrices permuted and not, penalties, kept norms."""

import base64
import io
from dataclasses import replace

import numpy as np
import pytest
from fabricated_run import Fabrication, small_recipe, write_fabricated_run
from PIL import Image

from strucspars.core.checks import FloatArray
from strucspars.core.hierarchy import connection_mask, group_penalty
from strucspars.core.importance import kept_norm_by_level
from strucspars.core.plan import GroupingPlan, LayerPlan
from strucspars.report.layers import (
    Layer,
    boundaries,
    brightest,
    importance_figure,
    importance_figures,
    layers_of,
    matrix_address,
)
from strucspars.report.reading import RunData, read_run

SHAPES = {"a.conv1": (64, 32, 1, 1), "a.conv2": (32, 64, 3, 3), "odd": (9, 15, 1, 1), "wide": (256, 512, 1, 1)}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunData:
    path = tmp_path_factory.mktemp("runs") / "run"
    recipe = small_recipe(seed=2)
    write_fabricated_run(path, Fabrication(weight_shapes=SHAPES, recipe=recipe))
    return read_run(path)


Pixels = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]


def pixels(address: str) -> Pixels:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(address.partition("base64,")[2]))))


def pictures(run: RunData, name: str) -> dict[str, Pixels]:
    """The pictures of a layer by title."""
    return {picture.title: pixels(picture.address) for picture in layer_of(run, name).pictures}


def layer_of(run: RunData, name: str) -> Layer:
    return next(layer for layer in layers_of(run) if layer.name == name)


def importance_of(run: RunData, name: str) -> FloatArray:
    return run.importance["end"][name].astype(np.float64)


def test_kept_norms_are_those_of_the_matrix_in_the_plans_orders(run: RunData) -> None:
    assert run.plan is not None
    for layer, (name, planned) in zip(layers_of(run), run.plan.layers.items(), strict=True):
        permuted = importance_of(run, name)[planned.out_perm][:, planned.in_perm]
        np.testing.assert_array_equal(layer.permuted(importance_of(run, name)), permuted)
        assert layer.kept_norm == tuple(kept_norm_by_level(permuted).tolist())
        assert layer.kept_at_level == layer.kept_norm[planned.group_level - 1]


def test_pixels_inside_the_groups_are_lighter_than_those_outside(run: RunData) -> None:
    grouped = [layer for layer in layers_of(run) if layer.num_groups > 1]
    assert grouped
    for layer in grouped:
        image, groups = pictures(run, layer.name)["S' in the learned orders"].astype(float), layer.num_groups
        inside = np.equal.outer(
            np.arange(image.shape[0]) * groups // image.shape[0], np.arange(image.shape[1]) * groups // image.shape[1]
        )
        assert image[inside].mean() > 4 * image[~inside].mean()


def test_pictures_are_small_and_have_frames_in_the_shape_of_the_layer(run: RunData) -> None:
    layers = layers_of(run)
    assert layers[-1].frame == (100, 50)
    (permuted,) = (picture for picture in layers[-1].pictures if picture.title.startswith("S'"))
    assert pixels(permuted.address).shape == (128, 128)
    assert max(len(picture.address) for layer in layers for picture in layer.pictures) < 20_000


@pytest.mark.parametrize(("group_level", "halvings"), [(3, 3), (5, 4)])
def test_every_picture_is_that_of_its_title(run: RunData, group_level: int, halvings: int) -> None:
    random = np.random.default_rng(0)
    start, before = (random.random((32, 16)).astype(np.float32) for _ in range(2))
    plan = LayerPlan(
        group_level=group_level,
        out_perm=random.permutation(32),
        in_perm=random.permutation(16),
        weight_shape=(32, 16, 5, 3),
    )
    told = replace(
        run,
        plan=GroupingPlan({"conv": plan}),
        weight_shapes={"conv": plan.weight_shape},
        importance={"start": {"conv": start}, "end": {"conv": before}},
        recipe=replace(run.recipe, sparsify=replace(run.recipe.sparsify, decay=0.5)),
    )
    (layer,) = layers_of(told)
    permuted = before[plan.out_perm][:, plan.in_perm].astype(np.float64)
    light = brightest(permuted)
    assert {shown.title: shown.address for shown in layer.pictures} == {
        "S before training": matrix_address(start.astype(np.float64), brightest(start.astype(np.float64))),
        "S at compression": matrix_address(before.astype(np.float64), light),
        "S' in the learned orders": matrix_address(permuted, light),
        "R_g, the penalty": matrix_address(group_penalty(halvings, decay=0.5), 1.0),
        "U_g, what stays": matrix_address(np.eye(2 ** (group_level - 1)), 1.0),
    }
    assert [bool(shown.blocks) for shown in layer.pictures] == [False, False, True, False, False]
    level = f"group_level {group_level} of at most 5: num_groups {2 ** (group_level - 1)}"
    assert layer.facts == f"32 output and 16 input channels, kernel 5 x 3. {level}."


def test_boundaries_divide_a_side_equally() -> None:
    assert boundaries(1) == ()
    assert boundaries(4) == (0.25, 0.5, 0.75)
    assert len(boundaries(64)) == 63
    assert boundaries(128) == ()


def test_without_matrices_kept_norms_come_from_the_last_epoch(run: RunData) -> None:
    bare = replace(run, importance={})
    for place, layer in enumerate(layers_of(bare)):
        assert [picture.title[0] for picture in layer.pictures] == ["R", "U"]
        kept = run.dynamics[-1].kept_norm[place]
        assert layer.kept_norm == tuple(kept[np.isfinite(kept)].tolist())


def test_kept_norms_are_those_of_the_last_epoch_and_not_of_an_earlier_one(run: RunData) -> None:
    first = replace(run.dynamics[0], kept_norm=run.dynamics[0].kept_norm / 2)
    bare = replace(run, importance={}, dynamics=(first, *run.dynamics[1:]))
    assert [layer.kept_norm[0] for layer in layers_of(bare)] == [1.0] * len(SHAPES)


def test_half_precision_is_only_how_matrices_are_stored(run: RunData) -> None:
    # Sums of such numbers are beyond what half precision holds.
    large = {"wide": np.full((256, 512), 30_000, dtype=np.float16)}
    wide = replace(run, importance={"start": large, "end": large})
    assert layer_of(wide, "wide").kept_norm[0] == 1.0
    assert (pictures(wide, "wide")["S at compression"] == 31).all()


def test_a_layer_has_one_scale_before_and_after_the_permutation_and_another_at_the_start(run: RunData) -> None:
    start = np.full((256, 512), 1e-3, dtype=np.float16)
    moments = {"start": {"wide": start}, "end": {"wide": run.importance["end"]["wide"]}}
    shown = pictures(replace(run, importance=moments), "wide")
    # All alike, so all of the lightest colour of their own scale.
    assert (shown["S before training"] == 31).all()
    before = importance_of(run, "wide")
    permuted = layer_of(run, "wide").permuted(before)
    light = brightest(permuted)
    np.testing.assert_array_equal(shown["S at compression"], pixels(matrix_address(before, light)))
    np.testing.assert_array_equal(shown["S' in the learned orders"], pixels(matrix_address(permuted, light)))


def test_a_run_in_its_first_stage_shows_its_present_matrices(run: RunData) -> None:
    present = replace(run, plan=None, importance={"start": run.importance["start"], "now": run.importance["end"]})
    layers = layers_of(present)
    assert [layer.group_level for layer in layers] == run.dynamics[-1].group_level.tolist()
    assert {tuple(picture.title[:4] for picture in layer.pictures) for layer in layers} == {
        ("S be", "S so", "S' i", "R_g,", "U_g,")
    }


def test_the_penalty_and_the_mask_are_those_of_the_level_and_the_decay(run: RunData) -> None:
    order = np.arange(8)
    plan = GroupingPlan({"conv": LayerPlan(group_level=2, out_perm=order, in_perm=order, weight_shape=(8, 8, 1, 1))})
    recipe = replace(run.recipe, sparsify=replace(run.recipe.sparsify, decay=0.5))
    bare = replace(run, recipe=recipe, plan=plan, weight_shapes={"conv": (8, 8, 1, 1)}, importance={}, dynamics=())
    shown = pictures(bare, "conv")
    np.testing.assert_array_equal(shown["U_g, what stays"], [[31, 0], [0, 31]])
    np.testing.assert_array_equal(
        shown["R_g, the penalty"], [[0, 16, 31, 31], [16, 0, 31, 31], [31, 31, 0, 16], [31, 31, 16, 0]]
    )
    recipe = replace(recipe, sparsify=replace(recipe.sparsify, decay=0.25))
    assert pictures(replace(bare, recipe=recipe), "conv")["R_g, the penalty"][0].tolist() == [0, 8, 31, 31]


def test_the_alt_text_has_the_shape_and_what_every_level_keeps(run: RunData) -> None:
    assert replace(layer_of(run, "a.conv1"), group_level=2, kept_norm=(1.0, 0.75)).alt == (
        "a.conv1: 64 x 32 channels, 2 groups (group level 2). Kept norm: level 1 100.00%, level 2 75.00%."
    )


def test_a_layer_with_few_connections_left_is_not_all_dark(run: RunData) -> None:
    matrix = np.zeros((256, 512), dtype=np.float16)
    matrix[0, 0] = 1e-3
    shown = pictures(replace(run, importance={"end": {"wide": matrix}}), "wide")
    assert shown["S at compression"].max() == 31


def test_figures_for_print_are_of_grouped_layers_spread_over_the_network(run: RunData) -> None:
    order = np.arange(8)
    planned = LayerPlan(group_level=2, out_perm=order, in_perm=order, weight_shape=(8, 8, 1, 1))
    plan = GroupingPlan({f"conv{place}": planned for place in range(6)})
    matrices = {name: np.ones((8, 8), dtype=np.float16) for name in plan.layers}
    shapes = dict.fromkeys(plan.layers, (8, 8, 1, 1))
    many = replace(run, plan=plan, weight_shapes=shapes, importance={"end": matrices}, dynamics=())
    figures = list(importance_figures(many, layers_of(many)))
    assert [figure.title for figure in figures] == [f"Importance of conv{place}" for place in (1, 3, 5)]
    assert not list(importance_figures(replace(run, importance={}), layers_of(run)))


def test_every_matrix_of_a_figure_for_print_is_that_of_its_title(run: RunData) -> None:
    # Small, so that every entry has a pixel.
    layer = next(layer for layer in layers_of(run) if layer.group_level > 1 and max(layer.weight_shape) <= 64)
    importance = importance_of(run, layer.name)
    rows, columns = importance.shape
    axes = importance_figure(layer, importance, decay=0.25).figure.axes
    shown = {axis.get_title(loc="left"): np.asarray(axis.images[0].get_array()) for axis in axes}
    permuted = importance[layer.out_perm][:, layer.in_perm]
    expected = {
        "S": importance,
        "S' = S[out_perm][:, in_perm]": permuted,
        "S' inside U_g": np.where(connection_mask(rows, columns, layer.group_level), permuted, 0),
        f"R_{layer.group_level}": group_penalty(layer.halvings, decay=0.25),
        f"U_{layer.group_level}": np.eye(layer.num_groups),
    }
    assert list(shown) == list(expected)
    for title, matrix in expected.items():
        np.testing.assert_allclose(shown[title], matrix, err_msg=title)
