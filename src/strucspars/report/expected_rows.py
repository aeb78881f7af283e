"""Which rows the metrics of a run must have by now: that a file was cut shows only beside the recipe."""

from collections.abc import Mapping, Sequence
from typing import Any

from strucspars.training.recipe import Recipe
from strucspars.training.stage_names import COMPRESS, FINETUNE, FIRST_STAGES, TRAIN

Rows = Sequence[Mapping[str, Any]]
# Stage to its first and last epoch, in order. No lists: a recipe from anywhere may ask for any number of epochs.
StageEpochs = Mapping[str, tuple[int, int]]


def expected_epochs(recipe: Recipe) -> StageEpochs:
    """The first and the last epoch of every stage that a finished run has rows of.

    >>> expected_epochs(Recipe(name="small"))
    {'sparsify': (1, 100), 'compress': (0, 0), 'finetune': (1, 160)}
    >>> expected_epochs(Recipe(name="large", kind="dense"))
    {'train': (1, 160)}
    """
    if recipe.kind not in FIRST_STAGES:
        return {TRAIN: (1, recipe.stage2.epochs)}
    following = {COMPRESS: (0, 0), FINETUNE: (1, recipe.stage2.epochs)}
    if recipe.sparsify.from_run is not None or not recipe.stage1.epochs:
        # The run that has trained the first stage has its rows; or nothing has trained it.
        return following
    return {FIRST_STAGES[recipe.kind]: (1, recipe.stage1.epochs), **following}


def lacking_rows(recipe: Recipe, rows: Rows, *, is_finished: bool) -> str | None:
    """A sentence about the rows that should be there and are not; None where all are.

    A run in progress should have those before its last one.
    """
    expected = expected_epochs(recipe)
    there = {
        stage: {row["epoch"] for row in rows if row["stage"] == stage and first <= row["epoch"] <= last}
        for stage, (first, last) in expected.items()
    }
    if not is_finished:
        expected = _begun(expected, there)
    due = sum(last - first + 1 for first, last in expected.values())
    lacking = due - sum(len(there[stage]) for stage in expected)
    if not lacking:
        return None
    first = _first_lacking(expected, there)
    return f"metrics.jsonl lacks {lacking} of {due} rows, first {first}: curves and times are shown without them"


def _begun(expected: StageEpochs, there: Mapping[str, set[int]]) -> StageEpochs:
    """What is expected of a run that has come to its last row."""
    stages = list(expected)
    last_begun = max((place for place, stage in enumerate(stages) if there[stage]), default=-1)
    begun = {stage: expected[stage] for stage in stages[: last_begun + 1]}
    if begun:
        present = stages[last_begun]
        begun[present] = (expected[present][0], max(there[present]))
    return begun


def _first_lacking(expected: StageEpochs, there: Mapping[str, set[int]]) -> str:
    stage, epoch = next(
        (stage, epoch)
        for stage, (first, last) in expected.items()
        for epoch in range(first, last + 1)
        if epoch not in there[stage]
    )
    return f"epoch {epoch} of {stage}" if epoch else "the compression's"
