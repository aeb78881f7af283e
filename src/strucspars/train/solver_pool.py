"""Worker processes that learn channel orders while the main one is busy with other runs, or saves its breath."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager

from threadpoolctl import threadpool_limits

# More do not pay: a refresh of the CIFAR networks takes a tenth of a second on one core.
MOST_WORKERS = 8


def default_workers(*, on_gpu: bool) -> int:
    """On a GPU the processor is free for it; on a CPU further processes would compete with the training."""
    return min(MOST_WORKERS, max(0, (os.cpu_count() or 1) - 2)) if on_gpu else 0


@contextmanager
def solver_pool(workers: int) -> Iterator[Executor | None]:
    """Worker processes for a while; None for none."""
    if workers == 0:
        yield None
        return
    # Spawned, not forked: a fork would copy threads' locks and the device's state as they happen to be.
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"), initializer=_prepare_worker)
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _prepare_worker() -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # Signals are the main process's to handle: it ends its workers itself.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # For good, not for a while: a small product gains nothing from further threads.
    threadpool_limits(limits=1, user_api="blas")


def _end_with_parent() -> None:
    """A worker whose main process was killed would wait for work forever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
