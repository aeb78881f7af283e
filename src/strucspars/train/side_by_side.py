"""Several runs at once in one process: on a GPU small networks leave room for each other.

Every run has its own thread, stream and, but for dropout, random generators: its neighbours do not change its outcome.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import torch

from strucspars.train.engine import is_one_of_several_processes, lost_processes_explained
from strucspars.train.observer import RunFailed, RunObserver
from strucspars.train.outcome import RunSummary
from strucspars.train.pipeline import run_pipeline
from strucspars.train.recipe import EngineRecipe, Recipe
from strucspars.train.run import SPARSIFIED, RunInterrupted, TrainingDiverged
from strucspars.train.run_folder import RunFolder
from strucspars.train.solver_pool import default_workers

SECONDS_BETWEEN_CHECKS = 0.5


class BaseRunFailed(RunFailed):
    """A run was not started because one that it builds on has failed; the error of that run is the cause."""


@dataclass(frozen=True)
class _BaseRun:
    """A run that another one builds on: by its first stage or, as a teacher, by its trained network."""

    path: Path
    is_teacher: bool

    @property
    def is_there(self) -> bool:
        """Whether the folder holds what is needed; of the files of a first stage, the plan is written last."""
        folder = RunFolder(self.path)
        if self.is_teacher:
            return folder.is_finished
        return folder.plan_path.is_file() and (folder.checkpoints / f"{SPARSIFIED}.pt").is_file()


def run_side_by_side(
    recipes: Mapping[Path, Recipe],
    *,
    jobs: int,
    observers: Sequence[RunObserver] = (),
    should_stop: Callable[[], bool] = lambda: False,
    executor: Executor | None = None,
) -> dict[Path, RunSummary | Exception]:
    """Run recipes in their folders, at most `jobs` at a time; returns the summary or the error of each.

    A run that fails does not stop the others, unless under torchrun: then any error but a diverged training is raised.
    Runs begin in order. One that builds on earlier ones waits, and lets others go first, until what it needs is there.
    """
    bases = _earlier_bases(recipes)
    outcomes: dict[Path, RunSummary | Exception] = {}

    def run(path: Path) -> None:
        try:
            if _stops_before_run(should_stop):
                raise RunInterrupted("not begun")
            _check_bases(bases[path], outcomes)
            outcomes[path] = run_pipeline(
                recipes[path], path, observers=observers, should_stop=should_stop, executor=executor
            )
        except Exception as error:
            # Processes of torchrun decide together on these two. After another error of one, the others wait for it.
            if is_one_of_several_processes() and not isinstance(error, RunInterrupted | TrainingDiverged):
                raise
            outcomes[path] = error

    waiting = list(recipes)
    running: set[Future[None]] = set()
    with lost_processes_explained():
        if jobs == 1:
            # In the main thread, which some libraries that a network may use require.
            for path in waiting:
                run(path)
            return outcomes
        with ThreadPoolExecutor(jobs) as threads:
            while waiting or running:
                ready = [path for path in waiting if all(b.path in outcomes or b.is_there for b in bases[path])]
                for path in ready[: jobs - len(running)]:
                    waiting.remove(path)
                    running.add(threads.submit(run, path))
                # With a timeout: Python handles signals in the main thread only, and one that the system gives to
                # another thread does not wake it. The end of a first stage is noticed then, too.
                done, running = wait(running, timeout=SECONDS_BETWEEN_CHECKS, return_when=FIRST_COMPLETED)
                for future in done:
                    future.result()
    return {path: outcomes[path] for path in recipes}


def wanted_workers(engine: EngineRecipe) -> int:
    """How many processes learn the channel orders of a run."""
    if engine.solver_workers is not None:
        return engine.solver_workers
    return default_workers(on_gpu=engine.device != "cpu" and torch.cuda.is_available())


def _earlier_bases(recipes: Mapping[Path, Recipe]) -> dict[Path, list[_BaseRun]]:
    """The runs that each run builds on; only earlier ones, so that one can always start."""
    bases: dict[Path, list[_BaseRun]] = {}
    # Recipes may name a folder by another path than it has here.
    earlier: dict[Path, Path] = {}
    for path, recipe in recipes.items():
        folder = RunFolder(path)
        # From its first checkpoint on, a run no longer needs the weights and plan of another one.
        source = None if folder.is_begun else recipe.sparsify.from_run
        teacher = None if folder.is_finished else recipe.finetune.teacher
        named = [(name, is_teacher) for name, is_teacher in ((source, False), (teacher, True)) if name is not None]
        found = [(earlier.get(Path(name).expanduser().resolve()), is_teacher) for name, is_teacher in named]
        bases[path] = [_BaseRun(base, is_teacher) for base, is_teacher in found if base is not None]
        earlier[path.resolve()] = path
    return bases


def _check_bases(bases: Sequence[_BaseRun], outcomes: Mapping[Path, RunSummary | Exception]) -> None:
    if is_one_of_several_processes():
        # Processes may see different files for a moment; the run itself refuses what is missing.
        return
    for base in bases:
        error = outcomes.get(base.path)
        # A failed run may still have what is needed of it.
        if isinstance(error, Exception) and not base.is_there:
            needed = f"{base.path} as a finished teacher" if base.is_teacher else f"the first stage of {base.path}"
            reason = " ".join(str(error).split()) or type(error).__name__
            raise BaseRunFailed(f"not begun: it needs {needed}, but that run failed: {reason}") from error


def _stops_before_run(should_stop: Callable[[], bool]) -> bool:
    """Whether to start no other run; under torchrun, all processes get the same answer."""
    if not is_one_of_several_processes():
        return should_stop()
    if not torch.distributed.is_initialized():
        # The first run connects the processes, and asks them.
        return False
    answers = [False] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(answers, should_stop())
    return any(answers)
