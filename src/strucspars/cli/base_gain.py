"""How much better a row is than the one it varies."""

from collections.abc import Sequence
from dataclasses import dataclass

from strucspars.cli.row_measures import ACCURACY
from strucspars.cli.run_collection import Collection, FinishedRun
from strucspars.cli.table_rows import base_row
from strucspars.report.measured import Sample, sample_of
from strucspars.training.outcome_text import some_of
from strucspars.training.recipe import Recipe
from strucspars.training.recipe_identity import changes
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
    """Keys in which two runs differ because one of them was changed, not because one row varies the other."""
    changed = {*_changed_keys(variant), *_changed_keys(base)}
    return [key for key in _keys(changes(variant, base)) if key in changed]


def _changed_keys(recipe: Recipe) -> list[str]:
    return _keys(changes(recipe, read_recipe(recipe.name)))


def _keys(settings: Sequence[str]) -> list[str]:
    return [setting.partition("=")[0] for setting in settings]
