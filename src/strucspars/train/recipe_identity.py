"""Whether two recipes describe the same run, or two runs of the same row, wherever these runs take place."""

import re
import reprlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from strucspars.train.recipe import DataRecipe, EngineRecipe, Recipe, SlimmingRecipe, SparsifyRecipe
from strucspars.train.recipe_reading import flat_options
from strucspars.train.run_folder import RunFolder

# Of what differs between two recipes. As Python writes it: a folder from anywhere may hold signs that move the cursor.
SHOWN_KEYS = 8
SHORT = reprlib.Repr()
SHORT.maxstring = SHORT.maxother = 100


def without_place(recipe: Recipe) -> Recipe:
    """The recipe without what depends on the machine: where the data lie, and what computes."""
    anywhere, anything = DataRecipe(), EngineRecipe()
    return replace(
        recipe,
        data=replace(recipe.data, root=anywhere.root, download=anywhere.download, workers=anywhere.workers),
        engine=replace(
            recipe.engine,
            device=anything.device,
            cuda_graph=anything.cuda_graph,
            solver_workers=anything.solver_workers,
        ),
    )


def protocol(recipe: Recipe) -> Recipe:
    """What runs of one row have in common: all but seed, place, folder names and the engine's options but precision."""
    teacher = recipe.finetune.teacher
    return replace(
        _without_unread(without_place(recipe)),
        seed=0,
        sparsify=replace(recipe.sparsify, from_run=None),
        finetune=replace(recipe.finetune, form="auto", teacher=teacher and without_seed(Path(teacher).name)),
        engine=EngineRecipe(precision=recipe.engine.precision),
    )


def changes(recipe: Recipe, other: Recipe) -> tuple[str, ...]:
    """The options in which the protocol of a recipe differs from that of another; names do not count.

    >>> changes(Recipe(name="mine", engine=EngineRecipe(precision="bf16")), Recipe(name="other", seed=2))
    ('engine.precision=bf16',)
    """
    mine, its = (flat_options(replace(protocol(each), name="any")) for each in (recipe, other))
    return _differences(mine, its)


def first_stage_changes(recipe: Recipe, other: Recipe) -> tuple[str, ...]:
    """The options of a recipe, different from another's, that decide the network after the first stage."""
    return _differences(_first_stage_options(recipe), _first_stage_options(other))


def _first_stage_options(recipe: Recipe) -> dict[str, Any]:
    options = flat_options(without_place(_with_folder_names(recipe)))
    parts = ("seed", "data", "model", "sparsify", "stage1")
    return {
        key: value for key, value in options.items() if key.partition(".")[0] in parts and key != "sparsify.from_run"
    }


def _without_unread(recipe: Recipe) -> Recipe:
    """Without the options of methods that the run does not use."""
    if recipe.kind != "slimming":
        recipe = replace(recipe, slimming=SlimmingRecipe())
    return recipe if recipe.kind == "strucspars" else replace(recipe, sparsify=SparsifyRecipe())


def _with_folder_names(recipe: Recipe) -> Recipe:
    """With only the last part of every path: the same run, file or network may have moved."""
    paths = recipe.sparsify.from_run, recipe.finetune.teacher, recipe.model.weights
    source, teacher, weights = (path and Path(path).name for path in paths)
    return replace(
        recipe,
        sparsify=replace(recipe.sparsify, from_run=source),
        finetune=replace(recipe.finetune, teacher=teacher),
        model=replace(recipe.model, weights=weights),
    )


def _differences(mine: Mapping[str, Any], its: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(f"{key}={value}" for key, value in mine.items() if value != its[key])


def without_seed(folder: str) -> str:
    """The row that a run folder of this name belongs to.

    >>> without_seed("demo-seed2"), without_seed("demo")
    ('demo', 'demo')
    """
    return re.sub(r"-seed[0-9]+$", "", folder)


def check_same_run(folder: RunFolder, recipe: Recipe) -> None:
    """Refuse a recipe for a folder that holds a run with another one.

    Raises:
        ValueError: the recipes differ in more than the place; the message shows where.
    """
    if not folder.recipe_path.is_file() or not folder.is_begun:
        return
    recipes = (without_place(_with_folder_names(each)) for each in (folder.load_recipe(), recipe))
    before, now = (flat_options(_without_unread(each)) for each in recipes)
    differing = [key for key, value in now.items() if value != before[key]]
    if differing:
        shown = [
            f"  {key}: {SHORT.repr(before[key])} there, {SHORT.repr(now[key])} now" for key in differing[:SHOWN_KEYS]
        ]
        if len(differing) > SHOWN_KEYS:
            shown.append(f"  and {len(differing) - SHOWN_KEYS} more")
        raise ValueError(
            f"{folder.path} holds a run with another recipe:\n" + "\n".join(shown) + "\n"
            "give the recipe of that run, use another folder, or delete this one"
        )
