"""Files that are replaced whole or not at all, whenever the process or the machine dies."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from strucspars.export.os_errors import DISK_REMEDIES, reworded

_REMEDIES = {
    **DISK_REMEDIES,
    errno.EACCES: "make the folder writable",
    errno.EPERM: "make the folder writable",
    errno.EROFS: "use a disk that is not read-only",
    errno.ENOENT: "create the folder",
    errno.ENOTDIR: "create the folder",
}


def write_text_atomic(path: str | os.PathLike[str], text: str) -> None:
    """Replace a file's content by the text, in UTF-8, all or nothing."""
    write_bytes_atomic(path, text.encode())


def write_bytes_atomic(path: str | os.PathLike[str], data: bytes) -> None:
    """Replace a file's content, all or nothing.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_bytes_atomic(f"{folder}/notes", b"all of it")
    ...     Path(f"{folder}/notes").read_bytes()
    b'all of it'
    """
    with atomic_file(path) as unfinished:
        unfinished.write_bytes(data)


@contextlib.contextmanager
def atomic_file(path: str | os.PathLike[str], *, former: Path | None = None) -> Iterator[Path]:
    """Give an unfinished file beside `path` to write to; it takes the name `path` when the block ends well.

    On any failure the unfinished file is removed, and what was under `path` stays. The unfinished file's name does not
    depend on the process, so that what a killed process left is overwritten by the next; the run folder's lock sees to
    it that there is one writer.

    Args:
        path: the file to replace.
        former: another name to keep its present version under, which must exist then; None: it goes.

    Raises:
        OSError: the file cannot be written; the message says why, that the former version is kept, and what to do.
    """
    path = Path(path)
    unfinished = _unfinished(path)
    try:
        # A leftover may be a link to a foreign file, which writing would overwrite.
        unfinished.unlink(missing_ok=True)
        yield unfinished
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())
        if former is not None:
            _keep(path, former)
        os.replace(unfinished, path)
    except OSError as error:
        raise unwritable(path, error) from error
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
    sync_folder(path.parent)


def _keep(path: Path, former: Path) -> None:
    """Give the file the name `former`, while it keeps its own until the next version takes that."""
    link = _unfinished(former)
    link.unlink(missing_ok=True)
    try:
        os.link(path, link)
    except OSError:
        # Some file systems have no links. Then for a moment the file has the name `former` alone.
        os.replace(path, former)
        return
    try:
        os.replace(link, former)
    finally:
        # Where both are one file already, since a process was killed after this, the rename does nothing, by standard.
        link.unlink(missing_ok=True)


def _unfinished(path: Path) -> Path:
    return path.with_name(f".{path.name}.unfinished")


def sync_folder(path: Path) -> None:
    """Wait until the folder's list of names is on the disk, without which a power failure may undo a rename."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems know no such order; the rename stands all the same.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise reworded(error, f"{path} took a new file, but cannot make it last: {error.strerror}") from error
    finally:
        os.close(descriptor)


def unwritable(path: Path, error: OSError) -> OSError:
    """The same failure, said in terms of the file, with what is kept and what to do."""
    remedy = _REMEDIES.get(error.errno or 0, "see to that")
    reason = error.strerror or error
    return reworded(
        error,
        f"cannot write {path}: {reason}; the previous version of it is kept. "
        f"{remedy[0].upper()}{remedy[1:]}, then run the same command again",
    )
