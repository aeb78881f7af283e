"""Files that are replaced whole or not at all, and files that are read only if they are what they should be.

    with replace_file("plan.json") as unfinished:      # a file beside it, which takes the name when the block ends well
        unfinished.write_text(plan.to_json())
    write_text("plan.json", plan.to_json())            # the same for content that is at hand
    text = read_text("plan.json", limit=RECORD_BYTES)  # a FIFO, a device, a folder or 5 GB: an error in words, at once
    image = Image.open(open_file("cat.jpg", limit=IMAGE_BYTES))

A failure leaves the former file. Every `OSError` names the file and what helps, from one table. A link in place of a
file that is written is itself replaced; with `follow_link=True`, for paths that a user gives, the file it leads to is.
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

# Largest sizes that are read, by kind of file; what this package writes is far smaller.
RECIPE_BYTES = 2**18
RECORD_BYTES = 2**26
IMAGE_BYTES = 2**28
ARRAYS_BYTES = 2**29
CHECKPOINT_BYTES = 2**35

# How the folders of unfinished files are named, to recognise those that a killed process has left.
UNFINISHED = ".unfinished-"

_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def reworded(error: OSError, message: str) -> OSError:
    """An error of the same kind and number that reads as the message alone."""
    kind = type(OSError(error.errno, "")) if error.errno else OSError
    result = kind(message)
    result.errno = error.errno
    return result


def disk_error(action: str, path: str | os.PathLike[str], error: OSError, note: str = "") -> OSError:
    """The same failure as a sentence: what could not be done to which file, why, and what helps."""
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
        # Without waiting for the other end of a pipe.
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
        # It may grow meanwhile, and files of the kernel have no size.
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
    """Raise a `ValueError` if a zip file is larger than it looks, which `torch.save` never makes: it packs nothing.

    Leaves the file at its beginning; what is no zip file passes.
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
    """Give a file of the same name in an unfinished folder; it takes its place when the block ends well.

    Files that the block writes beside it, as formats of several files need, go with it. On any failure nothing is left,
    and what was there before stays.

    Args:
        path: the file to replace.
        former: another name to keep its present version under, which must exist then; None: it goes.
        follow_link: where `path` is a link, replace the file it leads to, instead of the link.

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
        # Without the system's words it is a sentence already, which names its own file.
        if error.strerror is None:
            raise
        note = "what was there is kept; " if target.is_file() else ""
        raise disk_error("write", path, error, note) from error
    sync_folder(target.parent)


@contextmanager
def unfinished_folder(place: Path) -> Iterator[Path]:
    """An empty folder that goes with the block. It lies on the disk of what it will replace, for a rename to do."""
    # Not named after what it will replace: that name may be as long as allowed.
    with tempfile.TemporaryDirectory(prefix=UNFINISHED, dir=place, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


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


def _publish(folder: Path, path: Path, former: Path | None) -> None:
    """Move all files of the folder to where `path` is, that of its name last."""
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
    """Give the file the name `former`, while it keeps its own until the next version takes that."""
    try:
        os.link(path, link)
    except OSError:
        # Some file systems have no links. Then for a moment the file has the name `former` alone.
        os.replace(path, former)
        return
    # Where both are one file already, since a process was killed after this, the rename does nothing, by standard.
    with contextlib.suppress(FileNotFoundError):
        os.replace(link, former)
