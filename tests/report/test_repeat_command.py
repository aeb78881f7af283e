"""The command that repeats a run gives the same recipe."""

import shlex
from pathlib import Path

import pytest

from strucspars.report.contents import repeat_command
from strucspars.train.recipe_reading import read_recipe, recipe_names, recipe_yaml


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("seed=2", "stage1.epochs=3"),
        ("stage1.epochs=4", "stage2.epochs=3", "sparsify.lambda_warmup=0.0"),
        ("sparsify.exclude=['conv*', fc]", "sparsify.lambda_step=2e-6"),
        ("model.weights='a b; $(rm) # é'", 'data.root="it is \\"so\\": *x"'),
        ("engine.precision='16'", "data.root='123'", "finetune.teacher='null'"),
    ],
)
def test_the_command_names_the_packages_recipe_and_what_was_changed(overrides: tuple[str, ...]) -> None:
    recipe = read_recipe("cifar10-resnet20-40", overrides)
    program, command, name, *rest, out, _ = shlex.split(repeat_command(recipe, Path("nowhere/recipe.yaml")))
    assert (program, command, name, out) == ("strucspars", "run", "cifar10-resnet20-40", "--out")
    assert read_recipe(name, rest) == recipe
    assert len(rest) <= len(overrides) + 2


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_of_the_package_needs_nothing_but_its_name(name: str) -> None:
    assert repeat_command(read_recipe(name), Path("recipe.yaml")) == f"strucspars run {name} --out runs/{name}-again"


def test_another_recipe_is_repeated_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "my run" / "recipe.yaml"
    path.parent.mkdir()
    path.write_text("name: mine\nseed: 4\nbase: demo\n")
    recipe = read_recipe(path)
    path.write_text(recipe_yaml(recipe))
    _, _, source, *_ = shlex.split(repeat_command(recipe, path))
    assert read_recipe(source) == recipe
