"""The recipes of the package against the paper's tables."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from strucspars.cost.counting import NetworkCount, count_macs
from strucspars.models.catalogue import build_model
from strucspars.paper.published import PAPER_ROWS, base_row
from strucspars.train.recipe import Recipe, SparsifyRecipe
from strucspars.train.recipe_reading import read_recipe, recipe_names

DEPLOYED = ("imagenet-resnet50-35", "imagenet-resnet50-65", "imagenet-resnet50-85", "cifar10-resnet56-50")
ABLATIONS = ("from-scratch", "shufflenet", "random", "no-shuffle")
DENSE_ROWS = [name for name in PAPER_ROWS if name.endswith("-dense")]


@cache
def dense_count(model: str, num_classes: int, side: int) -> NetworkCount:
    with torch.device("meta"):
        return count_macs(build_model(model, num_classes=num_classes), torch.empty(1, 3, side, side))


def count_of(recipe: Recipe) -> NetworkCount:
    cifar = recipe.data.name == "cifar10"
    return dense_count(recipe.model.name, 10 if cifar else 1000, 32 if cifar else recipe.data.image_size)


def removed_fraction(recipe: Recipe) -> float:
    return {"dense": 0.0, "slimming": recipe.slimming.target, "strucspars": recipe.sparsify.target}[recipe.kind]


def test_every_row_of_the_paper_has_a_recipe_and_every_recipe_a_row() -> None:
    own = {"demo", "demo-dense", *(f"cifar10-resnet56-60-{ablation}" for ablation in ABLATIONS)}
    own |= {f"{row}-deploy" for row in DEPLOYED}
    own |= {f"cifar10-{row}-progressive-distilled" for row in ("resnet20-40", "resnet56-60")}
    variants = {name for name in recipe_names() if base_row(name) in PAPER_ROWS}
    assert set(recipe_names()) == {*PAPER_ROWS, *own, *variants}
    tables = [row.table for row in PAPER_ROWS.values()]
    assert [tables.count(table) for table in (1, 2, 3)] == [19, 11, 8]


@pytest.mark.parametrize("name", PAPER_ROWS)
def test_the_target_leaves_the_parameters_of_the_paper(name: str) -> None:
    recipe = read_recipe(name)
    dense_params = count_of(recipe).params
    kept_in_paper = PAPER_ROWS[name].params / dense_params
    assert 1 - removed_fraction(recipe) == pytest.approx(kept_in_paper, abs=0.02)


@pytest.mark.parametrize("name", DENSE_ROWS)
def test_dense_networks_have_the_papers_flops(name: str) -> None:
    assert count_of(read_recipe(name)).paper_flops == pytest.approx(PAPER_ROWS[name].flops, rel=0.002)


@pytest.mark.parametrize("name", [name for name in recipe_names() if "demo" not in name])
def test_recipes_follow_the_papers_protocol(name: str) -> None:
    recipe = read_recipe(name)
    dataset, network, *_ = name.split("-")
    assert recipe.name == name
    assert recipe.data.name == dataset
    assert recipe.model.name == (f"preact-{network}" if dataset == "cifar10" else network)
    assert recipe.sparsify.lambda_step == (None if recipe.is_progressive else 2e-6)
    if recipe.kind == "strucspars" and not recipe.is_progressive:
        assert recipe.sparsify_config(steps_per_epoch=1).penalty_schedule.warmup_epochs == 10
    assert recipe.stage2.lr_warmup_epochs == (0 if recipe.kind == "slimming" else 10)
    epochs = {"cifar10": (100, 160), "imagenet": (60, 120)}[dataset]
    assert recipe.stage2.epochs == epochs[1]
    modern = "-modern" in name
    assert recipe.stage2.schedule == {"cifar10": "cosine" if modern else "steps", "imagenet": "cosine"}[dataset]
    assert recipe.stage2.weight_decay == (5e-4 if modern else 1e-4)
    assert recipe.data.batch_size == {"cifar10": 64, "imagenet": 256}[dataset]
    if recipe.kind == "slimming":
        assert replace(recipe.stage1, epochs=epochs[1]) == recipe.stage2
    if recipe.kind == "strucspars":
        assert (recipe.stage1.epochs, recipe.stage1.weight_decay, recipe.stage1.schedule) == (
            epochs[0],
            0.0,
            "constant",
        )


@pytest.mark.parametrize("name", [name for name in recipe_names() if "progressive" in name])
def test_a_progressive_recipe_removes_its_connections_before_the_rate_first_falls(name: str) -> None:
    recipe = read_recipe(name)
    config = recipe.sparsify_config(steps_per_epoch=782)
    assert recipe.is_progressive
    assert config.epochs == recipe.stage2.epochs == 160
    assert config.decision_epoch + config.annealing_epochs <= 0.5 * config.epochs
    assert recipe.stage2.lr_warmup_epochs < config.decision_epoch


@pytest.mark.parametrize("name", recipe_names())
def test_the_name_tells_the_kind_and_the_ablation(name: str) -> None:
    recipe = read_recipe(name)
    assert (recipe.kind == "dense") == name.endswith("-dense")
    assert (recipe.kind == "slimming") == ("-slimming" in name)
    suffix = next((ablation for ablation in ABLATIONS if name.endswith(ablation)), "finetune")
    assert recipe.finetune.ablation == suffix


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_can_be_shortened_to_one_epoch_per_stage(name: str) -> None:
    recipe = read_recipe(name, ["stage1.epochs=1", "stage2.epochs=1"])
    assert (recipe.stage1.epochs, recipe.stage2.epochs) == (1, 1)


def test_the_networks_of_runs_keep_all_channels() -> None:
    with pytest.raises(ValueError, match=r"sparsify\.narrow 'all': the networks of runs keep all channels"):
        Recipe(name="narrow", sparsify=SparsifyRecipe(narrow="all"))
