"""Run folders that no training has made, with layers of any names and shapes, to try reports on."""

import math
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import torch
from numpy.random import Generator
from torch import nn

from strucspars.core.hierarchy import max_group_level, num_groups
from strucspars.core.importance import kept_norm_by_level
from strucspars.core.plan import GroupingPlan, LayerPlan
from strucspars.cost.counting import BeforeAfter
from strucspars.models.catalogue import build_model
from strucspars.nn.groupable import select_layers
from strucspars.train.outcome import RunSummary, StageAccuracy
from strucspars.train.recipe import Recipe
from strucspars.train.recipe_reading import recipe_yaml
from strucspars.train.run_folder import RunFolder

FloatMatrix = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True, kw_only=True)
class Fabrication:
    """What to make up.

    Attributes:
        weight_shapes: of the layers, by name.
        recipe: of the run; its epochs are those of the curves.
        is_finished: whether it ended; else it stopped in its first stage.
    """

    weight_shapes: Mapping[str, tuple[int, ...]]
    recipe: Recipe
    is_finished: bool = True


def small_recipe(name: str = "fabricated", *, seed: int = 0, model: str = "preact-resnet20") -> Recipe:
    """A recipe of 4 + 3 epochs."""
    recipe = Recipe(name=name, seed=seed)
    return replace(
        recipe,
        model=replace(recipe.model, name=model),
        sparsify=replace(recipe.sparsify, lambda_warmup=0),
        stage1=replace(recipe.stage1, epochs=4, lr_warmup=0),
        stage2=replace(recipe.stage2, epochs=3, lr_warmup=0),
    )


def network_shapes(name: str) -> dict[str, tuple[int, ...]]:
    """Weight shapes of the layers of a network that can be grouped."""
    # Without numbers: only the shapes are asked for.
    with torch.device("meta"):
        network: nn.Module = build_model(name, num_classes=1000)
    return {layer.name: tuple(layer.weight_shape) for layer in select_layers(network).layers}


def write_fabricated_run(path: Path, fabrication: Fabrication) -> None:
    """Write a run folder as a training of such a network would have left it, apart from weights."""
    folder, recipe = RunFolder(path), fabrication.recipe
    random = np.random.default_rng(recipe.seed)
    folder.create()
    folder.write_recipe(recipe_yaml(recipe))
    folder.write_json(folder.environment_path, {"versions": {"strucspars": "0.0"}, "system": "made up", "cores": 1})
    plans = {name: _layer_plan(shape, random) for name, shape in fabrication.weight_shapes.items()}
    importance = {name: _importance(plan, random) for name, plan in plans.items()}
    shapes = [{"name": name, "weight_shape": list(shape)} for name, shape in fabrication.weight_shapes.items()]
    folder.write_json(path / "layers.json", shapes)
    _store(folder.importance / "start.npz", {name: _random(plan.weight_shape, random) for name, plan in plans.items()})
    kept_norm = _kept_norm(plans, importance)
    for epoch in range(1, recipe.stage1.epochs + 1):
        folder.save_epoch_arrays("sparsify", epoch, _epoch_arrays(plans, kept_norm, random, epoch))
        folder.append_metrics(_row("sparsify", epoch) | {"lambda": 1e-5 * epoch, "removed_fraction": 0.1 * epoch})
    if fabrication.is_finished:
        _finish(folder, recipe, plans, importance)


def _finish(
    folder: RunFolder, recipe: Recipe, plans: Mapping[str, LayerPlan], importance: Mapping[str, FloatMatrix]
) -> None:
    """Compression, the second stage and the summary."""
    _store(folder.importance / "end.npz", importance)
    dense = sum(math.prod(plan.weight_shape) for plan in plans.values()) + 1
    small = sum(math.prod(plan.weight_shape) // plan.num_groups for plan in plans.values()) + 1
    removed = 1 - small / dense
    plan = GroupingPlan(
        plans, min_kept_norm=0.8, removed_param_fraction=removed, removed_mac_fraction=removed, target=removed
    )
    folder.save_plan(plan)
    folder.append_metrics(_row("compress", 0) | {"before_top1": 0.8, "min_kept_norm": 0.8})
    for epoch in range(1, recipe.stage2.epochs + 1):
        folder.append_metrics(_row("finetune", epoch))
    folder.remember("finetune_form", "masked")
    folder.write_json(folder.summary_json_path, _summary(recipe, BeforeAfter(dense, small)).to_json())


def _summary(recipe: Recipe, params: BeforeAfter) -> RunSummary:
    epochs = StageAccuracy(last_top1=0.9, last_top5=0.99, best_top1=0.91, best_top5=0.99, best_epoch=1)
    return RunSummary(
        name=recipe.name,
        kind=recipe.kind,
        seed=recipe.seed,
        model=recipe.model.name,
        data=recipe.data.name,
        params=params,
        macs=BeforeAfter(params.before * 9, params.after * 9),
        paper_flops=BeforeAfter(params.before * 10, params.after * 10),
        target=params.removed_fraction,
        removed_param_fraction=params.removed_fraction,
        removed_mac_fraction=params.removed_fraction,
        min_kept_norm=0.8,
        removed_before_search=params.removed_fraction / 2,
        sparsified=epochs,
        before_compression_top1=0.8,
        compressed_top1=0.6,
        compressed_top5=0.9,
        recalibrated_top1=None,
        finetuned=epochs,
        converted_top1=0.9,
        converted_top5=0.99,
        finetune_form="masked",
        seconds={"sparsify": 80.0, "compress": 0.5, "finetune": 45.0},
    )


def _store(path: Path, matrices: Mapping[str, FloatMatrix]) -> None:
    """As a run does, but not compressed: that takes most of the time for random numbers, and gains nothing."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, matrix in matrices.items():
            with archive.open(f"{quote(name, safe='')}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, matrix.astype(np.float16))


def _layer_plan(shape: tuple[int, ...], random: Generator) -> LayerPlan:
    level = int(random.integers(1, min(max_group_level(shape[0], shape[1]), 6) + 1))
    return LayerPlan(
        group_level=level,
        out_perm=random.permutation(shape[0]),
        in_perm=random.permutation(shape[1]),
        weight_shape=shape,
    )


def _importance(plan: LayerPlan, random: Generator) -> FloatMatrix:
    """Large inside the groups of the plan, small elsewhere, in the order of the network."""
    rows, columns = plan.weight_shape[:2]
    groups = num_groups(plan.group_level)
    same_group = np.equal.outer(np.arange(rows) * groups // rows, np.arange(columns) * groups // columns)
    matrix = np.empty((rows, columns), dtype=np.float32)
    matrix[np.ix_(plan.out_perm, plan.in_perm)] = _random(plan.weight_shape, random) * np.where(same_group, 1, 1 / 16)
    return matrix


def _random(weight_shape: tuple[int, ...], random: Generator) -> FloatMatrix:
    return random.random(weight_shape[:2], dtype=np.float32)


def _kept_norm(plans: Mapping[str, LayerPlan], importance: Mapping[str, FloatMatrix]) -> FloatMatrix:
    kept = [kept_norm_by_level(importance[name][np.ix_(plan.out_perm, plan.in_perm)]) for name, plan in plans.items()]
    depth = max(map(len, kept))
    return np.array([[*levels, *[np.nan] * (depth - len(levels))] for levels in kept], dtype=np.float32)


def _epoch_arrays(
    plans: Mapping[str, LayerPlan], kept_norm: FloatMatrix, random: Generator, epoch: int
) -> dict[str, np.ndarray[Any, Any]]:
    return {
        "group_level": np.array([min(plan.group_level, epoch) for plan in plans.values()], dtype=np.uint8),
        "kept_norm": kept_norm,
        "cost": random.random(len(plans)),
        "churn": (random.random(len(plans)) / epoch).astype(np.float32),
        "out_perm": np.concatenate([plan.out_perm for plan in plans.values()]).astype(np.uint16),
        "in_perm": np.concatenate([plan.in_perm for plan in plans.values()]).astype(np.uint16),
    }


def _row(stage: str, epoch: int) -> dict[str, Any]:
    accuracy = 0.6 + 0.05 * epoch
    losses = {"train_loss": 2.0 / (epoch + 1), "test_loss": 2.2 / (epoch + 1)}
    rates = {"lr": 0.1, "train_top1": accuracy, "test_top1": accuracy - 0.02, "test_top5": 0.95}
    return {"stage": stage, "epoch": epoch, **losses, **rates, "mean_churn": 0.1, "train_seconds": 1.0, "seconds": 1.5}
