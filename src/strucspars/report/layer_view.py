"""Layers as a page shows them: one at a time, in pictures and numbers."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from strucspars.core.hierarchy import num_groups
from strucspars.report.figures.importance import LayerPictures, LevelPictures
from strucspars.report.matrix_image import MatrixImage

SIDE = 100.0
# A matrix that is longer than that is squeezed, or its short side would be a line.
LONGEST_RATIO = 3.0


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A matrix in its frame.

    Attributes:
        title: below it.
        alt: for whoever cannot see it.
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
        name: of the layer.
        groups: their number, in words.
        facts: a line about it.
        pictures: in the order to show them.
        levels: all levels that it can have.
        is_chosen: whether it is shown first.
    """

    id: str
    name: str
    groups: str
    facts: str
    pictures: tuple[Picture, ...]
    levels: tuple[Level, ...]
    is_chosen: bool


def layer_views(
    layers: Sequence[LayerPictures], levels: LevelPictures, *, is_compressed: bool
) -> tuple[LayerView, ...]:
    """All layers, of which the one with the most groups is shown first.

    Args:
        layers: in network order.
        levels: what they share.
        is_compressed: whether the matrices are those of the compression; else they are of the last checkpoint.
    """
    most = max(range(len(layers)), key=lambda place: layers[place].num_groups, default=0)
    return tuple(
        LayerView(
            id=f"layer-{place + 1}",
            name=layer.name,
            groups="1 group" if layer.num_groups == 1 else f"{layer.num_groups} groups",
            facts=_facts(layer),
            pictures=tuple(_pictures(layer, levels, "at compression" if is_compressed else "so far")),
            levels=tuple(_levels(layer)),
            is_chosen=place == most,
        )
        for place, layer in enumerate(layers)
    )


def _facts(layer: LayerPictures) -> str:
    out_channels, in_channels, *kernel = layer.weight_shape
    area = f", kernel {' x '.join(map(str, kernel))}" if kernel else ""
    return (
        f"{out_channels} output and {in_channels} input channels{area}. "
        f"group_level {layer.group_level} of at most {layer.largest_level}: num_groups {layer.num_groups}."
    )


def _pictures(layer: LayerPictures, levels: LevelPictures, moment: str) -> Iterator[Picture]:
    unordered = "in the network's channel order"
    if layer.start is not None:
        yield _picture(layer, layer.start, "S before training", f"Importance before training, {unordered}.")
    if layer.before is not None:
        yield _picture(layer, layer.before, f"S {moment}", f"Importance {moment}, {unordered}.")
    if layer.permuted is not None:
        yield _with_blocks(_picture(layer, layer.permuted, "S' in the learned orders", layer.alt), layer.boundaries)
    penalty, mask = levels.penalty.get(layer.halvings), levels.mask.get(layer.group_level)
    if penalty is not None:
        yield _picture(layer, penalty, "R_g, the penalty", f"Penalty of group_level {layer.group_level}.")
    if mask is not None:
        blocks = f"{layer.num_groups} diagonal blocks"
        yield _picture(layer, mask, "U_g, what stays", f"Connections that stay: {blocks}.")


def _picture(layer: LayerPictures, image: MatrixImage, title: str, alt: str) -> Picture:
    width, height = _frame(layer)
    return Picture(title=title, alt=f"{layer.name}. {alt}", address=image.data_uri, width=width, height=height)


def _frame(layer: LayerPictures) -> tuple[float, float]:
    """Width and height in the shape of the weight; the longer is `SIDE`."""
    rows, columns = layer.weight_shape[:2]
    ratio = min(max(columns / rows, 1 / LONGEST_RATIO), LONGEST_RATIO)
    return (SIDE, round(SIDE / ratio, 2)) if ratio >= 1 else (round(SIDE * ratio, 2), SIDE)


def _with_blocks(picture: Picture, boundaries: Sequence[float]) -> Picture:
    """The picture with the diagonal blocks drawn over it; without groups there is nothing to draw."""
    if not boundaries:
        return picture
    width, height = picture.width, picture.height
    blocks = "".join(
        f"M{begin * width:.6g} {begin * height:.6g}H{end * width:.6g}V{end * height:.6g}H{begin * width:.6g}Z"
        for begin, end in itertools.pairwise((0.0, *boundaries, 1.0))
    )
    return replace(picture, blocks=blocks, outside=f"M0 0H{width:g}V{height:g}H0Z{blocks}")


def _levels(layer: LayerPictures) -> Iterator[Level]:
    for group_level, kept in enumerate(layer.kept_norm, start=1):
        known = math.isfinite(kept)
        yield Level(
            group_level=group_level,
            num_groups=num_groups(group_level),
            text=f"{kept:.3f}" if known else "",
            width=round(100 * min(max(kept, 0.0), 1.0), 2) if known else 0.0,
            is_chosen=group_level == layer.group_level,
        )
