"""Files that are replaced whole or not at all, whenever the process or the machine dies."""

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# What helps wherever a file or a folder was to be written; each place adds its own.
DISK_REMEDIES = {
    errno.ENOSPC: "free some space on that disk",
    errno.EDQUOT: "free some of your disk quota",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
}


def reworded(error: OSError, message: str) -> OSError:
    """An error of the same kind and number that reads as the message alone.

    >>> error = reworded(FileNotFoundError(2, "No such file or directory"), "there is no plan at plan.json")
    >>> type(error).__name__, error.errno, str(error)
    ('FileNotFoundError', 2, 'there is no plan at plan.json')
    """
    kind = type(OSError(error.errno, "")) if error.errno else OSError
    result = kind(message)
    result.errno = error.errno
    return result


def check_readable(path: Path) -> None:
    """Raise an `OSError` that says what to do where a file cannot be opened: readers of some formats call it damaged.

    >>> check_readable(Path("nowhere.safetensors"))
    Traceback (most recent call last):
    FileNotFoundError: cannot read nowhere.safetensors: No such file or directory; give a file that you may read
    """
    try:
        path.open("rb").close()
    except OSError as error:
        raise reworded(error, f"cannot read {path}: {error.strerror}; give a file that you may read") from error


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


_NEW_FILE_REMEDIES = {
    **DISK_REMEDIES,
    errno.EACCES: "make the folder writable for you, or choose another path",
    errno.EPERM: "make the folder writable for you, or choose another path",
    errno.EROFS: "choose a disk that is not read-only",
    errno.ENOENT: "make the folder first, or choose another path",
    errno.ENOTDIR: "choose a path whose folders are folders",
    errno.EISDIR: "choose the path of a file",
    errno.ENAMETOOLONG: "choose a shorter name",
}


# What the folders of unfinished files are called, to know those that a killed process has left.
UNFINISHED = ".unfinished-"


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Give a file of the same name in an unfinished folder; it takes its place when the block ends well.

    Files that the block writes beside it, as formats of several files need, go with it. On any failure nothing is left,
    and what was there before stays. A link is followed: the file that it leads to is replaced, and the link stays.

    Raises:
        OSError: the file cannot be written; the message names it and says what to do.
    """
    target = followed(path)
    try:
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        # Beside the file, since a rename does not cross disks. Not named after it: the name may be as long as allowed.
        with tempfile.TemporaryDirectory(prefix=UNFINISHED, dir=target.parent) as folder:
            yield Path(folder) / target.name
            _publish(Path(folder), target)
    except OSError as error:
        # Ours have no number, and say all already.
        if error.errno is None:
            raise
        remedy = _NEW_FILE_REMEDIES.get(error.errno, "see to that, or choose another path")
        raise reworded(error, f"cannot write {path}: {error.strerror or error}; {remedy}") from error


def followed(path: Path) -> Path:
    """Where a link leads; any other path as it is."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def check_companion(path: Path, companion: Path) -> None:
    """Raise a `FileExistsError` if a file that would be replaced with `path` is there without it: it is someone else's.

    Args:
        path: the file to write.
        companion: another one that goes with it.
    """
    if os.path.lexists(companion) and not path.exists():
        raise FileExistsError(
            f"{companion} would be replaced together with {path}, but is there alone, so that it belongs to something "
            "else; move it away, or choose another path"
        )


def _publish(folder: Path, path: Path) -> None:
    """Move all files of the folder to where `path` is, that of its name last."""
    main = folder / path.name
    companions = sorted(file for file in folder.iterdir() if file != main)
    for file in companions:
        check_companion(path, path.with_name(file.name))
    for file in (*companions, main):
        with file.open("rb") as written:
            os.fsync(written.fileno())
    former: dict[Path, Path] = {}
    placed: list[Path] = []
    try:
        for file in companions:
            target = followed(path.with_name(file.name))
            if target.exists():
                former[target] = file.with_name(f"{len(former)}.former")
                os.replace(target, former[target])
            os.replace(file, target)
            placed.append(target)
        os.replace(main, path)
    except BaseException:
        for target in placed:
            target.unlink(missing_ok=True)
        for target, kept in former.items():
            os.replace(kept, target)
        raise
