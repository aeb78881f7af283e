"""BLAS on one thread for a while, also where several threads of ours want that at the same time."""

import threading
from types import TracebackType

from threadpoolctl import threadpool_limits


class OneBlasThread:
    """A context that the first to enter sets up, and the last to leave takes down.

    The limit holds for the whole process. Were everyone to set and restore it for himself, who leaves first would lift
    it for the others, and who leaves last would restore what he found: one thread, for good.

    The channel orders are learned with many small matrix products: further threads gain little, and where other
    processes hold their cores they wait.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._limits: threadpool_limits | None = None

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._limits = threadpool_limits(limits=1, user_api="blas")
            self._inside += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0 and self._limits is not None:
                self._limits.restore_original_limits()


ONE_BLAS_THREAD = OneBlasThread()
