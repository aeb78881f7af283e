"""Recipes into run folders: with progress, several at a time, and ready to stop."""

import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from strucspars.cli.console import Output
from strucspars.cli.errors import RunFailed, explained
from strucspars.cli.interrupt import Interrupted, StopRequest
from strucspars.cli.progress import RunProgress
from strucspars.cli.shared_failure import failures_shared
from strucspars.report.one_shot import ONE_SHOT_STATE
from strucspars.train.outcome import RunSummary, read_metrics
from strucspars.train.recipe import EngineRecipe, Recipe, stage_epochs
from strucspars.train.recipe_reading import read_recipe
from strucspars.train.run_folder import RunFolder
from strucspars.train.side_by_side import BaseRunFailed, run_side_by_side
from strucspars.train.solver_pool import default_workers, solver_pool
from strucspars.train.stage import RunInterrupted, TrainingDiverged


@dataclass(frozen=True)
class RunState:
    """How far a run has come.

    Attributes:
        is_begun: there is something to go on from, or to keep.
        is_finished: there is nothing left to do.
        words: the same for people.
        is_one_shot: there is a network of one-shot compression instead of a run.
    """

    is_begun: bool
    is_finished: bool
    words: str
    is_one_shot: bool = False


def run_state(path: Path) -> RunState:
    """How far the run in a folder has come; a folder that is not there has not begun."""
    folder = RunFolder(path)
    if not folder.recipe_path.is_file():
        return RunState(False, False, "not begun")
    if folder.summary_json_path.is_file():
        return RunState(True, True, "finished")
    if folder.is_one_shot:
        return RunState(True, False, ONE_SHOT_STATE, is_one_shot=True)
    rows = read_metrics(folder)
    if not rows:
        return RunState(folder.is_begun, False, "in its first epoch" if folder.is_begun else "not begun")
    stage, epoch = rows[-1]["stage"], rows[-1]["epoch"]
    if stage == "compress":
        return RunState(True, False, "compressed, not finetuned yet")
    epochs = stage_epochs(read_recipe(folder.recipe_path), stage)
    return RunState(True, False, f"{stage}, epoch {epoch} of {epochs} done")


Outcomes = Mapping[Path, RunSummary | Exception]


def run_name(recipe: Recipe) -> str:
    """What a run is called, and its folder unless someone says otherwise: the recipe's name, and a seed that is not 0.

    So one run of a recipe, several of it, and those of a table find each other's folders.

    Raises:
        ValueError: the recipe's name is more than a name, so that the folder would lie elsewhere.

    >>> run_name(Recipe(name="demo")), run_name(Recipe(name="demo", seed=2))
    ('demo', 'demo-seed2')
    """
    if recipe.name in (".", "..") or any(sign in recipe.name for sign in "/\\\0"):
        raise ValueError(
            f"name: {recipe.name!r} cannot name a run folder: it must be one part of a path, without / or \\; "
            "change it in the recipe, or with name=..."
        )
    return recipe.name if recipe.seed == 0 else f"{recipe.name}-seed{recipe.seed}"


def seeded_recipes(source: str, overrides: Sequence[str], seeds: Sequence[int] | None) -> list[Recipe]:
    """The recipe once per seed; with its own seed if none is given."""
    if seeds is None:
        return [read_recipe(source, overrides)]
    return [read_recipe(source, [*overrides, f"seed={seed}"]) for seed in seeds]


def run_all(recipes: Mapping[Path, Recipe], *, jobs: int, output: Output) -> Outcomes:
    """Run recipes in their folders, or go on there. One that fails stops none but those that need it.

    Returns:
        For every folder the summary, or what went wrong.

    Raises:
        ValueError: several at a time, but in several processes.
        Interrupted: a signal came, and not everything is finished.
        OtherProcessFailed: of several processes another one failed.
    """
    if not recipes:
        return {}
    if jobs > 1 and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(f"--jobs {jobs} is for one process; under torchrun runs come one after the other")
    for path in recipes:
        _say_where(path, output)
    engines = [recipe.engine for recipe in recipes.values()]
    with (
        failures_shared(),
        StopRequest() as stop,
        solver_pool(max(map(_solver_workers, engines), default=0)) as executor,
        RunProgress(output.console, quiet=output.is_quiet) as progress,
    ):

        def should_stop() -> bool:
            if stop():
                progress.stopping()
            return stop()

        outcomes = run_side_by_side(recipes, jobs=jobs, observer=progress, should_stop=should_stop, executor=executor)
    _check_not_interrupted(outcomes, stop)
    output.remark("")
    return outcomes


def finished_runs(outcomes: Outcomes) -> dict[Path, RunSummary]:
    """Those that came to an end."""
    return {path: outcome for path, outcome in outcomes.items() if isinstance(outcome, RunSummary)}


def failed_runs(outcomes: Outcomes) -> dict[Path, str]:
    """Those that did not, and why."""
    return {path: why(outcome) for path, outcome in outcomes.items() if isinstance(outcome, Exception)}


def raise_failures(outcomes: Outcomes, *, of_export: Exception | None = None) -> None:
    """Raise what went wrong: the error itself where all failed of the same, else who failed of what.

    Args:
        outcomes: of all runs.
        of_export: what went wrong when the finished ones were exported.
    """
    errors = [outcome for outcome in outcomes.values() if isinstance(outcome, Exception)]
    reasons: dict[str, list[Path]] = {}
    for path, reason in failed_runs(outcomes).items():
        reasons.setdefault(reason, []).append(path)
    if not errors:
        if of_export is not None:
            raise of_export
        return
    # Those that could not begin because of another run failed of the same as that one.
    causes = {why(error): error for error in errors if not isinstance(error, BaseRunFailed)}
    if len(errors) == len(outcomes) and len(causes) == 1:
        (cause,) = causes.values()
        if isinstance(cause, TrainingDiverged):
            raise RunFailed(str(cause)) from cause
        raise cause
    who = "; ".join(f"{', '.join(map(str, paths))}: {reason}" for reason, paths in reasons.items())
    also = "" if of_export is None else f"; and not all others could be exported: {why(of_export)}"
    raise RunFailed(f"{len(errors)} of {len(outcomes)} runs failed: {who}{also}") from errors[0]


def why(error: Exception) -> str:
    """An error in a line."""
    explanation = explained(error)
    if explanation is not None:
        return explanation.text
    if isinstance(error, BaseRunFailed | TrainingDiverged):
        return str(error)
    return f"{type(error).__name__}: {error}"


def runs_document(outcomes: Outcomes) -> dict[str, Any]:
    """Finished and failed runs for a script."""
    return {
        "runs": [
            {"folder": str(path), "summary": summary.to_json()} for path, summary in finished_runs(outcomes).items()
        ],
        "failed": [{"folder": str(path), "error": reason} for path, reason in failed_runs(outcomes).items()],
    }


def _say_where(path: Path, output: Output) -> None:
    state = run_state(path)
    if state.is_one_shot or (state.is_finished and not RunFolder(path).model_path.is_file()):
        return  # it will be refused, or say itself what is written again
    if state.is_finished:
        output.remark(f"{path} is finished already")
    elif state.is_begun:
        output.remark(f"going on in {path}: {state.words}")
    else:
        output.remark(f"starting in {path}")


def _solver_workers(engine: EngineRecipe) -> int:
    if engine.solver_workers is not None:
        return engine.solver_workers
    return default_workers(on_gpu=engine.device != "cpu" and torch.cuda.is_available())


def _check_not_interrupted(outcomes: Outcomes, stop: StopRequest) -> None:
    interrupted = {path: error for path, error in outcomes.items() if isinstance(error, RunInterrupted)}
    if interrupted:
        # torchrun stops a process by SIGTERM, so that is what one was stopped by that heard of it from another.
        number = signal.SIGTERM if stop.signal_number is None else stop.signal_number
        saved = "\n".join(f"  {path}: {error}" for path, error in interrupted.items())
        failed = {path: reason for path, reason in failed_runs(outcomes).items() if path not in interrupted}
        others = "".join(f"\n  {path} failed before: {reason}" for path, reason in failed.items())
        name = signal.Signals(number).name
        raise Interrupted(f"stopped by {name}; everything so far is saved:\n{saved}{others}", number)
