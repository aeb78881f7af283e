"""What the library logs, as lines on the standard error."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from strucspars.cli.output import is_first_process


class _Lines(logging.Handler):
    """Writes to the standard error of the moment: while a progress display is up, that is above it."""

    def emit(self, record: logging.LogRecord) -> None:
        if is_first_process():
            print(f"{record.levelname.lower()}: {record.getMessage()}", file=sys.stderr, flush=True)


@contextmanager
def warnings_as_lines() -> Iterator[None]:
    """Show the library's warnings for a while, one line each."""
    logger = logging.getLogger("strucspars")
    handler = _Lines(logging.WARNING)
    propagate = logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate
