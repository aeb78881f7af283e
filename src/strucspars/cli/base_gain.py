"""How much better a row is than the one it varies."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from strucspars.cli.row_measures import ACCURACY
from strucspars.cli.run_collection import Collection, FinishedRun
from strucspars.cli.table_rows import base_row
from strucspars.report.measured import Sample, sample_of
from strucspars.training.outcome_text import some_of
from strucspars.training.recipe import Recipe
from strucspars.training.recipe_identity import changes, changes_from_recipe
from strucspars.training.recipe_reading import read_recipe


@dataclass(frozen=True, kw_only=True)
class BaseGain:
    """A row over its base.

    Attributes:
        points: of accuracy, seed by seed; None where there is nothing to compare.
        remark: why there is not, where runs of the base are there all the same.
    """

    points: Sample | None = None
    remark: str | None = None


def gain_over_base(name: str, runs: Sequence[FinishedRun], collection: Collection) -> BaseGain:
    """Compare the runs of a row with those of its base, pairs of the same seed.

    Args:
        name: of the row.
        runs: of the row, all of one protocol.
        collection: holds those of the base.
    """
    base = base_row(name)
    if base is None or not runs:
        return BaseGain()
    try:
        base_runs = collection.comparable(base)
    except ValueError as error:
        return BaseGain(remark=f"{name} is not compared with {base}: {error}.")
    if base_runs and (other := _differing_changes(runs[0].recipe, base_runs[0].recipe)):
        return BaseGain(remark=f"{name} is not compared with {base}, which was run with other {some_of(other)}.")
    accuracies = {run.recipe.seed: ACCURACY.ours(run.summary) for run in base_runs}
    pairs = [(ACCURACY.ours(run.summary), accuracies.get(run.recipe.seed)) for run in runs]
    return BaseGain(points=sample_of([mine - its for mine, its in pairs if mine is not None and its is not None]))


def _differing_changes(variant: Recipe, base: Recipe) -> list[str]:
    """Keys that one of two runs has otherwise than the recipe of its name, and the other has not likewise."""
    mine, its = _asked(variant), _asked(base)
    differing = [setting for setting in (*mine, *its) if (setting in mine) != (setting in its)]
    return list(dict.fromkeys(setting.partition("=")[0] for setting in differing))


def _asked(recipe: Recipe) -> list[str]:
    """What was asked to be otherwise than in the recipe of that name; warm-ups follow from epochs."""
    followed = {
        "stage1.epochs": recipe.stage1.epochs,
        "stage2.epochs": recipe.stage2.epochs,
        "model.weights": recipe.model.weights,  # without which there may be no epoch of the first stage
    }
    overrides = [f"{key}={json.dumps(value)}" for key, value in followed.items()]
    asked = [setting for setting in changes_from_recipe(recipe) if setting.partition("=")[0] in followed]
    return [*changes(recipe, read_recipe(recipe.name, overrides)), *asked]
