"""Importance matrices before and after permutation, and what their levels keep (Figs. 1 and 2)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter

from strucspars.core.checks import FloatArray
from strucspars.core.hierarchy import connection_mask, group_penalty, num_groups
from strucspars.core.permutation import inverse
from strucspars.report.drawing import BLUE, FAINT, SEQUENTIAL, VERMILLION, NamedFigure, drawable, house_style, slug
from strucspars.report.layers import LayerImportance, layer_importances
from strucspars.report.matrix_image import MatrixImage, block_means, matrix_image
from strucspars.report.reading import RunData
from strucspars.train.outcome_text import percent

# The few largest entries of a layer would leave all others dark.
BRIGHT_QUANTILE = 0.995
# Lines closer than this would hide what they divide.
MOST_BOUNDARIES = 64
CHOSEN_LAYERS = 3


@dataclass(frozen=True, eq=False, kw_only=True)
class LayerPictures:
    """One layer in pictures.

    Attributes:
        name: the layer's name.
        weight_shape: of the dense weight, `(C_out, C_in, *kernel)`.
        group_level: level g in the plan, or in the last epoch.
        num_groups: `2**(g - 1)`.
        largest_level: that the layer may reach.
        halvings: of R_g: the key of its picture in `LevelPictures.penalty`.
        kept_norm: share of the norm that the levels 1, 2, ... keep.
        start: S before training, in the network's channel order, in colours of its own; None if it was not stored.
        before: S at compression, in the network's channel order; None likewise.
        permuted: the same as S', in the learned orders and in the same colours; None likewise.
        boundaries: where one group ends and the next begins, as fractions of either side of `permuted`; empty where
            there are too many to be told apart.
        brightest: importance of the lightest colour of `before` and `permuted`.
        alt: what is to be seen, in numbers.
    """

    name: str
    weight_shape: tuple[int, ...]
    group_level: int
    num_groups: int
    largest_level: int
    halvings: int
    kept_norm: tuple[float, ...]
    start: MatrixImage | None
    before: MatrixImage | None
    permuted: MatrixImage | None
    boundaries: tuple[float, ...]
    brightest: float
    alt: str


@dataclass(frozen=True, eq=False, kw_only=True)
class LevelPictures:
    """R_g and U_g, the same for all layers but for their size.

    Attributes:
        penalty: R_g by its number of halvings (0, 1, 2, ...).
        mask: U_g by group level (1, 2, ...).
    """

    penalty: Mapping[int, MatrixImage]
    mask: Mapping[int, MatrixImage]


def layer_pictures(run: RunData) -> tuple[LayerPictures, ...]:
    """Small pictures of all layers, in network order; none where neither a plan nor dynamics are there."""
    return tuple(_pictures(layer) for layer in layer_importances(run))


def _pictures(layer: LayerImportance) -> LayerPictures:
    brightest = _brightest(layer.permuted)

    def picture(matrix: FloatArray | None, light: float) -> MatrixImage | None:
        return None if matrix is None else matrix_image(matrix, brightest=light)

    return LayerPictures(
        name=layer.name,
        weight_shape=layer.weight_shape,
        group_level=layer.group_level,
        num_groups=layer.num_groups,
        largest_level=layer.largest_level,
        halvings=layer.halvings,
        kept_norm=layer.kept_norm,
        start=picture(layer.start, _brightest(layer.start)),
        before=picture(layer.before, brightest),
        permuted=picture(layer.permuted, brightest),
        boundaries=boundaries(layer.num_groups),
        brightest=brightest,
        alt=layer_alt(layer),
    )


def _brightest(matrix: FloatArray | None) -> float:
    if matrix is None:
        return 0.0
    means = block_means(matrix)
    return float(np.quantile(means, BRIGHT_QUANTILE)) or float(means.max())


def boundaries(groups: int) -> tuple[float, ...]:
    """Where one of so many equal groups ends and the next begins, as fractions of the side.

    >>> boundaries(4)
    (0.25, 0.5, 0.75)
    """
    return tuple(place / groups for place in range(1, groups)) if groups <= MOST_BOUNDARIES else ()


def level_pictures(layers: Sequence[LayerPictures], *, decay: float) -> LevelPictures:
    """R_g and U_g of all levels that some layer can reach."""
    levels = max((layer.largest_level for layer in layers), default=0)
    return LevelPictures(
        penalty={halvings: _whole(group_penalty(halvings, decay=decay)) for halvings in range(levels)},
        mask={level: _whole(np.eye(num_groups(level))) for level in range(1, levels + 1)},
    )


def _whole(matrix: FloatArray) -> MatrixImage:
    return matrix_image(matrix, brightest=float(block_means(matrix).max()))


def chosen_layers(run: RunData, count: int = CHOSEN_LAYERS) -> tuple[LayerImportance, ...]:
    """A few grouped layers with stored matrices, spread evenly over the network."""
    names = [layer.name for layer in layer_importances(run) if layer.group_level > 1 and layer.permuted is not None]
    count = min(count, len(names))
    chosen = {names[(2 * place + 1) * len(names) // (2 * count)] for place in range(count)}
    return tuple(layer for layer in layer_importances(run) if layer.name in chosen)


def importance_figure(layer: LayerImportance, *, decay: float) -> NamedFigure:
    """Draw one layer as the paper's Figs. 1 and 2 do: above its matrices, below R_g, U_g and the kept norms.

    Raises:
        ValueError: the layer's matrices were not stored.
    """
    if layer.before is None or layer.permuted is None:
        raise ValueError(f"layer {layer.name!r}: its importance matrix was not stored; choose another one")
    outputs, inputs = layer.permuted.shape
    mask = connection_mask(outputs, inputs, layer.group_level)
    kept = layer.permuted * mask
    with house_style():
        figure = Figure(figsize=(8.0, 4.7), layout=ConstrainedLayoutEngine(h_pad=0.09))
        axes = figure.subplot_mosaic([["S", "permuted", "kept", "original"], ["R", "U", "norms", "norms"]])
        light = _brightest(layer.permuted)
        original = kept[inverse(layer.out_perm)][:, inverse(layer.in_perm)]
        _draw(axes["S"], layer.before, light, title="S", names=("input channel", "output channel"))
        _draw(axes["permuted"], layer.permuted, light, title="S' = S[out_perm][:, in_perm]", groups=layer.num_groups)
        _draw(axes["kept"], kept, light, title="S' inside U_g", groups=layer.num_groups)
        _draw(axes["original"], original, light, title="the same, order of S")
        _draw(axes["R"], group_penalty(layer.halvings, decay=decay), 1.0, title=f"R_{layer.group_level}")
        _draw(axes["U"], np.eye(layer.num_groups), 1.0, title=f"U_{layer.group_level}")
        _draw_kept_norm(axes["norms"], layer)
    return NamedFigure(
        name=f"importance-{layer.place:03d}-{slug(layer.name)}",
        title=f"Importance of {layer.name}",
        caption=(
            "S holds the norm of every kernel, dark for none. Above, from left: as the network has its channels; in "
            "the learned orders; what the groups keep; and that in the network's order again. Below: the penalty R_g, "
            "the connections U_g that the groups keep, and the share of the norm that every group level would keep."
        ),
        alt=layer_alt(layer),
        figure=figure,
    )


def _draw(
    axis: Axes,
    matrix: FloatArray,
    brightest: float,
    *,
    title: str,
    groups: int = 1,
    names: tuple[str, str] = ("", ""),
) -> None:
    # One square for every layer, however wide: what counts are the blocks.
    axis.imshow(block_means(matrix), cmap=SEQUENTIAL, vmin=0, vmax=brightest or 1.0, aspect="auto", extent=(0, 1, 1, 0))
    for place in boundaries(groups):
        axis.axhline(place, color="#ffffff", linewidth=0.7)
        axis.axvline(place, color="#ffffff", linewidth=0.7)
    axis.set_box_aspect(1)
    axis.set_title(title, fontsize="small")
    axis.set_xlabel(names[0], fontsize="small")
    axis.set_ylabel(names[1], fontsize="small")
    axis.set_xticks([])
    axis.set_yticks([])
    axis.grid(visible=False)


def _draw_kept_norm(axis: Axes, layer: LayerImportance) -> None:
    levels = np.arange(1, len(layer.kept_norm) + 1)
    colours = [VERMILLION if level == layer.group_level else BLUE for level in levels]
    bars = axis.bar(levels, layer.kept_norm, color=colours, width=0.7)
    axis.bar_label(bars, [f"{kept:.2f}" for kept in layer.kept_norm], fontsize=7.5, padding=1)
    axis.set_xticks(levels)
    axis.set_xlabel("group level (orange: chosen)")
    axis.set_ylabel("kept norm")
    axis.set_ylim(0, 1.15)
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.axhline(1, color=FAINT, linewidth=0.6)


def layer_alt(layer: LayerImportance) -> str:
    """What is to be seen of a layer, in words and numbers."""
    outputs, inputs = layer.weight_shape[:2]
    groups = f"{layer.num_groups} group{'s' if layer.num_groups > 1 else ''} (group level {layer.group_level})"
    words = f"{drawable(layer.name, 80)}: {outputs} x {inputs} channels, {groups}."
    if not layer.kept_norm:
        return words
    kept = ", ".join(f"level {level} {percent(share)}" for level, share in enumerate(layer.kept_norm, start=1))
    return f"{words} Kept norm: {kept}."
