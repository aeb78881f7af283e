"""Importance matrices before and after permutation, and what their levels keep (Figs. 1 and 2)."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter

from strucspars.core.checks import FloatArray
from strucspars.core.hierarchy import connection_mask, group_penalty
from strucspars.core.permutation import inverse
from strucspars.report.drawing import BLUE, FAINT, SEQUENTIAL, VERMILLION, NamedFigure, house_style, slug
from strucspars.report.layers import LayerImportance, block_means, boundaries, brightest, layer_importances
from strucspars.report.reading import RunData

CHOSEN_LAYERS = 3


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
        light = brightest(layer.permuted)
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
        alt=layer.alt,
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
    # A square for every layer, however wide: the blocks are what counts.
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
