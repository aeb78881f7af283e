"""Worker processes that learn the channel orders."""

import importlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager

from threadpoolctl import threadpool_limits

# A refresh of the CIFAR networks takes a tenth of a second on one core: more workers do not pay.
MOST_WORKERS = 8


def default_workers(*, on_gpu: bool) -> int:
    """Several for training on a GPU; none on a CPU, where training needs all cores."""
    return min(MOST_WORKERS, max(0, (os.cpu_count() or 1) - 2)) if on_gpu else 0


@contextmanager
def solver_pool(workers: int) -> Iterator[Executor | None]:
    """A pool of worker processes, closed at the end of the block; None for 0 workers."""
    if workers == 0:
        yield None
        return
    # Spawned: a fork would copy locks of other threads and the state of the GPU.
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"), initializer=_prepare_worker)
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _prepare_worker() -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # Ctrl-C reaches the whole process group, and the main process may still need its workers to finish an epoch.
    # SIGTERM must end a worker: that is how the pool ends the others after one has died.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The limit finds only libraries that are loaded, and `strucspars` loads its parts on first use.
    importlib.import_module("strucspars.core.learning")
    threadpool_limits(limits=1, user_api="blas")


def _end_with_parent() -> None:
    """End this worker with the main process: otherwise it would wait for work forever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
