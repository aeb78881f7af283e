"""What grouping would do to a ResNet-50: learn the channel orders of all its layers, then plan groups for a target.

    python examples/resnet50_study.py --target 0.35 --out demo-output

The weights are fresh, so no layer has groups to find: the study shows how far permutation alone gets, and how much norm
a compression without sparse training would cost.
"""

import argparse
import math
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torchvision
from rich.console import Console
from rich.progress import track
from rich.table import Table
from threadpoolctl import threadpool_limits

import strucspars as ss
from strucspars.core.arrays import FloatArray, IntArray

CONSOLE = Console()
SHOWN_LEVELS = (2, 3, 4, 5)


@dataclass(frozen=True)
class Study:
    """One layer: its importance and what was learned about it."""

    name: str
    weight_shape: tuple[int, ...]
    importance: FloatArray
    learned: ss.Connectivity

    def kept_norm(self, out_perm: IntArray, in_perm: IntArray) -> FloatArray:
        """Kept norms of all levels in an order of the channels."""
        return ss.kept_norm_by_level(self.importance[out_perm][:, in_perm])

    def learned_kept_norm(self) -> FloatArray:
        """Kept norms of all levels in the learned order."""
        return self.kept_norm(self.learned.out_perm, self.learned.in_perm)


def study_layers(model: torch.nn.Module) -> list[Study]:
    """Learn the channel orders of every convolution that can be grouped."""
    layers = [
        (name, module.weight)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Conv2d) and ss.max_group_level(module.out_channels, module.in_channels) > 1
    ]
    studies = []
    for name, weight in track(layers, description="Learning channel orders", console=CONSOLE, transient=True):
        importance = ss.importance_matrix(weight)
        studies.append(Study(name, tuple(weight.shape), importance, ss.learn_permutations(importance)))
    return studies


def plan_groups(model: torch.nn.Module, studies: list[Study], target: float) -> ss.GroupingPlan:
    """Search the threshold that meets the target, then refine every layer's orders for its level."""
    budgets = [
        ss.LayerBudget(study.name, math.prod(study.weight_shape), kept_norm=study.learned_kept_norm().tolist())
        for study in studies
    ]
    whole = sum(parameter.numel() for parameter in model.parameters())
    rest = ss.LayerBudget("everything else", whole - sum(budget.params for budget in budgets))
    found = ss.search_threshold([*budgets, rest], target)
    found = ss.without_surplus([*budgets, rest], found, target)
    layers = {}
    for study in studies:
        level = found.group_levels[study.name]
        refined = ss.refine_at_level(study.importance, study.learned, group_level=level)
        layers[study.name] = ss.LayerPlan(
            group_level=level,
            out_perm=refined.out_perm,
            in_perm=refined.in_perm,
            weight_shape=study.weight_shape,
        )
    return ss.GroupingPlan(
        layers, target=target, min_kept_norm=found.min_kept_norm, removed_param_fraction=found.removed_fraction
    )


def kept_fraction(studies: list[Study], plan: ss.GroupingPlan) -> float:
    """Share of all the convolutions' norm that the plan keeps."""
    norm = kept = 0.0
    for study in studies:
        layer = plan.layers[study.name]
        norm += study.importance.sum()
        kept += study.importance.sum() * study.kept_norm(layer.out_perm, layer.in_perm)[layer.group_level - 1]
    return kept / norm


def print_studies(studies: list[Study], plan: ss.GroupingPlan) -> None:
    """One row per shape: layers of one shape and fresh weights look alike."""
    table = Table(title="Norm kept inside G groups in the learned order (any other order: about 1 / G)")
    table.add_column("weight")
    table.add_column("layers", justify="right")
    for level in SHOWN_LEVELS:
        table.add_column(f"G = {ss.num_groups(level)}", justify="right")
    table.add_column("planned G", justify="right")
    for shape, count in Counter(study.weight_shape for study in studies).items():
        same_shape = [study for study in studies if study.weight_shape == shape]
        kept = np.mean([study.learned_kept_norm() for study in same_shape], axis=0)
        planned = sorted({plan.layers[study.name].num_groups for study in same_shape})
        cells = [f"{kept[level - 1]:.3f}" for level in SHOWN_LEVELS]
        table.add_row(" x ".join(map(str, shape)), str(count), *cells, " or ".join(map(str, planned)))
    CONSOLE.print(table)


def main() -> None:
    """Parse, study, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=float, default=0.35, help="fraction of all parameters to remove")
    parser.add_argument("--out", type=Path, default=Path("demo-output"), help="folder for the plan")
    parser.add_argument("--seed", type=int, default=0, help="seed of the fresh weights")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    model = torchvision.models.resnet50(weights=None)
    begin = time.perf_counter()
    # Many small matrix products: a second thread gains little, and waits long where another process holds its core.
    with threadpool_limits(1):
        studies = study_layers(model)
        plan = plan_groups(model, studies, options.target)
    seconds = time.perf_counter() - begin
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "resnet50-plan.json"
    path.write_text(plan.to_json())
    print_studies(studies, plan)
    CONSOLE.print(
        f"ResNet-50, fresh weights: {len(studies)} layers learned and planned in {seconds:.1f} s.\n"
        f"The plan removes {plan.removed_param_fraction:.1%} of all parameters (target {options.target:.0%}) "
        f"and keeps {kept_fraction(studies, plan):.1%} of the convolutions' norm.\n"
        "Fresh weights hide no groups, so much would be lost: training with the penalty is what makes them.\n"
        f"The plan was written to {path}",
        highlight=False,
    )


if __name__ == "__main__":
    main()
