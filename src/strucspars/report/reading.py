"""Reading a run folder for a report: whatever is whole is shown, whatever is not is named."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from strucspars.bench.results import BenchReport
from strucspars.core.plan import GroupingPlan
from strucspars.io.files import RECIPE_BYTES, read_bytes
from strucspars.report.one_shot import ONE_SHOT_STATE, OneShotOutcome, read_one_shot
from strucspars.report.run_parts import EpochLayers, PartReader, StoredMatrix
from strucspars.train.outcome import RunSummary, read_summary, stage_seconds
from strucspars.train.recipe import COMPRESS, FINETUNE, FIRST_STAGES, TRAIN, Recipe, stage_epochs
from strucspars.train.run_folder import RunFolder

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


__all__ = ["EpochLayers", "RunData", "read_run"]


@dataclass(frozen=True, eq=False, kw_only=True)
class RunData:
    """What a run folder holds.

    Attributes:
        path: the folder.
        name: of the folder, which tells seeds apart; the recipe has the name of the experiment.
        recipe: None where it is missing or damaged.
        recipe_text: the file as it is; empty where it is missing.
        summary: None if the run is not finished, or the file is damaged.
        rows: the whole rows of the metrics.
        plan: None before compression, and for other kinds of runs.
        weight_shapes: layer name to the shape of its weight, of the layers that may be grouped, in network order.
        dynamics: the stored epochs of the first stage.
        importance: `start` and `end` to S of every layer, where stored; `now` of a run that is in its first stage.
        environment: versions and hardware; empty where missing.
        decisions: what the run decided once; empty where nothing.
        one_shot: what one-shot compression came to; None for runs that train.
        bench: what `strucspars bench RUN --out RUN/bench.json` measured; None where there is no such file.
        seconds: of every stage so far.
        state: `finished`, or how far it has come, such as `in stage sparsify, epoch 12 of 100`.
        is_finished: whether nothing is left to do: it has a summary file, or is one-shot.
        problems: a sentence for every part that is damaged, or missing where it should be there.
    """

    path: Path
    name: str
    recipe: Recipe | None
    recipe_text: str
    summary: RunSummary | None
    rows: tuple[Mapping[str, Any], ...]
    plan: GroupingPlan | None
    weight_shapes: Mapping[str, tuple[int, ...]]
    dynamics: tuple[EpochLayers, ...]
    importance: Mapping[str, Mapping[str, StoredMatrix]]
    environment: Mapping[str, Any]
    decisions: Mapping[str, Any]
    one_shot: OneShotOutcome | None
    bench: BenchReport | None
    seconds: Mapping[str, float]
    state: str
    is_finished: bool
    problems: tuple[str, ...]


def read_run(path: str | os.PathLike[str]) -> RunData:
    """Everything that a run folder has to say. Nothing in it is executed, and nothing is written.

    Raises:
        ValueError: the folder is no run folder, or is not there.
    """
    folder = RunFolder(path)
    _check_run(folder)
    reader = PartReader(folder)
    recipe_text = reader.part(lambda: _text(folder.recipe_path)) or ""
    recipe = _recipe(reader)
    rows = reader.rows()
    plan = reader.part(folder.load_plan)
    shapes = reader.weight_shapes(plan)
    last_epoch = max((row["epoch"] for row in rows if row["stage"] == "sparsify"), default=0)
    data = RunData(
        path=folder.path,
        name=folder.path.resolve().name,
        recipe=recipe,
        recipe_text=recipe_text,
        summary=reader.part(lambda: read_summary(folder)),
        rows=rows,
        plan=plan,
        weight_shapes=shapes,
        dynamics=reader.dynamics(shapes, last_epoch=last_epoch),
        importance=reader.importance(shapes, norm="l1" if recipe is None else recipe.sparsify.importance),
        environment=reader.json_object(folder.environment_path),
        decisions=reader.json_object(folder.decisions_path) if folder.decisions_path.exists() else {},
        one_shot=reader.part(lambda: read_one_shot(folder)),
        bench=reader.bench(),
        seconds=stage_seconds(rows),
        state=_state(folder, rows, recipe),
        is_finished=folder.summary_json_path.exists() or folder.one_shot_path.exists(),
        problems=(),
    )
    return replace(data, problems=(*reader.problems, *_missing(data, reader.problems)))


def _check_run(folder: RunFolder) -> None:
    if not folder.path.is_dir():
        raise ValueError(f"there is no folder {folder.path}; give the folder of a run")
    marks = (folder.recipe_path, folder.metrics_path, folder.summary_json_path)
    if not any(mark.exists() for mark in marks):
        raise ValueError(
            f"{folder.path} is not a run folder: it has none of {', '.join(mark.name for mark in marks)}; "
            "give a folder that `strucspars run` made"
        )


def _text(path: Path) -> str:
    return read_bytes(path, limit=RECIPE_BYTES).decode(errors="replace") if path.exists() else ""


def _recipe(reader: PartReader) -> Recipe | None:
    path = reader.folder.recipe_path
    if not path.exists():
        reader.note(f"{path.name} is missing")
        return None
    return reader.part(reader.folder.load_recipe)


def _state(folder: RunFolder, rows: Rows, recipe: Recipe | None) -> str:
    if folder.summary_json_path.exists():
        return "finished"
    if folder.one_shot_path.exists():
        return ONE_SHOT_STATE
    if not rows:
        return "before its first epoch's end"
    stage, epoch = rows[-1]["stage"], rows[-1]["epoch"]
    if stage == "compress":
        return "compressed, not finetuned yet"
    epochs = "" if recipe is None else f" of {stage_epochs(recipe, stage)}"
    return f"in stage {stage}, epoch {epoch}{epochs}"


def _missing(run: RunData, damaged: Sequence[str]) -> Iterator[str]:
    """What should be there by now, and is not; what is named as damaged already is not named again."""
    stages = {row["stage"] for row in run.rows}
    is_one_shot = run.state == ONE_SHOT_STATE
    if not is_one_shot:
        yield from _missing_rows(run, damaged)
    if run.recipe is None or run.recipe.kind != "strucspars":
        return
    if (is_one_shot or "compress" in stages) and run.plan is None and not any("plan.json" in line for line in damaged):
        yield "plan.json is missing: there are no groups to show"
    epochs = {row["epoch"] for row in run.rows if row["stage"] == "sparsify"}
    absent = len(epochs - {layers.epoch for layers in run.dynamics})
    if absent:
        yield f"dynamics/ lacks {absent} of {len(epochs)} epochs: levels and churn are shown without them"
    for moment, is_due in (
        ("start", bool(epochs)),
        ("end", is_one_shot or (bool(epochs) and "compress" in stages)),
    ):
        if is_due and moment not in run.importance:
            yield f"importance/{moment}.npz is missing: there are no matrices of that moment"


def _missing_rows(run: RunData, damaged: Sequence[str]) -> Iterator[str]:
    if run.is_finished and not run.rows:
        yield "metrics.jsonl is missing or empty: there are no curves"
    elif run.recipe is not None and not any("metrics.jsonl" in line for line in damaged):
        lacking = lacking_rows(run.recipe, run.rows, is_finished=run.is_finished)
        if lacking is not None:
            yield lacking


NAMED_RUNS = 2


def shared_problems(problems: Mapping[str, Sequence[str]]) -> list[str]:
    """A line for every problem, with the runs that have it; those of many runs are counted.

    Args:
        problems: of every run, by what to call it.

    >>> shared_problems({"first": ["plan.json is damaged"], "second": [], "third": ["plan.json is damaged"]})
    ['first, third: plan.json is damaged']
    """
    runs: dict[str, list[str]] = {}
    for run, sentences in problems.items():
        for sentence in sentences:
            runs.setdefault(sentence, []).append(run)
    return [f"{_named(names)}: {sentence}" for sentence, names in runs.items()]


def _named(runs: Sequence[str]) -> str:
    more = len(runs) - NAMED_RUNS
    return ", ".join(runs[:NAMED_RUNS]) + (f" and {more} more" if more > 0 else "")
