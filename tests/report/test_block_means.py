"""Small pictures of matrices."""

import base64
import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from strucspars.core.checks import FloatArray
from strucspars.report.drawing import shades
from strucspars.report.layers import SHADES, block_means, matrix_address


@given(st.integers(1, 700), st.integers(1, 700))
def test_no_side_is_longer_than_allowed_and_the_mean_of_equal_blocks_stays(rows: int, columns: int) -> None:
    matrix = np.random.default_rng(rows).random((rows, columns))
    means = block_means(matrix, largest_side=128)
    assert means.shape[0] <= min(rows, 128)
    assert means.shape[1] <= min(columns, 128)
    # No side is coarser than it has to be by more than a factor of two.
    assert means.shape[0] >= min(rows, 128) / 2
    if rows % means.shape[0] == 0 and columns % means.shape[1] == 0:
        np.testing.assert_allclose(means.mean(), matrix.mean())


def test_a_small_matrix_is_kept_as_it_is() -> None:
    matrix = np.random.default_rng(0).random((100, 37))
    np.testing.assert_array_equal(block_means(matrix), matrix)


def test_blocks_of_uneven_size_are_weighted_by_their_entries() -> None:
    means = block_means(np.arange(7.0)[:, None], largest_side=3)
    np.testing.assert_array_equal(means[:, 0], [0.5, 2.5, 5.0])


def image_of(matrix: FloatArray, light: float) -> Image.Image:
    kind, _, content = matrix_address(matrix, light).partition(",")
    assert kind == "data:image/png;base64"
    return Image.open(io.BytesIO(base64.b64decode(content)))


def test_pixels_have_the_colours_of_the_scale() -> None:
    image = image_of(np.array([[0.0, 0.5], [1.0, 9.0]]), 1.0)
    assert image.mode == "P"
    colours, pixels = shades(SHADES), np.asarray(image.convert("RGB"))
    np.testing.assert_array_equal(pixels[0, 0], colours[0])
    np.testing.assert_array_equal(pixels[0, 1], colours[SHADES // 2])
    np.testing.assert_array_equal(pixels[1], [colours[-1], colours[-1]])


@pytest.mark.parametrize("light", [0.0, 1.0])
def test_a_matrix_of_zeros_is_dark(light: float) -> None:
    assert image_of(np.zeros((3, 3)), light).convert("RGB").getpixel((1, 1)) == tuple(shades(2)[0].tolist())


def test_boundaries_between_groups_stay_sharp_where_equal_blocks_are_nearly_as_many() -> None:
    groups: FloatArray = np.kron(np.eye(2), np.ones((96, 96))).astype(np.float64)
    means = block_means(groups, largest_side=128)
    assert means.shape == (96, 96)
    assert set(np.unique(means)) == {0.0, 1.0}
