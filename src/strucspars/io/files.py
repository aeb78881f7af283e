"""Atomic writing of files, and reading that refuses pipes, devices and files that are too large.

    with replace_file("plan.json") as unfinished:      # a temporary file, renamed when the block ends without an error
        unfinished.write_text(plan.to_json())
    write_text("plan.json", plan.to_json())            # the same for content in memory
    text = read_text("plan.json", limit=RECORD_BYTES)
    image = Image.open(open_file("cat.jpg", limit=IMAGE_BYTES))

A failed write keeps the previous file. Every `OSError` names the file and a remedy. A symbolic link is itself replaced;
with `follow_link=True`, for paths that a user gives, its target is.
"""

import contextlib
import errno
import os
import stat
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

REMEDIES = {
    errno.ENOSPC: "free some space on that disk",
    errno.EDQUOT: "free some of your disk quota",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
    errno.EACCES: "give yourself access to it and its folder, or choose another path",
    errno.EPERM: "give yourself access to it and its folder, or choose another path",
    errno.EROFS: "choose a disk that is not read-only",
    errno.ENOENT: "make its folder first, or choose a path that is there",
    errno.ENOTDIR: "a file stands in the way; choose another path",
    errno.EEXIST: "a file stands in the way; choose another path",
    errno.EISDIR: "choose the path of a file",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ELOOP: "it is a link; delete it, or choose another path",
}

# Size limits for reading, by kind of file; what this package writes is far smaller.
RECIPE_BYTES = 2**18
RECORD_BYTES = 2**26
IMAGE_BYTES = 2**28
ARRAYS_BYTES = 2**29
CHECKPOINT_BYTES = 2**35

# Prefix of the folders of unfinished files, to recognise those that a killed process has left.
UNFINISHED = ".unfinished-"

_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def reworded(error: OSError, message: str) -> OSError:
    """An error of the same type and errno whose text is the message alone."""
    kind = type(OSError(error.errno, "")) if error.errno else OSError
    result = kind(message)
    result.errno = error.errno
    return result


def disk_error(action: str, path: str | os.PathLike[str], error: OSError, note: str = "") -> OSError:
    """The error as a sentence that names the action, the file, the reason and the remedy."""
    remedy = REMEDIES.get(error.errno or 0, "check that path and its disk, or choose another path")
    return reworded(error, f"cannot {action} {path}: {error.strerror}; {note}{remedy}")


def open_file(path: str | os.PathLike[str], *, limit: int | None = None) -> BinaryIO:
    """Open a regular file for reading.

    Args:
        path: the file, or a link to it.
        limit: number of bytes that it may have.

    Raises:
        OSError: it cannot be opened, or is a folder.
        ValueError: it is a named pipe, a socket or a device, which might never end, or larger than the limit.
    """
    try:
        # Non-blocking, so that opening a pipe does not wait for its other end.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            os.close(descriptor)
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    except OSError as error:
        # Opening a socket fails.
        if error.errno != errno.ENXIO:
            raise disk_error("read", path, error) from error
        raise ValueError(f"cannot read {path}: it is a socket; give a regular file") from error
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "a special file")
        raise ValueError(f"cannot read {path}: it is {kind}; give a regular file")
    if limit is not None and status.st_size > limit:
        os.close(descriptor)
        raise _too_large(path, limit)
    return open(descriptor, "rb")


def check_readable(path: str | os.PathLike[str], *, limit: int | None = None) -> None:
    """Raise as `open_file` does, for libraries that open the file themselves."""
    open_file(path, limit=limit).close()


def read_bytes(path: str | os.PathLike[str], *, limit: int = RECORD_BYTES) -> bytes:
    """The content of a regular file; errors as `open_file`."""
    with open_file(path, limit=limit) as file:
        # The file may grow meanwhile, and files in /proc report no size.
        bound = min(limit, os.fstat(file.fileno()).st_size + 2**20)
        try:
            content = file.read(bound + 1)
        except OSError as error:
            raise disk_error("read", path, error) from error
    if len(content) > bound:
        raise _too_large(path, limit)
    return content


def read_text(path: str | os.PathLike[str], *, limit: int = RECORD_BYTES) -> str:
    """The content of a UTF-8 text file, without a byte order mark; errors as `open_file`."""
    try:
        return read_bytes(path, limit=limit).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error.reason}); restore it from a copy, or save it so") from error


def check_not_packed(file: BinaryIO) -> None:
    """Raise a `ValueError` for a compressed zip file: `torch.save` does not compress, so it may be a zip bomb.

    Other files pass. The file is rewound to its beginning.
    """
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            unpacked = sum(entry.file_size for entry in archive.infolist())
        if unpacked > file.seek(0, os.SEEK_END):
            raise ValueError(f"its entries are packed, and would become {unpacked:,} bytes")
    file.seek(0)


def _too_large(path: str | os.PathLike[str], limit: int) -> ValueError:
    return ValueError(f"cannot read {path}: it has more than {limit:,} bytes, so it is not what belongs there")


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Replace a file's content by the text, in UTF-8, all or nothing."""
    write_bytes(path, text.encode())


def write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Replace a file's content, all or nothing."""
    with replace_file(path) as unfinished:
        unfinished.write_bytes(data)


@contextmanager
def replace_file(
    path: str | os.PathLike[str], *, former: Path | None = None, follow_link: bool = False
) -> Iterator[Path]:
    """Yield a path in a temporary folder; the file written there replaces `path` when the block ends without an error.

    Other files that the block writes in that folder are moved with it. On an error the previous files stay.

    Args:
        path: the file to replace.
        former: another name for its present version, which must exist then; None: it is deleted.
        follow_link: if `path` is a link, replace its target instead of the link.

    Raises:
        OSError: the file cannot be written; the message says why, and what helps.
    """
    path = Path(path)
    target = followed(path) if follow_link else path
    try:
        if target.is_dir() and not target.is_symlink():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with unfinished_folder(target.parent) as folder:
            yield folder / target.name
            _publish(folder, target, former)
    except OSError as error:
        # An error without strerror has a message of ours already.
        if error.strerror is None:
            raise
        note = "what was there is kept; " if target.is_file() else ""
        raise disk_error("write", path, error, note) from error
    sync_folder(target.parent)


@contextmanager
def unfinished_folder(place: Path) -> Iterator[Path]:
    """A temporary folder in `place`, on the same disk as the file to replace, so that a rename works."""
    # Not named after the file, whose name may have the maximum length already.
    with tempfile.TemporaryDirectory(prefix=UNFINISHED, dir=place, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def followed(path: Path) -> Path:
    """The target of a link; any other path unchanged."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def check_companion(path: Path, companion: Path) -> None:
    """Raise a `FileExistsError` if a companion of `path` exists without it, and so belongs to something else."""
    if os.path.lexists(companion) and not path.exists():
        raise FileExistsError(
            f"{companion} would be replaced together with {path}, but is there alone, so that it belongs to something "
            "else; move it away, or choose another path"
        )


def sync_folder(path: Path) -> None:
    """Flush the folder's directory to the disk; otherwise a power failure may undo a rename."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems do not support this; the rename is done anyway.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise reworded(error, f"{path} took a new file, but cannot make it last: {error.strerror}") from error
    finally:
        os.close(descriptor)


def _publish(folder: Path, path: Path, former: Path | None) -> None:
    """Move all files of the folder beside `path`, the main one last."""
    main = folder / path.name
    companions = sorted(file for file in folder.iterdir() if file != main)
    for file in companions:
        check_companion(path, path.with_name(file.name))
    for file in (*companions, main):
        with file.open("rb") as written:
            os.fsync(written.fileno())
    if former is not None:
        _keep(path, former, folder / "former")
    replaced: dict[Path, Path] = {}
    placed: list[Path] = []
    try:
        for file in companions:
            target = followed(path.with_name(file.name))
            if target.exists():
                replaced[target] = file.with_name(f"{len(replaced)}.former")
                os.replace(target, replaced[target])
            os.replace(file, target)
            placed.append(target)
        os.replace(main, path)
    except BaseException:
        for target in placed:
            target.unlink(missing_ok=True)
        for target, kept in replaced.items():
            os.replace(kept, target)
        raise


def _keep(path: Path, former: Path, link: Path) -> None:
    """Link the file as `former`; it keeps its own name until the next version replaces it."""
    try:
        os.link(path, link)
    except OSError:
        # Some file systems have no links; there the file has only the name `former` for a moment.
        os.replace(path, former)
        return
    # If both are the same file already, after a killed process, POSIX says that the rename does nothing.
    with contextlib.suppress(FileNotFoundError):
        os.replace(link, former)
