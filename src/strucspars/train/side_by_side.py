"""Several runs at once in one process: on a GPU small networks leave room for each other.

Every run has a thread and a stream of its own. Its random numbers, except those of dropout, come from generators of its
own, so its outcome does not depend on its neighbours.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

import torch

from strucspars.train.checkpoint import has_named
from strucspars.train.engine import is_one_of_several_processes, lost_processes_explained
from strucspars.train.observer import RunObserver
from strucspars.train.outcome import RunSummary
from strucspars.train.pipeline import run_pipeline
from strucspars.train.recipe import FINETUNE, Recipe
from strucspars.train.run import SPARSIFIED, RunInterrupted, TrainingDiverged
from strucspars.train.run_folder import RunFolder

SECONDS_BETWEEN_SIGNAL_CHECKS = 0.5


class BaseRunFailed(RuntimeError):
    """A run was not begun, because one that it builds on has failed; its error is the cause of this one."""


@dataclass(frozen=True, kw_only=True)
class _BaseRun:
    """A run that another one builds on: its first stage is needed, or, as a teacher, its end."""

    path: Path
    is_teacher: bool

    def __str__(self) -> str:
        return f"{self.path} as a finished teacher" if self.is_teacher else f"the first stage of {self.path}"

    @property
    def is_there(self) -> bool:
        """Whether its folder holds what is needed; not reliable while the run goes on."""
        folder = RunFolder(self.path)
        if self.is_teacher:
            return folder.is_finished
        return has_named(folder.checkpoints, SPARSIFIED) and folder.plan_path.is_file()


def run_side_by_side(
    recipes: Mapping[Path, Recipe],
    *,
    jobs: int,
    observers: Sequence[RunObserver] = (),
    should_stop: Callable[[], bool] = lambda: False,
    executor: Executor | None = None,
) -> dict[Path, RunSummary | Exception]:
    """Run recipes in their folders, at most `jobs` at a time. One that fails does not stop the others.

    Under torchrun it does, unless its training diverged: its error is raised.

    Runs begin in the order of `recipes`, but one that builds on earlier ones lets others go first until these have come
    far enough: to the end of the first stage that it takes over, to the very end of its teacher.

    Returns:
        For every folder its summary, or what went wrong; a `RunInterrupted` also where the stop came before the run, a
        `BaseRunFailed` where it could not begin because of another one.
    """
    runs = _Runs(recipes, observers, should_stop, executor)
    with lost_processes_explained():
        if jobs == 1:
            # In the main thread, which some libraries that a network may use require.
            for path in recipes:
                runs.run(path)
        else:
            _run_in_threads(runs, list(recipes), jobs)
    return {path: runs.outcomes[path] for path in recipes}


def _run_in_threads(runs: "_Runs", waiting: list[Path], jobs: int) -> None:
    running: set[Future[None]] = set()
    with ThreadPoolExecutor(jobs) as threads:
        while waiting or running:
            ready = [path for path in waiting if runs.is_ready(path)]
            for path in ready[: jobs - len(running)]:
                waiting.remove(path)
                running.add(threads.submit(runs.run, path))
            # With a timeout: Python handles signals in the main thread only, and one that the system gives to another
            # thread does not wake it. It also sees then which first stages are over.
            done, running = wait(running, timeout=SECONDS_BETWEEN_SIGNAL_CHECKS, return_when=FIRST_COMPLETED)
            for future in done:
                future.result()


@final
class _Runs:
    """Runs and their outcomes, for which others may wait."""

    def __init__(
        self,
        recipes: Mapping[Path, Recipe],
        observers: Sequence[RunObserver],
        should_stop: Callable[[], bool],
        executor: Executor | None,
    ) -> None:
        self._recipes, self._observers, self._should_stop, self._executor = recipes, observers, should_stop, executor
        self._bases = _earlier_bases(recipes)
        self._past_first_stage: set[Path] = set()
        self.outcomes: dict[Path, RunSummary | Exception] = {}

    def is_ready(self, path: Path) -> bool:
        """Whether there is nothing to wait for: what the run builds on is there or has ended."""
        return all(
            base.path in self.outcomes or (base.path in self._past_first_stage and not base.is_teacher)
            for base in self._bases[path]
        )

    def run(self, path: Path) -> None:
        """Run one that is ready."""
        self.outcomes[path] = self._outcome(path)

    def _outcome(self, path: Path) -> RunSummary | Exception:
        if _stops_before_run(self._should_stop):
            return RunInterrupted("not begun")
        try:
            self._check_bases(path)
            return run_pipeline(
                self._recipes[path],
                path,
                observers=[_FirstStageWatch(lambda: self._past_first_stage.add(path)), *self._observers],
                should_stop=self._should_stop,
                executor=self._executor,
            )
        except (RunInterrupted, TrainingDiverged) as error:
            # Processes decide on these together, so they can begin the next run together.
            return error
        except Exception as error:
            if is_one_of_several_processes():
                # The others may wait for this one in the middle of this run.
                raise
            return error

    def _check_bases(self, path: Path) -> None:
        if is_one_of_several_processes():
            # Processes may see different files for a moment; the run itself refuses what is missing.
            return
        for base in self._bases[path]:
            error = self.outcomes.get(base.path)
            # A failed run may still have what is needed of it.
            if isinstance(error, Exception) and not base.is_there:
                reason = " ".join(str(error).split()) or type(error).__name__
                raise BaseRunFailed(f"not begun: it needs {base}, but that run failed: {reason}") from error


@final
class _FirstStageWatch(RunObserver):
    """Tells when a run has come to its finetuning; its files alone do not: some may be of an earlier attempt."""

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell = tell

    def stage_started(self, run: str, stage: str, *, epochs: int, steps: int, done_epochs: int) -> None:
        """Tell, if it is the finetuning."""
        if stage == FINETUNE:
            self._tell()


def _earlier_bases(recipes: Mapping[Path, Recipe]) -> dict[Path, list[_BaseRun]]:
    """For every run the ones before it that it builds on, so that there is always one that waits for no other."""
    bases: dict[Path, list[_BaseRun]] = {}
    # Recipes may name a folder by another path than it has here.
    earlier: dict[Path, Path] = {}
    for path, recipe in recipes.items():
        named = [(base, earlier.get(base.path.resolve())) for base in _base_runs(recipe, RunFolder(path))]
        bases[path] = [replace(base, path=here) for base, here in named if here is not None]
        earlier[path.resolve()] = path
    return bases


def _base_runs(recipe: Recipe, folder: RunFolder) -> list[_BaseRun]:
    """The runs without which a recipe cannot begin in a folder, or go on there."""
    source, teacher = recipe.sparsify.from_run, recipe.finetune.teacher
    bases = []
    # From its first checkpoint on, a run has weights and a plan of its own.
    if source is not None and not folder.is_begun:
        bases.append(_BaseRun(path=Path(source).expanduser(), is_teacher=False))
    if teacher is not None and not folder.is_finished:
        bases.append(_BaseRun(path=Path(teacher).expanduser(), is_teacher=True))
    return bases


def _stops_before_run(should_stop: Callable[[], bool]) -> bool:
    """Whether to begin no other run; under torchrun, all processes get the same answer."""
    if not is_one_of_several_processes():
        return should_stop()
    if not torch.distributed.is_initialized():
        # The first run connects the processes, and asks them itself.
        return False
    answers = [False] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(answers, should_stop())
    return any(answers)
