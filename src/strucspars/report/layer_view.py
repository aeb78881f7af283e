"""Layers as a page shows them: one at a time, in pictures and numbers."""

import base64
import io
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from PIL import Image

from strucspars.core.checks import FloatArray
from strucspars.core.hierarchy import group_penalty
from strucspars.report.drawing import shades
from strucspars.report.layers import LayerImportance, block_means, boundaries, brightest, layer_importances
from strucspars.report.reading import RunData

SIDE = 100.0
# A longer matrix is squeezed; else its short side would be a line.
LONGEST_RATIO = 3.0
# Few enough shades to compress well, more than eyes tell apart.
SHADES = 32


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A matrix in its frame.

    Attributes:
        title: below it.
        alt: for those who cannot see it.
        address: of the image, a `data:` address.
        width, height: of the frame.
        outside: SVG path of what lies outside the diagonal blocks; empty for a matrix without groups.
        blocks: SVG path of the blocks' outlines; likewise.
    """

    title: str
    alt: str
    address: str
    width: float
    height: float
    outside: str = ""
    blocks: str = ""


@dataclass(frozen=True, kw_only=True)
class LayerView:
    """One layer.

    Attributes:
        id: of its element, made of its place: the name may hold anything.
        kept_norm: of the levels 1, 2, ..., as fractions.
        facts: a line about it.
        pictures: in the order to show them.
    """

    id: str
    name: str
    group_level: int
    num_groups: int
    kept_norm: tuple[float, ...]
    facts: str
    pictures: tuple[Picture, ...]

    @property
    def groups(self) -> str:
        """The number of groups in words."""
        return "1 group" if self.num_groups == 1 else f"{self.num_groups} groups"


def layer_views(run: RunData) -> tuple[LayerView, ...]:
    """All layers that may be grouped, in network order."""
    moment = "so far" if run.plan is None else "at compression"
    return tuple(layer_view(layer, moment, decay=run.recipe.sparsify.decay) for layer in layer_importances(run))


def layer_view(layer: LayerImportance, moment: str, *, decay: float) -> LayerView:
    """One layer, its matrices being of the moment named; `decay` is that of R_g."""
    out_channels, in_channels, *kernel = layer.weight_shape
    area = f", kernel {' x '.join(map(str, kernel))}" if kernel else ""
    return LayerView(
        id=f"layer-{layer.place + 1}",
        name=layer.name,
        group_level=layer.group_level,
        num_groups=layer.num_groups,
        kept_norm=layer.kept_norm,
        facts=(
            f"{out_channels} output and {in_channels} input channels{area}. "
            f"group_level {layer.group_level} of at most {layer.largest_level}: num_groups {layer.num_groups}."
        ),
        pictures=tuple(_pictures(layer, moment, decay)),
    )


def _pictures(layer: LayerImportance, moment: str, decay: float) -> Iterator[Picture]:
    if layer.start is not None:
        address = matrix_address(layer.start, brightest(layer.start))
        yield _picture(layer, "S before training", "Importance before training, in the network's order.", address)
    if layer.before is not None and layer.permuted is not None:
        light = brightest(layer.permuted)
        address = matrix_address(layer.before, light)
        yield _picture(layer, f"S {moment}", f"Importance {moment}, in the network's channel order.", address)
        address = matrix_address(layer.permuted, light)
        yield _picture(layer, "S' in the learned orders", layer.alt, address, boundaries(layer.num_groups))
    penalty = matrix_address(group_penalty(layer.halvings, decay=decay))
    yield _picture(layer, "R_g, the penalty", f"Penalty of group_level {layer.group_level}.", penalty)
    words = f"Connections that stay: {layer.num_groups} diagonal blocks."
    yield _picture(layer, "U_g, what stays", words, matrix_address(np.eye(layer.num_groups)))


def matrix_address(matrix: FloatArray, light: float | None = None) -> str:
    """A small picture of a non-negative matrix, as a `data:` address, from 0 (dark) to `light`, by default its largest.

    A page scales it up with `image-rendering: pixelated`.
    """
    means = block_means(matrix)
    light = float(means.max()) if light is None else light
    steps = np.clip(means / light, 0.0, 1.0) if light > 0 else np.zeros_like(means)
    image = Image.fromarray(np.minimum((steps * SHADES).astype(np.uint8), SHADES - 1))
    image.putpalette(shades(SHADES).tobytes())
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"


def _picture(layer: LayerImportance, title: str, alt: str, address: str, places: Sequence[float] = ()) -> Picture:
    """In a frame of the shape of the weight, whose longer side is `SIDE`; with diagonal blocks divided at `places`."""
    rows, columns = layer.weight_shape[:2]
    ratio = min(max(columns / rows, 1 / LONGEST_RATIO), LONGEST_RATIO)
    width, height = (SIDE, round(SIDE / ratio, 2)) if ratio >= 1 else (round(SIDE * ratio, 2), SIDE)
    picture = Picture(title=title, alt=f"{layer.name}. {alt}", address=address, width=width, height=height)
    if not places:
        return picture
    blocks = "".join(
        f"M{begin * width:.6g} {begin * height:.6g}H{end * width:.6g}V{end * height:.6g}H{begin * width:.6g}Z"
        for begin, end in itertools.pairwise((0.0, *places, 1.0))
    )
    return replace(picture, blocks=blocks, outside=f"M0 0H{width:g}V{height:g}H0Z{blocks}")
