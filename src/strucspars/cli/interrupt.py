"""Ctrl-C and kill, as a polite request first."""

import os
import signal
import sys
import threading
import time
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SHOW_CURSOR = b"\x1b[?25h"
# `timeout` and some schedulers signal a process and then its group: the same request, heard twice.
ECHO_SECONDS = 0.2


class Interrupted(Exception):
    """Runs were stopped by a signal; what they had done is saved.

    Attributes:
        signal_number: of the signal.
    """

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.signal_number = signal_number


class StopRequest:
    """Asked as a function, tells whether SIGINT or SIGTERM has come. A second one, later, ends the process at once.

    Works while it is entered as a context, in the main thread.
    """

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self._event = threading.Event()
        self._former: dict[signal.Signals, Any] = {}

    def __call__(self) -> bool:
        """Whether a signal has come."""
        return self._event.is_set()

    def __enter__(self) -> "StopRequest":
        self._former = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.signal_number = number
        self._event.set()
        time.sleep(ECHO_SECONDS)
        for each in SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        # The next signal leaves no time to tidy up the terminal. Written past the buffers, whose locks may be held.
        if sys.stderr.isatty():
            os.write(sys.stderr.fileno(), SHOW_CURSOR)
