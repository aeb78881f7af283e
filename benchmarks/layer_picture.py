"""Draw one layer of a run as it becomes block-diagonal: the picture of the README.

    python benchmarks/layer_picture.py runs/cifar10-resnet56-60 layer3.4.conv2 docs/pictures/block-diagonal.png

Takes the network after sparse training (`checkpoints/sparsified.pt`) and the run's plan.
"""

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from strucspars.core.hierarchy import connection_mask
from strucspars.core.importance import importance_matrix
from strucspars.core.plan import GroupingPlan
from strucspars.train.checkpoint import load_named


def draw(run: Path, layer: str, out: Path) -> None:
    """Three panels: the trained layer, the same in its learned orders, and what stays."""
    saved = load_named(run / "checkpoints", "sparsified")
    if saved is None:
        raise SystemExit(f"{run} has no network after sparse training")
    state = saved["model"]
    plan = GroupingPlan.from_json((run / "plan.json").read_text()).layers[layer]
    importance = importance_matrix(state[f"{layer}.weight"].numpy())
    permuted = importance[plan.out_perm][:, plan.in_perm]
    mask = connection_mask(len(permuted), len(permuted[0]), plan.group_level)
    kept = permuted[mask > 0].sum() / permuted.sum()
    panels = (
        ("a trained layer", importance),
        ("the same, in learned orders", permuted),
        (f"{plan.num_groups} groups keep {kept:.0%} of the norm", permuted * mask),
    )
    figure, axes = plt.subplots(1, 3, figsize=(10.5, 3.95), layout="constrained")
    brightest = np.quantile(importance, 0.985)
    for place, (axis, (title, matrix)) in enumerate(zip(axes, panels, strict=True)):
        shown = np.ma.masked_where((mask == 0) & (place == 2), matrix)
        axis.set_facecolor("#f1f2f4")
        axis.imshow(shown, cmap="YlGnBu", vmin=0, vmax=brightest, interpolation="nearest")
        axis.set_title(title, fontsize=11)
        axis.set_xticks([])
        axis.set_yticks([])
        axis.set_xlabel("input channels", fontsize=9)
    axes[0].set_ylabel("output channels", fontsize=9)
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("layer")
    parser.add_argument("out", type=Path)
    draw(**vars(parser.parse_args()))
