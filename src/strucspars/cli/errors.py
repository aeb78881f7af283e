"""Errors as one readable line and an exit status, and Ctrl-C as a request to stop."""

import os
import shlex
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import typer

from strucspars.cli.console import is_first_process
from strucspars.io.files import REMEDIES

FAILED = 1
WRONG_USE = 2
BY_SIGNAL = 128

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SHOW_CURSOR = b"\x1b[?25h"
# `timeout` and some schedulers signal a process and then its group: that is one request, received twice.
ECHO_SECONDS = 0.2


class RunFailed(Exception):
    """A run did not reach its result; the message says why."""


class Interrupted(Exception):
    """Runs were stopped by a signal, and their state is saved.

    Attributes:
        signal_number: of the signal.
    """

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.signal_number = signal_number


@dataclass(frozen=True)
class Explanation:
    """An error for the user.

    Attributes:
        text: what is wrong and what to do.
        exit_status: of the process.
    """

    text: str
    exit_status: int


def explained(error: BaseException) -> Explanation | None:
    """What to tell the user about an error; None for an unexpected one, which needs its traceback.

    >>> explained(FileNotFoundError("there is no saved model at here"))
    Explanation(text='there is no saved model at here', exit_status=2)
    """
    for kinds, exit_status, words in _TABLE:
        if isinstance(error, kinds) if isinstance(kinds, tuple) else _is_named(error, kinds):
            return Explanation(words(error), exit_status)
    return None


def reported(error: BaseException, arguments: Sequence[str]) -> int:
    """Print an error on the standard error and return the exit status. An unexpected error is raised again."""
    if isinstance(error, Interrupted):
        if is_first_process():
            print(f"{error}\nto go on{_same_program()} {shlex.join(arguments)}", file=sys.stderr)
        return BY_SIGNAL + error.signal_number
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        print("error: interrupted", file=sys.stderr)
        return BY_SIGNAL + signal.SIGINT
    explanation = explained(error)
    if explanation is None:
        raise error
    if "--debug" in arguments:
        traceback.print_exception(error)
    print(f"error: {explanation.text}", file=sys.stderr)
    return explanation.exit_status


class StopRequest:
    """Called, tells whether SIGINT or SIGTERM has come since it was entered as a context, in the main thread.

    A second signal ends the process at once.
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

    def __exit__(self, *error: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.signal_number = number
        self._event.set()
        time.sleep(ECHO_SECONDS)
        for each in SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        # The next signal ends the process before it can restore the terminal. Buffers may be locked: write past them.
        if sys.stderr.isatty():
            os.write(sys.stderr.fileno(), SHOW_CURSOR)


def _is_named(error: BaseException, name: str) -> bool:
    """Whether this is an error of the class of this full name."""
    return any(f"{kind.__module__}.{kind.__name__}" == name for kind in type(error).__mro__)


def _argument_words(error: Any) -> str:
    """The message of typer, with the value that it refuses."""
    words = " ".join(error.format_message().split()).rstrip(".").replace("Value error, ", "")
    # Newer versions of typer check values by pydantic, whose messages leave the value out.
    refused = [repr(problem["input"]) for problem in getattr(error.__cause__, "errors", list)()]
    if not all(value in words for value in refused):
        words = f"{words}, got {', '.join(refused)}"
    takes_overrides = error.ctx is not None and any(each.name == "overrides" for each in error.ctx.command.params)
    if takes_overrides and words.startswith("No such option"):
        words += "; what a recipe decides is given as key=value, such as engine.device=cpu"
    return f"{words}; --help tells more"


def _memory_words(error: BaseException) -> str:
    remedy = "use a smaller data.batch_size or fewer --jobs; the same command goes on from the last checkpoint"
    return f"the GPU's memory is full; {remedy}"


def _import_words(error: BaseException) -> str:
    """Our own messages name the extra to install; that of Python names the module."""
    if "pip install" in str(error):
        return _one_line(error)
    module = error.name if isinstance(error, ModuleNotFoundError) else None
    return f"{module} is missing: pip install 'strucspars[cli]'" if module else f"{_one_line(error)}; reinstall it"


def _one_line(error: BaseException) -> str:
    """The message of an error; lines after the first follow it, separated by semicolons."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}; {REMEDIES.get(error.errno or 0, 'check that path')}"
    first, *others = [" ".join(line.split()) for line in (str(error) or type(error).__name__).splitlines()]
    return f"{first} {'; '.join(others)}".strip()


_NOT_THERE = (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError)
# typer does not export the common base of its errors about arguments.
_ARGUMENT_ERROR: type[BaseException] = typer.BadParameter.__mro__[2]

# Kinds of errors, their exit status and message; the first row that fits counts. Of classes whose modules take seconds
# to import, the full name.
_TABLE: tuple[tuple[tuple[type[BaseException], ...] | str, int, Callable[[BaseException], str]], ...] = (
    ((_ARGUMENT_ERROR,), WRONG_USE, _argument_words),
    ("torch.OutOfMemoryError", FAILED, _memory_words),
    ("strucspars.train.run.TrainingDiverged", FAILED, _one_line),
    ("strucspars.train.side_by_side.BaseRunFailed", FAILED, _one_line),
    ((ImportError,), WRONG_USE, _import_words),
    ((ValueError, *_NOT_THERE), WRONG_USE, _one_line),
    ("strucspars.train.run_folder.RunFolderBusy", FAILED, _one_line),
    ((OSError, RunFailed), FAILED, _one_line),
)


def _same_program() -> str:
    """How the program was called; a run of several processes needs all of them again."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes == 1:
        return ": strucspars" if Path(sys.argv[0]).name == "strucspars" else ": python -m strucspars"
    here = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    if processes == here:
        return f": torchrun --nproc-per-node {here} -m strucspars"
    # The rendezvous options of the other machines are not known here.
    where = " on every machine, with torchrun's rendezvous options as before"
    return f"{where}: torchrun --nnodes {processes // here} --nproc-per-node {here} -m strucspars"
