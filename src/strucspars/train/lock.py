"""One process per run folder, by a lock that dies with the process."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from strucspars.io.files import disk_error, reworded

LOCK_NAME = ".lock"

_held: set[int] = set()


class RunFolderBusy(RuntimeError):
    """Another process, or another part of this one, works in the run folder."""


@contextlib.contextmanager
def folder_lock(path: Path, *, is_first: bool = False) -> Iterator[None]:
    """Hold the folder for this process alone while the block runs.

    The kernel releases the lock when the process ends. The lock file stays: removing it would let a
    third process lock a new file of that name while a second still waits on the old one.

    With `is_first`, a folder that any process has held before is refused: what was read there without the lock may have
    changed.
    """
    descriptor = _opened(path, os.O_EXCL if is_first else 0)
    _held.add(descriptor)
    try:
        _acquire(path, descriptor)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        # A forked child that leaves the block has dropped its copy already.
        if descriptor in _held:
            _held.remove(descriptor)
            os.close(descriptor)


def was_locked(path: Path) -> bool:
    """Whether some process has held the folder, or holds it now."""
    return os.path.lexists(path / LOCK_NAME)


def _opened(path: Path, more_flags: int) -> int:
    """A descriptor of the lock file."""
    try:
        # Links are not followed: the process number would be written into a foreign file.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | more_flags
        descriptor = os.open(path / LOCK_NAME, flags, 0o666)
    except FileExistsError as error:
        raise RunFolderBusy(
            f"another process has just begun a run in {path}; wait for it, or use another folder"
        ) from error
    except OSError as error:
        raise disk_error("lock", path / LOCK_NAME, error) from error
    if not (path / LOCK_NAME).is_file():
        os.close(descriptor)
        raise ValueError(f"{path / LOCK_NAME} is no regular file; delete it")
    return descriptor


def _acquire(path: Path, descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise RunFolderBusy(
            f"the run folder {path} is in use by {_holder(descriptor)}; wait for it, stop it, or use another folder"
        ) from error
    except OSError as error:
        raise reworded(
            error,
            f"the file system of {path} refuses locks ({error.strerror}), so nothing would keep two processes from "
            "writing there; put the run folder on a local disk",
        ) from error


def _holder(descriptor: int) -> str:
    text = os.pread(descriptor, 20, 0).strip()
    return f"process {int(text)}" if text.isdigit() else "another process"


def _drop_in_child() -> None:
    """A lock lives as long as any copy of its descriptor: forked workers must not outlive their parent with one."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_drop_in_child)
