"""Where one of several processes fails, the others lose their connection to it: they should tell why, not that."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch import distributed

from strucspars.cli.errors import FAILED, Explanation, OtherProcessFailed, explained
from strucspars.train.engine import is_one_of_several_processes

KEY = "failure"
SET_BY_TORCHRUN = ("RANK", "MASTER_ADDR", "MASTER_PORT")
# The store answers at once, or its process is gone.
STORE_TIMEOUT = timedelta(seconds=5)


@contextmanager
def failures_shared() -> Iterator[None]:
    """Tell the other processes of an error, the first that tells; where another told first, raise that.

    An error that has an explanation is this process's own. Others may be what is left of a broken connection.

    Raises:
        OtherProcessFailed: in place of an error that nobody expects, if another process failed before.
    """
    try:
        yield
    except Exception as error:
        if not is_one_of_several_processes() or not all(name in os.environ for name in SET_BY_TORCHRUN):
            raise
        explanation = explained(error)
        own = explanation or Explanation(f"{type(error).__name__}: {error}", FAILED)
        rank, first = _first_failure(own)
        if explanation is None and rank != os.environ["RANK"]:
            raise OtherProcessFailed(f"process {rank}: {first.text}", first.exit_status) from error
        raise


def _first_failure(own: Explanation) -> tuple[str, Explanation]:
    """The process that failed first, and why: this one unless another has told before."""
    told = json.dumps([os.environ["RANK"], own.text, own.exit_status])
    try:
        store = _store()
        store.compare_set(KEY, "", told)
        told = store.get(KEY).decode()
    except distributed.DistError:
        # Whoever kept the store is gone: nobody can be told, and nothing can be heard.
        pass
    rank, text, exit_status = json.loads(told)
    return rank, Explanation(text, exit_status)


def _store() -> Any:
    """Where the processes found each other; it needs no connection between them."""
    server = distributed.TCPStore(  # type: ignore[attr-defined]  # torch lists neither
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=STORE_TIMEOUT,
        wait_for_workers=False,
    )
    # torchrun keeps the store when it starts its processes again: what failed then is over.
    return distributed.PrefixStore(  # type: ignore[attr-defined]  # as above
        f"strucspars/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", server
    )
