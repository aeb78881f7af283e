"""Layers as a page shows them: one at a time, in pictures and numbers."""

import base64
import io
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from PIL import Image

from strucspars.core.checks import FloatArray
from strucspars.core.hierarchy import group_penalty, num_groups
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
class Level:
    """What a group level keeps of a layer.

    Attributes:
        text: the kept norm as people read it.
        width: of its bar, out of 100.
        is_chosen: whether the layer has this level.
    """

    group_level: int
    num_groups: int
    text: str
    width: float
    is_chosen: bool


@dataclass(frozen=True, kw_only=True)
class LayerView:
    """One layer.

    Attributes:
        id: of its element, made of its place: the name may hold anything.
        facts: a line about it.
        pictures: in the order to show them.
        levels: all levels that it can have.
    """

    id: str
    name: str
    num_groups: int
    facts: str
    pictures: tuple[Picture, ...]
    levels: tuple[Level, ...]

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
        num_groups=layer.num_groups,
        facts=(
            f"{out_channels} output and {in_channels} input channels{area}. "
            f"group_level {layer.group_level} of at most {layer.largest_level}: num_groups {layer.num_groups}."
        ),
        pictures=tuple(_pictures(layer, moment, decay)),
        levels=tuple(_levels(layer)),
    )


def _pictures(layer: LayerImportance, moment: str, decay: float) -> Iterator[Picture]:
    if layer.start is not None:
        address = matrix_address(layer.start, brightest(layer.start))
        yield _picture(layer, "S before training", "Importance before training, in the network's order.", address)
    if layer.before is not None and layer.permuted is not None:
        light = brightest(layer.permuted)
        address = matrix_address(layer.before, light)
        yield _picture(layer, f"S {moment}", f"Importance {moment}, in the network's channel order.", address)
        permuted = _picture(layer, "S' in the learned orders", layer.alt, matrix_address(layer.permuted, light))
        yield _with_blocks(permuted, boundaries(layer.num_groups))
    penalty = f"Penalty of group_level {layer.group_level}."
    yield _picture(layer, "R_g, the penalty", penalty, _penalty_address(layer.halvings, decay))
    mask = f"Connections that stay: {layer.num_groups} diagonal blocks."
    yield _picture(layer, "U_g, what stays", mask, _mask_address(layer.num_groups))


@cache
def _penalty_address(halvings: int, decay: float) -> str:
    penalty = group_penalty(halvings, decay=decay)
    return matrix_address(penalty, float(block_means(penalty).max()))


@cache
def _mask_address(groups: int) -> str:
    mask = np.eye(groups)
    return matrix_address(mask, float(block_means(mask).max()))


def matrix_address(matrix: FloatArray, light: float) -> str:
    """A small picture of a non-negative matrix from 0 (dark) to `light` (light) and beyond, as a `data:` address.

    A page scales it up with `image-rendering: pixelated`.
    """
    means = block_means(matrix)
    steps = np.clip(means / light, 0.0, 1.0) if light > 0 else np.zeros_like(means)
    image = Image.fromarray(np.minimum((steps * SHADES).astype(np.uint8), SHADES - 1))
    image.putpalette(shades(SHADES).tobytes())
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"


def _picture(layer: LayerImportance, title: str, alt: str, address: str) -> Picture:
    """In a frame of the shape of the weight, whose longer side is `SIDE`."""
    rows, columns = layer.weight_shape[:2]
    ratio = min(max(columns / rows, 1 / LONGEST_RATIO), LONGEST_RATIO)
    width, height = (SIDE, round(SIDE / ratio, 2)) if ratio >= 1 else (round(SIDE * ratio, 2), SIDE)
    return Picture(title=title, alt=f"{layer.name}. {alt}", address=address, width=width, height=height)


def _with_blocks(picture: Picture, places: Sequence[float]) -> Picture:
    """The picture with the diagonal blocks drawn over it; without groups there is nothing to draw."""
    if not places:
        return picture
    width, height = picture.width, picture.height
    blocks = "".join(
        f"M{begin * width:.6g} {begin * height:.6g}H{end * width:.6g}V{end * height:.6g}H{begin * width:.6g}Z"
        for begin, end in itertools.pairwise((0.0, *places, 1.0))
    )
    return replace(picture, blocks=blocks, outside=f"M0 0H{width:g}V{height:g}H0Z{blocks}")


def _levels(layer: LayerImportance) -> Iterator[Level]:
    for group_level, kept in enumerate(layer.kept_norm, start=1):
        known = math.isfinite(kept)
        yield Level(
            group_level=group_level,
            num_groups=num_groups(group_level),
            text=f"{kept:.3f}" if known else "",
            width=round(100 * min(max(kept, 0.0), 1.0), 2) if known else 0.0,
            is_chosen=group_level == layer.group_level,
        )
