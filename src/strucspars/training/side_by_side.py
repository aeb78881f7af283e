"""Several runs at once in one process: on a GPU small networks leave room for each other.

Every run has a thread and a stream of its own. Its random numbers do not come from shared generators (dropout's
excepted), so its outcome does not depend on its neighbours.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from pathlib import Path

import torch

from strucspars.training.engine import is_one_of_several_processes
from strucspars.training.observer import Observer
from strucspars.training.outcome import RunSummary
from strucspars.training.pipeline import run_pipeline
from strucspars.training.recipe import Recipe
from strucspars.training.stage import RunInterrupted, TrainingDiverged

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

    In several processes it does, unless all of them have failed of it together: its error is raised.

    Returns:
        For every folder its summary, or what went wrong; a `RunInterrupted` too where the stop came before the run.
    """

    def outcome(path: Path) -> RunSummary | Exception:
        if _stops_before_run(should_stop):
            return RunInterrupted("not begun")
        try:
            return run_pipeline(recipes[path], path, observer=observer, should_stop=should_stop, executor=executor)
        except (RunInterrupted, TrainingDiverged) as error:
            # Processes decide on these together, so they are in step still.
            return error
        except Exception as error:
            if is_one_of_several_processes():
                # The others may wait for this one in the middle of this run: it must not begin another.
                raise
            return error

    if jobs == 1:
        # In the main thread, which some libraries that a network may use insist on.
        return {path: outcome(path) for path in recipes}
    with ThreadPoolExecutor(jobs) as threads:
        futures = {path: threads.submit(outcome, path) for path in recipes}
        # Python handles signals in the main thread only, and one that the system gave to another thread does not wake
        # it: it wakes by itself.
        while wait(futures.values(), timeout=SECONDS_BETWEEN_SIGNAL_CHECKS).not_done:
            pass
    return {path: future.result() for path, future in futures.items()}


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
