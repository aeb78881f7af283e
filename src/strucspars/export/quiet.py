"""Exporters talk a lot: on the standard output, in warnings, in logs."""

import io
import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout


@contextmanager
def without_chatter() -> Iterator[None]:
    """Keep what other libraries print, warn and log to themselves; their errors pass."""
    disabled = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def first_line(error: BaseException) -> str:
    """What an error says first, without colours, to stand inside a sentence."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    lines = (line.strip() for line in plain.splitlines())
    return next((line.rstrip(".;: ") for line in lines if line), type(error).__name__)
