"""Several runs at once in one process: on a GPU small networks leave room for each other.

Every run has a thread and a stream of its own. Its random numbers do not come from shared generators (dropout's
excepted), so its outcome does not depend on its neighbours.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from strucspars.train.checkpoint import has_named
from strucspars.train.engine import is_one_of_several_processes, lost_processes_explained
from strucspars.train.observer import Observer, Several, Silence
from strucspars.train.outcome import RunSummary
from strucspars.train.pipeline import run_pipeline
from strucspars.train.preparation import SPARSIFIED
from strucspars.train.recipe import FINETUNE, Recipe
from strucspars.train.run_folder import RunFolder
from strucspars.train.stage import RunInterrupted, TrainingDiverged


class BaseRunFailed(RuntimeError):
    """A run was not begun, because one that it builds on has failed; its error is the cause of this one."""


@dataclass(frozen=True, kw_only=True)
class BaseRun:
    """A run that another one builds on.

    Attributes:
        path: its folder.
        is_teacher: it must be finished; else its first stage is enough.
    """

    path: Path
    is_teacher: bool

    def __str__(self) -> str:
        return f"{self.path} as a finished teacher" if self.is_teacher else f"the first stage of {self.path}"

    @property
    def is_there(self) -> bool:
        """Whether its folder holds what is needed of it; not to be asked while it is being written."""
        folder = RunFolder(self.path)
        if self.is_teacher:
            return folder.is_finished
        return has_named(folder.checkpoints, SPARSIFIED) and folder.plan_path.is_file()

    def failed(self, error: Exception) -> BaseRunFailed:
        """What to raise for a run that cannot begin because this one ended in an error."""
        reason = " ".join(str(error).split()) or type(error).__name__
        return BaseRunFailed(f"not begun: it needs {self}, but that run failed: {reason}")


def base_runs(recipe: Recipe, path: Path) -> list[BaseRun]:
    """The runs without which a recipe cannot begin in a folder, or go on there."""
    folder, source, teacher = RunFolder(path), recipe.sparsify.from_run, recipe.finetune.teacher
    bases = []
    # From its first checkpoint on, a run has weights and a plan of its own.
    if source is not None and not folder.is_begun:
        bases.append(BaseRun(path=Path(source).expanduser(), is_teacher=False))
    if teacher is not None and not folder.is_finished:
        bases.append(BaseRun(path=Path(teacher).expanduser(), is_teacher=True))
    return bases


SECONDS_BETWEEN_SIGNAL_CHECKS = 0.5


def run_side_by_side(
    recipes: Mapping[Path, Recipe],
    *,
    jobs: int,
    observer: Observer | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    executor: Executor | None = None,
) -> dict[Path, RunSummary | Exception]:
    """Run recipes in their folders, at most `jobs` at a time. One that fails does not stop the others.

    In several processes it does, unless the training diverged: its error is raised.

    They begin in the order of `recipes`, but one that builds on earlier ones lets others go first until these have come
    far enough: to the end of the first stage that it takes over, to the very end as its teacher.

    Returns:
        For every folder its summary, or what went wrong; a `RunInterrupted` too where the stop came before the run, a
        `BaseRunFailed` where it could not begin because of another one.
    """
    runs = _Runs(recipes, observer or Silence(), should_stop, executor)
    with lost_processes_explained():
        if jobs == 1:
            # In the main thread, which some libraries that a network may use insist on.
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
            # Python handles signals in the main thread only, and one that the system gave to another thread does not
            # wake it: it wakes by itself. Then it also sees which first stages are over.
            done, running = wait(running, timeout=SECONDS_BETWEEN_SIGNAL_CHECKS, return_when=FIRST_COMPLETED)
            for future in done:
                future.result()


class _Runs:
    """Runs, and what has become of them: others may wait for it."""

    def __init__(
        self,
        recipes: Mapping[Path, Recipe],
        observer: Observer,
        should_stop: Callable[[], bool],
        executor: Executor | None,
    ) -> None:
        self._recipes, self._observer, self._should_stop, self._executor = recipes, observer, should_stop, executor
        self._bases = _earlier_bases(recipes)
        self._past_first_stage: set[Path] = set()
        self.outcomes: dict[Path, RunSummary | Exception] = {}

    def is_ready(self, path: Path) -> bool:
        """Whether there is nothing left to wait for, be it that what the run builds on will never come."""
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
                observer=Several(_FirstStageWatch(lambda: self._past_first_stage.add(path)), self._observer),
                should_stop=self._should_stop,
                executor=self._executor,
            )
        except (RunInterrupted, TrainingDiverged) as error:
            # Processes decide on these together, so they are in step still.
            return error
        except Exception as error:
            if is_one_of_several_processes():
                # The others may wait for this one in the middle of this run: it must not begin another.
                raise
            return error

    def _check_bases(self, path: Path) -> None:
        if is_one_of_several_processes():
            # They may see different files for a moment; what the run itself refuses, they refuse together.
            return
        for base in self._bases[path]:
            outcome = self.outcomes.get(base.path)
            # One that cannot go on, or only its finetuning, may still have what is needed of it.
            if isinstance(outcome, Exception) and not base.is_there:
                raise base.failed(outcome) from outcome


class _FirstStageWatch(Silence):
    """Tells when a run has come to its finetuning, now or in an earlier process: what the first stage leaves is there.

    Only the run knows: of the files, one may be of before, and the other new.
    """

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell = tell

    def stage_started(self, run: str, stage: str, *, epochs: int, steps: int, done_epochs: int) -> None:
        """Tell, if it is the finetuning."""
        if stage == FINETUNE:
            self._tell()


def _earlier_bases(recipes: Mapping[Path, Recipe]) -> dict[Path, list[BaseRun]]:
    """For every run those before it that it builds on. So there is always one that waits for nobody."""
    bases: dict[Path, list[BaseRun]] = {}
    # Recipes may name a folder otherwise than it is named here, such as by its whole path.
    earlier: dict[Path, Path] = {}
    for path, recipe in recipes.items():
        named = [(base, earlier.get(base.path.resolve())) for base in base_runs(recipe, path)]
        bases[path] = [replace(base, path=here) for base, here in named if here is not None]
        earlier[path.resolve()] = path
    return bases


def _stops_before_run(should_stop: Callable[[], bool]) -> bool:
    """Whether to begin no other run; of several processes, either all begin it or none does."""
    if not is_one_of_several_processes():
        return should_stop()
    if not torch.distributed.is_initialized():
        # The first run makes them known to each other, and asks them itself.
        return False
    answers = [False] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(answers, should_stop())
    return any(answers)
