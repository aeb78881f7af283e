"""The command that repeats a run."""

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from strucspars.report.one_shot import OneShotOutcome
from strucspars.train.recipe import Recipe, SparsifyRecipe
from strucspars.train.recipe_reading import flat_options, read_recipe, recipe_names


def repeat_command(recipe: Recipe, recipe_path: Path) -> str:
    """The exact command that repeats a run in another folder.

    A recipe of the package is named, with what was changed about it; for any other, the file in the run folder is.

    >>> repeat_command(read_recipe("demo", ["seed=3"]), Path("runs/demo/recipe.yaml"))
    'strucspars run demo seed=3 --out runs/demo-seed3-again'
    >>> repeat_command(Recipe(name="mine"), Path("runs/my run/recipe.yaml"))
    "strucspars run 'runs/my run/recipe.yaml' --out runs/mine-again"
    """
    overrides = _overrides(recipe)
    source = [str(recipe_path)] if overrides is None else [recipe.name, *overrides]
    seed = f"-seed{recipe.seed}" if recipe.seed else ""
    return shlex.join(["strucspars", "run", *source, "--out", f"runs/{recipe.name}{seed}-again"])


def one_shot_command(recipe: Recipe, outcome: OneShotOutcome) -> str:
    """The exact command that repeats a one-shot compression, into another folder."""
    options = recipe.sparsify
    usual = SparsifyRecipe()
    chosen: tuple[tuple[str, object, bool], ...] = (
        ("--budget", options.budget, options.budget != usual.budget),
        (
            "--min-channels-per-group",
            options.min_channels_per_group,
            options.min_channels_per_group != usual.min_channels_per_group,
        ),
        *(("--include", pattern, options.include != usual.include) for pattern in options.include),
        *(("--exclude", pattern, True) for pattern in options.exclude),
        *(("--layer-type", name, options.layer_types != usual.layer_types) for name in options.layer_types),
        ("--classes", outcome.classes, True),
        ("--image-shape", "x".join(map(str, outcome.image_shape)), True),
        ("--out", f"{recipe.name}-again.safetensors", True),
        ("--run", f"runs/{recipe.name}-again", True),
    )
    more = [word for option, value, is_given in chosen if is_given for word in (option, str(value))]
    source = ["strucspars", "compress", recipe.model.weights or "", "--model", recipe.model.name]
    return shlex.join([*source, "--target", str(options.target), *more])


def sparsify_overrides(sparsify: SparsifyRecipe) -> list[str]:
    """The overrides of a recipe that ask for this and not for the defaults; the target is always among them.

    >>> sparsify_overrides(SparsifyRecipe(target=0.5, layer_types=("Conv2d", "Linear")))
    ['sparsify.target=0.5', 'sparsify.layer_types=[Conv2d, Linear]']
    """
    usual = asdict(SparsifyRecipe()) | {"target": None}
    return [f"sparsify.{key}={_as_yaml(value)}" for key, value in asdict(sparsify).items() if value != usual[key]]


def _overrides(recipe: Recipe) -> list[str] | None:
    """What makes the package's recipe of this name to this one; None where there is none, or it cannot be said."""
    if recipe.name not in recipe_names():
        return None
    usual, wanted = flat_options(read_recipe(recipe.name)), flat_options(recipe)
    overrides = [f"{key}={_as_yaml(value)}" for key, value in wanted.items() if value != usual[key]]
    try:
        return overrides if read_recipe(recipe.name, overrides) == recipe else None
    except ValueError:
        return None


def _as_yaml(value: Any) -> str:
    """On one line."""
    plain = list(value) if isinstance(value, tuple) else value
    text = yaml.safe_dump(plain, default_flow_style=True, width=10**6, allow_unicode=False)
    return text.removesuffix("\n").removesuffix("\n...")
