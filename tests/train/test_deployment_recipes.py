"""The recipes for CPU runtimes: rows of the paper with a minimum width of groups."""

import pytest
import torch

import strucspars as ss
from strucspars.models.catalogue import build_model
from strucspars.nn.groupable import LayerRules, select_layers
from strucspars.paper.published import PAPER_ROWS, published_row, table_rows
from strucspars.train.recipe import Recipe
from strucspars.train.recipe_reading import read_recipe, recipe_names

NAMES = [name for name in recipe_names() if name.endswith("-deploy")]
# CPU runtimes are slow with fewer channels per group.
WIDTH = 16


def network_on_meta(recipe: Recipe) -> torch.nn.Module:
    with torch.device("meta"):
        return build_model(recipe.model.name, num_classes=10 if recipe.data.name == "cifar10" else 1000)


def largest_target(recipe: Recipe) -> float:
    """What the width leaves to remove, counted over all parameters of the network."""
    model = network_on_meta(recipe)
    layers = select_layers(model, LayerRules(min_channels_per_group=recipe.sparsify.min_channels_per_group)).layers
    removed = sum(layer.weight.numel() * (1 - 1 / ss.core.num_groups(layer.largest_level)) for layer in layers)
    return removed / sum(parameter.numel() for parameter in model.parameters())


def test_there_are_recipes_for_all_rates_of_resnet_50_and_one_for_cifar() -> None:
    rates = [f"imagenet-resnet50-{rate}-deploy" for rate in (35, 65, 85)]
    assert sorted(NAMES) == ["cifar10-resnet56-50-deploy", *rates]


@pytest.mark.parametrize("name", NAMES)
def test_a_deployment_recipe_is_a_row_of_the_paper_but_for_the_width(name: str) -> None:
    recipe = read_recipe(name)
    row = name.removesuffix("-deploy")
    assert recipe == read_recipe(row, [f"name={name}", f"sparsify.min_channels_per_group={WIDTH}"])
    assert read_recipe(row).sparsify.min_channels_per_group == 1


@pytest.mark.parametrize("name", NAMES)
def test_no_table_of_the_paper_has_a_deployment_recipe(name: str) -> None:
    assert name not in PAPER_ROWS
    assert published_row(name) is None
    assert all(name not in table_rows(f"table{number}") for number in (1, 2, 3, 5))


@pytest.mark.parametrize("name", NAMES)
def test_the_width_leaves_the_target_in_reach_with_layers_to_choose_from(name: str) -> None:
    recipe = read_recipe(name)
    assert recipe.sparsify.target < 0.9 * largest_target(recipe)


def test_sixty_percent_of_the_cifar_network_would_leave_little_to_choose() -> None:
    # Why there is no deployment recipe for this row: nearly every layer would have its largest level.
    recipe = read_recipe("cifar10-resnet56-60", [f"sparsify.min_channels_per_group={WIDTH}"])
    most = largest_target(recipe)
    assert recipe.sparsify.target < most < recipe.sparsify.target / 0.9


@pytest.mark.parametrize("name", ["imagenet-resnet50-85-deploy", "cifar10-resnet56-50-deploy"])
def test_fresh_weights_are_planned_to_the_target_with_wide_groups(name: str) -> None:
    recipe = read_recipe(name)
    torch.manual_seed(0)
    model = build_model(recipe.model.name, num_classes=10 if recipe.data.name == "cifar10" else 1000)
    options = recipe.sparsify
    plan = ss.one_shot_plan(
        model, ss.SparsifyConfig(target=options.target, min_channels_per_group=options.min_channels_per_group)
    )
    assert options.target <= plan.removed_param_fraction <= options.target + 0.01
    grouped = [layer for layer in plan.layers.values() if layer.num_groups > 1]
    assert min(min(layer.weight_shape[:2]) // layer.num_groups for layer in grouped) == WIDTH
    # Counted on the converted network too, which is what is deployed.
    dense = sum(parameter.numel() for parameter in model.parameters())
    converted = ss.convert_(model, plan)
    assert 1 - sum(parameter.numel() for parameter in converted.parameters()) / dense >= options.target
    weights = [layer.weight for layer in converted.modules() if isinstance(layer, ss.ShuffledGroupConv2d)]
    assert all(weight.shape[1] >= WIDTH for weight in weights)
