"""A matrix as a small picture: a few pixels and shades, however large the layer."""

import base64
import io
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from PIL import Image

from strucspars.core.checks import FloatArray, IntArray
from strucspars.report.drawing import shades

LARGEST_SIDE = 128
# More shades nobody can tell apart, and fewer pack better.
SHADES = 32


@dataclass(frozen=True, kw_only=True)
class MatrixImage:
    """A matrix as a palette PNG, to be scaled up with `image-rendering: pixelated`.

    Attributes:
        png: the file.
        width, height: pixels; each is the mean of a block of entries.
        columns, rows: entries of the matrix, for the shape that it should be shown in.
    """

    png: bytes
    width: int
    height: int
    columns: int
    rows: int

    @property
    def data_uri(self) -> str:
        """The file as a `data:` address."""
        return f"data:image/png;base64,{base64.b64encode(self.png).decode('ascii')}"


def matrix_image(matrix: npt.ArrayLike, *, brightest: float, largest_side: int = LARGEST_SIDE) -> MatrixImage:
    """A picture of a non-negative matrix, from 0 (dark) to `brightest` (light) and beyond.

    >>> picture = matrix_image(np.eye(512, 256), brightest=1.0)
    >>> picture.width, picture.height, picture.columns
    (128, 128, 256)
    """
    values = np.asarray(matrix, dtype=np.float64)
    rows, columns = values.shape
    means = block_means(values, largest_side=largest_side)
    steps = np.clip(means / brightest, 0.0, 1.0) if brightest > 0 else np.zeros_like(means)
    pixels = np.minimum((steps * SHADES).astype(np.uint8), SHADES - 1)
    height, width = pixels.shape
    return MatrixImage(png=_png(pixels), width=width, height=height, columns=columns, rows=rows)


def block_means(matrix: FloatArray, *, largest_side: int = LARGEST_SIDE) -> FloatArray:
    """Means over blocks of nearly equal size, so many that no side is longer than `largest_side`.

    >>> block_means(np.array([[1.0, 3.0], [5.0, 7.0]]), largest_side=1)
    array([[4.]])
    """
    row_starts, column_starts = (_block_starts(length, largest_side) for length in matrix.shape)
    sums = np.add.reduceat(np.add.reduceat(matrix, row_starts, axis=0), column_starts, axis=1)
    heights, widths = (
        np.diff(starts, append=length) for starts, length in zip((row_starts, column_starts), matrix.shape, strict=True)
    )
    means: FloatArray = sums / np.outer(heights, widths)
    return means


def _block_starts(length: int, largest_side: int) -> IntArray:
    """Where the blocks begin. Equal ones, if there are enough: then block and group boundaries mostly meet."""
    equal = max(blocks for blocks in range(1, min(length, largest_side) + 1) if length % blocks == 0)
    blocks = equal if 2 * equal >= min(length, largest_side) else largest_side
    return np.arange(blocks, dtype=np.int64) * length // blocks


def _png(pixels: npt.NDArray[np.uint8]) -> bytes:
    image = Image.fromarray(pixels)
    image.putpalette(shades(SHADES).tobytes())
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()
