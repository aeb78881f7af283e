"""Several runs at once in one process: on a GPU small networks leave room for each other.

Every run has a thread and a stream of its own. Its random numbers do not come from shared generators (dropout's
excepted), so its outcome does not depend on its neighbours.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from pathlib import Path

from strucspars.training.engine import is_one_of_several_processes
from strucspars.training.observer import Observer
from strucspars.training.outcome import RunSummary
from strucspars.training.pipeline import run_pipeline
from strucspars.training.recipe import Recipe
from strucspars.training.stage import RunInterrupted

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

    Returns:
        For every folder its summary, or what went wrong; a `RunInterrupted` too where the stop came before the run.
    """

    def outcome(path: Path) -> RunSummary | Exception:
        if should_stop():
            return RunInterrupted("not begun")
        try:
            return run_pipeline(recipes[path], path, observer=observer, should_stop=should_stop, executor=executor)
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
