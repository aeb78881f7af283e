"""Errors as one readable line and an exit status, and Ctrl-C as a request to stop."""

import os
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import typer

from strucspars.cli import missing_extra
from strucspars.cli.console import is_first_process
from strucspars.train.observer import RunFailed

FAILED = 1
WRONG_USE = 2
BY_SIGNAL = 128

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SHOW_CURSOR = b"\x1b[?25h"
# `timeout` and some schedulers signal a process and then its group: one request arrives twice.
ECHO_SECONDS = 0.2


class Interrupted(Exception):
    """Runs were stopped by signal `signal_number`, and their state is saved."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.signal_number = signal_number


def explained(error: BaseException) -> tuple[str, int] | None:
    """The message for an error, and the exit status; None for an unexpected one, which needs its traceback.

    >>> explained(FileNotFoundError("there is no saved model at here"))
    ('there is no saved model at here', 2)
    """
    if isinstance(error, _ARGUMENT_ERROR):
        return _argument_words(error), WRONG_USE
    # By name: importing torch takes seconds.
    if type(error).__name__ == "OutOfMemoryError":
        remedy = "use a smaller data.batch_size or fewer --jobs; the same command resumes from the last checkpoint"
        return f"the GPU's memory is full; {remedy}", FAILED
    if isinstance(error, ImportError):
        # A missing module of this package is a bug, which needs its traceback.
        is_ours = isinstance(error, ModuleNotFoundError) and (error.name or "").startswith("strucspars")
        return None if is_ours else (missing_extra(error) or _one_line(error), WRONG_USE)
    if isinstance(error, ValueError | _NOT_THERE):
        return _one_line(error), WRONG_USE
    return (_one_line(error), FAILED) if isinstance(error, OSError | RunFailed) else None


def reported(error: BaseException, arguments: Sequence[str]) -> int:
    """Print an error on the standard error and return the exit status. An unexpected error is raised again."""
    if isinstance(error, Interrupted):
        if is_first_process():
            print(f"{error}\nto resume{_same_program()} {shlex.join(arguments)}", file=sys.stderr)
        return BY_SIGNAL + error.signal_number
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        print("error: interrupted", file=sys.stderr)
        return BY_SIGNAL + signal.SIGINT
    explanation = explained(error)
    if explanation is None:
        raise error
    if "--debug" in arguments:
        traceback.print_exception(error)
    words, status = explanation
    print(f"error: {words}", file=sys.stderr)
    return status


class StopRequest:
    """Tells the main thread whether SIGINT or SIGTERM arrived; a second signal ends the process at once."""

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self._former: dict[signal.Signals, Any] = {}

    def __call__(self) -> bool:
        """Whether a signal has arrived."""
        return self.signal_number is not None

    def __enter__(self) -> "StopRequest":
        self._former = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.signal_number = number
        time.sleep(ECHO_SECONDS)
        for each in SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        # The next signal ends the process before it can restore the terminal. Buffers may be locked: write past them.
        if sys.stderr.isatty():
            os.write(sys.stderr.fileno(), SHOW_CURSOR)


def _argument_words(error: Any) -> str:
    """The message of typer, with the refused value."""
    words = " ".join(error.format_message().split()).rstrip(".").replace("Value error, ", "")
    # Newer versions of typer check values by pydantic, whose messages leave the value out.
    refused = [repr(problem["input"]) for problem in getattr(error.__cause__, "errors", list)()]
    if not all(value in words for value in refused):
        words = f"{words}, got {', '.join(refused)}"
    takes_overrides = error.ctx is not None and any(each.name == "overrides" for each in error.ctx.command.params)
    if takes_overrides and words.startswith("No such option"):
        words += "; options of a recipe are given as key=value, such as engine.device=cpu"
    return f"{words}; see --help"


def _one_line(error: BaseException) -> str:
    """The message of an error; lines after the first follow it, separated by semicolons."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        from strucspars.io.files import REMEDIES

        return f"{error.filename}: {error.strerror}; {REMEDIES.get(error.errno or 0, 'check that path')}"
    first, *others = [" ".join(line.split()) for line in (str(error) or type(error).__name__).splitlines()]
    return f"{first} {'; '.join(others)}".strip()


_NOT_THERE = FileNotFoundError | FileExistsError | NotADirectoryError | IsADirectoryError | PermissionError
# typer does not export the common base of its errors about arguments.
_ARGUMENT_ERROR: type[BaseException] = typer.BadParameter.__mro__[2]


def _same_program() -> str:
    """How the program was called; a run of several processes needs all of them again."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes == 1:
        return ": strucspars" if Path(sys.argv[0]).name == "strucspars" else ": python -m strucspars"
    here = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    if here == processes:
        return f": torchrun --nproc-per-node {here} -m strucspars"
    # The rendezvous options of the other machines are not known here.
    where = " on every machine, with torchrun's rendezvous options as before"
    return f"{where}: torchrun --nnodes {processes // here} --nproc-per-node {here} -m strucspars"
