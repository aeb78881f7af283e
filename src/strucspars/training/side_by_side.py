"""Several runs at once in one process: on a GPU small networks leave room for each other.

Every run has a thread and a stream of its own. Its random numbers do not come from shared generators (dropout's
excepted), so its outcome does not depend on its neighbours.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path

from strucspars.training.observer import Observer
from strucspars.training.outcome import RunSummary
from strucspars.training.pipeline import run_pipeline
from strucspars.training.recipe import Recipe
from strucspars.training.stage import RunInterrupted


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
        For every folder its summary, or what went wrong; runs that were not begun when the stop came have the
        same `RunInterrupted` as those that were.
    """

    def one(path: Path) -> RunSummary | Exception:
        if should_stop():
            return RunInterrupted("not begun")
        try:
            return run_pipeline(recipes[path], path, observer=observer, should_stop=should_stop, executor=executor)
        except Exception as error:
            return error

    with ThreadPoolExecutor(jobs) as threads:
        return dict(zip(recipes, threads.map(one, recipes), strict=True))
