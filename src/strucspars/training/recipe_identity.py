"""Whether two recipes describe the same run: where it happens does not count."""

from dataclasses import replace

from strucspars.runs.folder import RunFolder
from strucspars.training.recipe import DataRecipe, EngineRecipe, Recipe
from strucspars.training.recipe_reading import read_recipe, recipe_yaml


def without_place(recipe: Recipe) -> Recipe:
    """The recipe without what depends on the machine: where the data lie, and what computes.

    >>> here = Recipe(name="mine", data=DataRecipe(root="here", workers=2))
    >>> without_place(here) == without_place(Recipe(name="mine", data=DataRecipe(root="there")))
    True
    """
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


def check_same_run(folder: RunFolder, recipe: Recipe) -> None:
    """Refuse a recipe for a folder where another one has been at work: no checkpoint would fit, or worse, one would.

    Raises:
        ValueError: the recipes differ in more than the place; the message shows where.
    """
    if not folder.recipe_path.is_file() or not folder.is_begun:
        return
    if without_place(read_recipe(folder.recipe_path)) != without_place(recipe):
        folder.refuse_recipe(recipe_yaml(recipe))
