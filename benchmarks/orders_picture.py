"""Draw where shuffles are left in a residual block, by order policy: the picture of docs/shuffles.md.

python benchmarks/orders_picture.py docs/pictures/order-policies.png
"""

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

CHANNELS, GROUPS = 12, 3
COLOURS = ("#1d3557", "#2a9d8f", "#e9c46a")
LAYERS = ("1x1", "3x3", "1x1")
# Which of the four tensors around the layers are shuffled, by policy.
PANELS = {
    "free, as in the paper": (True, True, True, True),
    "shared": (False, True, True, False),
    "one-shuffle": (False, False, True, False),
}
LAYER_WIDTH, TENSOR_WIDTH = 1.0, 1.5


def draw_shuffle(axis: Axes, left: float, order: np.ndarray) -> None:
    """Channels that change their places between a layer and the next."""
    bend = np.linspace(0, 1, 30)
    height = (1 - np.cos(np.pi * bend)) / 2
    for new, old in enumerate(order):
        colour = COLOURS[old * GROUPS // CHANNELS]
        axis.plot(left + TENSOR_WIDTH * bend, old + (new - old) * height, color=colour, lw=1.2, alpha=0.9)


def draw_panel(axis: Axes, title: str, is_shuffled: tuple[bool, ...]) -> None:
    """One block: tensors as lines, groups of layers as boxes."""
    random = np.random.default_rng(4)
    left = 0.0
    for place, shuffled in enumerate(is_shuffled):
        draw_shuffle(axis, left, random.permutation(CHANNELS) if shuffled else np.arange(CHANNELS))
        if shuffled:
            axis.text(left + TENSOR_WIDTH / 2, -1.1, "copy", ha="center", fontsize=8, color="#c1121f")
        left += TENSOR_WIDTH
        if place == len(LAYERS):
            break
        size = CHANNELS / GROUPS
        for group in range(GROUPS):
            corner = (left, group * size - 0.5 + 0.12)
            axis.add_patch(Rectangle(corner, LAYER_WIDTH, size - 0.24, facecolor="#e5e7eb", edgecolor="#6b7280"))
        axis.text(left + LAYER_WIDTH / 2, CHANNELS + 0.4, LAYERS[place], ha="center", fontsize=9)
        left += LAYER_WIDTH
    axis.set_title(title, fontsize=11)
    axis.set_xlim(-0.2, left + 0.2)
    axis.set_ylim(-1.7, CHANNELS + 1.4)
    axis.axis("off")


def draw(out: Path) -> None:
    """Three panels side by side."""
    figure, axes = plt.subplots(1, len(PANELS), figsize=(12, 3), layout="constrained")
    for axis, (title, is_shuffled) in zip(axes, PANELS.items(), strict=True):
        draw_panel(axis, title, is_shuffled)
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    draw(parser.parse_args().out)
