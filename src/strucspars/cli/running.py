"""Recipes into run folders: with progress, several at a time, and ready to stop."""

import os
import signal
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from strucspars.cli.errors import RunFailed, explained
from strucspars.cli.interrupt import Interrupted, StopRequest
from strucspars.cli.output import Output, is_first_process
from strucspars.cli.progress import Renamed, RunProgress
from strucspars.cli.run_state import run_state
from strucspars.runs.atomic import write_text_atomic
from strucspars.runs.folder import RunFolder
from strucspars.training.outcome import RunSummary
from strucspars.training.outcome_text import percent
from strucspars.training.pipeline import run_pipeline
from strucspars.training.recipe import EngineRecipe, Recipe
from strucspars.training.recipe_reading import read_recipe, recipe_yaml
from strucspars.training.solver_pool import default_workers, solver_pool
from strucspars.training.stage import RunInterrupted, TrainingDiverged

Outcomes = Mapping[Path, RunSummary | Exception]


def run_name(recipe: Recipe) -> str:
    """What a run is called, and its folder unless someone says otherwise: the recipe's name, and a seed that is not 0.

    So one run of a recipe, several of it, and those of a table find each other's folders.

    >>> run_name(Recipe(name="demo")), run_name(Recipe(name="demo", seed=2))
    ('demo', 'demo-seed2')
    """
    return recipe.name if recipe.seed == 0 else f"{recipe.name}-seed{recipe.seed}"


def seeded_recipes(source: str, overrides: Sequence[str], seeds: Sequence[int] | None) -> list[Recipe]:
    """The recipe once per seed; with its own seed if none is given."""
    if seeds is None:
        return [read_recipe(source, overrides)]
    return [read_recipe(source, [*overrides, f"seed={seed}"]) for seed in seeds]


def run_all(recipes: Mapping[Path, Recipe], *, jobs: int, output: Output) -> Outcomes:
    """Run recipes in their folders, or go on there. One that fails does not stop the others.

    Returns:
        For every folder the summary, or what went wrong.

    Raises:
        ValueError: several at a time, but in several processes.
        Interrupted: a signal came, and not everything is finished.
    """
    if not recipes:
        return {}
    if jobs > 1 and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(f"--jobs {jobs} is for one process; under torchrun runs come one after the other")
    for path in recipes:
        _say_where(path, output)
    engines = [recipe.engine for recipe in recipes.values()]
    with (
        StopRequest() as stop,
        solver_pool(max(map(_solver_workers, engines), default=0)) as executor,
        RunProgress(output.console, quiet=output.is_quiet) as progress,
    ):
        runner = _Runner(recipes, stop, progress, executor)
        if jobs == 1:
            # In the main thread, which some libraries that a network may use insist on.
            outcomes: Outcomes = {path: runner.outcome(path) for path in recipes}
        else:
            with ThreadPoolExecutor(jobs) as threads:
                outcomes = dict(zip(recipes, threads.map(runner.outcome, recipes), strict=True))
    _check_not_interrupted(outcomes, stop)
    output.remark("")
    return outcomes


def finished_runs(outcomes: Outcomes) -> dict[Path, RunSummary]:
    """Those that came to an end."""
    return {path: outcome for path, outcome in outcomes.items() if isinstance(outcome, RunSummary)}


def failed_runs(outcomes: Outcomes) -> dict[Path, str]:
    """Those that did not, and why."""
    return {path: why(outcome) for path, outcome in outcomes.items() if isinstance(outcome, Exception)}


def raise_failures(outcomes: Outcomes) -> None:
    """Raise what went wrong: the error itself where all failed of the same, else who failed of what."""
    errors = [outcome for outcome in outcomes.values() if isinstance(outcome, Exception)]
    reasons: dict[str, list[Path]] = {}
    for path, reason in failed_runs(outcomes).items():
        reasons.setdefault(reason, []).append(path)
    if not errors:
        return
    if len(errors) == len(outcomes) and len(reasons) == 1:
        if isinstance(errors[0], TrainingDiverged):
            raise RunFailed(str(errors[0])) from errors[0]
        raise errors[0]
    who = "; ".join(f"{', '.join(map(str, paths))}: {reason}" for reason, paths in reasons.items())
    raise RunFailed(f"{len(errors)} of {len(outcomes)} runs failed: {who}") from errors[0]


def why(error: Exception) -> str:
    """An error in a line."""
    explanation = explained(error)
    if explanation is not None:
        return explanation.text
    return str(error) if isinstance(error, TrainingDiverged) else f"{type(error).__name__}: {error}"


def runs_document(outcomes: Outcomes) -> dict[str, Any]:
    """Finished and failed runs for a script."""
    return {
        "runs": [
            {"folder": str(path), "summary": summary.to_json()} for path, summary in finished_runs(outcomes).items()
        ],
        "failed": [{"folder": str(path), "error": reason} for path, reason in failed_runs(outcomes).items()],
    }


class _Runner:
    """Runs one recipe after another, in whichever thread it is asked to."""

    def __init__(
        self, recipes: Mapping[Path, Recipe], stop: StopRequest, progress: RunProgress, executor: Executor | None
    ) -> None:
        self._recipes, self._stop, self._progress, self._executor = recipes, stop, progress, executor

    def outcome(self, path: Path) -> RunSummary | Exception:
        """The summary, or what went wrong."""
        if self._stop():
            return RunInterrupted("not begun")
        recipe = self._recipes[path]
        name = run_name(recipe)
        self._progress.run_started(name)
        was_finished = run_state(path).is_finished
        outcome = self._run(recipe, path, name)
        self._progress.run_ended(name, "" if was_finished else _last_word(outcome))
        return outcome

    def _run(self, recipe: Recipe, path: Path, name: str) -> RunSummary | Exception:
        # The only stage of a dense network is no finetuning.
        stages = {"finetune": "train"} if recipe.kind == "dense" else {}
        observer = Renamed(self._progress, name, stages=stages)
        try:
            if is_first_process():
                _forget_failed_start(path, recipe)
            return run_pipeline(recipe, path, observer=observer, should_stop=self._should_stop, executor=self._executor)
        except Exception as error:
            return error

    def _should_stop(self) -> bool:
        if not self._stop():
            return False
        self._progress.stopping()
        return True


def _say_where(path: Path, output: Output) -> None:
    state = run_state(path)
    if state.is_finished:
        output.remark(f"{path} is finished already")
    elif state.is_begun:
        output.remark(f"going on in {path}: {state.words}")
    else:
        output.remark(f"starting in {path}")


def _forget_failed_start(path: Path, recipe: Recipe) -> None:
    """Put the recipe in place of one whose run failed before its first step, for example because of missing data.

    There is nothing to go on from, and the next attempt must be free to say where the data are.
    """
    folder = RunFolder(path)
    if folder.recipe_path.is_file() and not run_state(path).is_begun:
        with folder.locked():
            if not run_state(path).is_begun:
                write_text_atomic(folder.recipe_path, recipe_yaml(recipe))


def _solver_workers(engine: EngineRecipe) -> int:
    if engine.solver_workers is not None:
        return engine.solver_workers
    return default_workers(on_gpu=engine.device != "cpu" and torch.cuda.is_available())


def _last_word(outcome: RunSummary | Exception) -> str:
    if isinstance(outcome, RunSummary):
        return f"finished, accuracy {percent(outcome.converted_top1)}"
    return "stopped" if isinstance(outcome, RunInterrupted) else "failed"


def _check_not_interrupted(outcomes: Outcomes, stop: StopRequest) -> None:
    interrupted = {path: error for path, error in outcomes.items() if isinstance(error, RunInterrupted)}
    if interrupted:
        assert stop.signal_number is not None
        name = signal.Signals(stop.signal_number).name
        saved = "\n".join(f"  {path}: {error}" for path, error in interrupted.items())
        raise Interrupted(f"stopped by {name}; everything so far is saved:\n{saved}", stop.signal_number)
