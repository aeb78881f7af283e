"""Errors as one readable line and an exit status."""

import os
import shlex
import signal
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
import typer

from strucspars.cli.console import is_first_process
from strucspars.cli.interrupt import Interrupted
from strucspars.io.files import REMEDIES
from strucspars.train.lock import RunFolderBusy

FAILED = 1
WRONG_USE = 2
BY_SIGNAL = 128

# What typer raises for wrong arguments, and what its parameters raise, share this base, which it does not export.
_ArgumentError: type[BaseException] = typer.BadParameter.__mro__[2]
_NOT_THERE = (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError)


class RunFailed(Exception):
    """A run did not come to what it should; the message says how."""


class OtherProcessFailed(Exception):
    """Another of the processes that torchrun has started failed, and this one could not go on without it.

    Attributes:
        exit_status: of that process.
    """

    def __init__(self, message: str, exit_status: int) -> None:
        super().__init__(message)
        self.exit_status = exit_status


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
    """What to tell the user about an error; None for one that nobody expects, whose trace is needed.

    >>> explained(FileNotFoundError("there is no saved model at here"))
    Explanation(text='there is no saved model at here', exit_status=2)
    """
    if isinstance(error, _ArgumentError):
        return Explanation(f"{_argument_words(cast(typer.BadParameter, error))}; --help tells more", WRONG_USE)
    if isinstance(error, OtherProcessFailed):
        return Explanation(_one_line(error), error.exit_status)
    if isinstance(error, torch.OutOfMemoryError):
        remedy = "use a smaller data.batch_size or fewer --jobs; the same command goes on from the last checkpoint"
        return Explanation(f"the GPU's memory is full; {remedy}", FAILED)
    if isinstance(error, ImportError):
        return Explanation(f"{_one_line(error)}; install it to use this", WRONG_USE)
    if isinstance(error, (ValueError, *_NOT_THERE)):
        return Explanation(_one_line(error), WRONG_USE)
    if isinstance(error, OSError | RunFolderBusy | RunFailed):
        return Explanation(_one_line(error), FAILED)
    return None


def reported(error: BaseException, arguments: Sequence[str]) -> int:
    """Print an error on the standard error; returns the exit status. One that nobody expects is raised again."""
    if isinstance(error, Interrupted):
        if is_first_process():
            print(f"{error}\nto go on{_going_on()} {shlex.join(arguments)}", file=sys.stderr)
        return BY_SIGNAL + error.signal_number
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        print("error: interrupted", file=sys.stderr)
        return BY_SIGNAL + signal.SIGINT
    explanation = explained(error)
    if explanation is None:
        raise error
    if "--debug" in arguments:
        traceback.print_exception(error)
    # An error of one process only would be lost if it kept quiet; those who have heard of it need not repeat it.
    if is_first_process() or not isinstance(error, OtherProcessFailed):
        print(f"error: {explanation.text}", file=sys.stderr)
    return explanation.exit_status


def _argument_words(error: typer.BadParameter) -> str:
    """What typer says, with the value that it refuses."""
    words = " ".join(error.format_message().split()).rstrip(".").replace("Value error, ", "")
    # Newer versions check values by pydantic, whose words leave the value out.
    refused = [repr(problem["input"]) for problem in getattr(error.__cause__, "errors", list)()]
    if not all(value in words for value in refused):
        words = f"{words}, got {', '.join(refused)}"
    takes_overrides = error.ctx is not None and any(each.name == "overrides" for each in error.ctx.command.params)
    if takes_overrides and words.startswith("No such option"):
        words += "; what a recipe decides is given as key=value, such as engine.device=cpu"
    return words


def _one_line(error: BaseException) -> str:
    """The message of an error; what it lists on lines of their own stands after the first, with semicolons."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}; {REMEDIES.get(error.errno or 0, 'check that path')}"
    first, *others = [" ".join(line.split()) for line in (str(error) or type(error).__name__).splitlines()]
    return f"{first} {'; '.join(others)}".strip()


def _going_on() -> str:
    """Where and how the program was called; processes that torchrun has started must all be there again."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes == 1:
        return ": strucspars" if Path(sys.argv[0]).name == "strucspars" else ": python -m strucspars"
    here = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    if processes == here:
        return f": torchrun --nproc-per-node {here} -m strucspars"
    # How the machines found each other cannot be told from here.
    where = " on every machine, with torchrun's rendezvous options as before"
    return f"{where}: torchrun --nnodes {processes // here} --nproc-per-node {here} -m strucspars"
