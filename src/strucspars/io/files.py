"""Atomic writing of files and report folders, and reading that refuses pipes, devices and files that are too large.

A failed write keeps the previous file. Every `OSError` names the file and a remedy. A symbolic link is itself replaced;
with `follow_link=True`, for paths that a user gives, its target is.
"""

import errno
import gzip
import os
import stat
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from strucspars.io.records import check_header, parse_json, to_json

REMEDIES = {
    errno.ENOSPC: "free some space on that disk",
    errno.EDQUOT: "free some of your disk quota",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
    errno.EACCES: "change its permissions or those of its folder, or choose another path",
    errno.EPERM: "change its permissions or those of its folder, or choose another path",
    errno.EROFS: "choose a disk that is not read-only",
    errno.ENOENT: "create its folder first, or choose an existing path",
    errno.ENOTDIR: "a file exists where a folder is needed; choose another path",
    errno.EEXIST: "a file exists where a folder is needed; choose another path",
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

# Lists the files of a report in its folder, so that nothing else is deleted with it.
MANIFEST = "report.json"
_REPORT_FORMAT = "strucspars-report"
_SHOWN_FILES = 3


def user_cache(kind: str) -> Path:
    """The folder of what was measured here: in `STRUCSPARS_CACHE`, else in the user's folder for such files."""
    given = os.environ.get("STRUCSPARS_CACHE")
    base = Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "strucspars"
    return base / kind


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
    """Open a regular file of at most `limit` bytes; a pipe, socket or device might never end: a `ValueError`."""
    try:
        # Without this flag, opening a pipe blocks until a writer opens it. The caller closes the file.
        file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    except OSError as error:
        # A socket cannot even be opened.
        if error.errno == errno.ENXIO:
            raise _special_file(path) from error
        raise disk_error("read", path, error) from error
    status = os.fstat(file.fileno())
    if stat.S_ISREG(status.st_mode) and (limit is None or status.st_size <= limit):
        return file
    file.close()
    raise _too_large(path, limit or 0) if stat.S_ISREG(status.st_mode) else _special_file(path)


def check_readable(path: str | os.PathLike[str], *, limit: int | None = None) -> None:
    """Raise as `open_file` does, for libraries that open the file themselves."""
    open_file(path, limit=limit).close()


def read_bytes(path: str | os.PathLike[str], *, limit: int = RECORD_BYTES) -> bytes:
    """The content of a regular file, unpacked if its name ends in `.gz`; errors as `open_file`.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_bytes(f"{folder}/notes.gz", gzip.compress(b"text"))
    ...     read_bytes(f"{folder}/notes.gz")
    b'text'
    """
    is_packed = Path(path).suffix == ".gz"
    with open_file(path, limit=limit) as file:
        # The file may grow meanwhile, and files in /proc report no size.
        bound = limit if is_packed else min(limit, os.fstat(file.fileno()).st_size + 2**20)
        try:
            content = gzip.GzipFile(fileobj=file).read(bound + 1) if is_packed else file.read(bound + 1)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise ValueError(f"{path} is not a gzip file, or damaged ({error}); restore it from a copy") from error
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
        raise ValueError(f"{path} is not UTF-8 text ({error.reason}); restore it, or save it in UTF-8") from error


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
    return ValueError(f"cannot read {path}: it has more than {limit:,} bytes, which is the limit for such a file")


def _special_file(path: str | os.PathLike[str]) -> ValueError:
    return ValueError(f"cannot read {path}: it is a pipe, a socket or a device; give a regular file")


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

    Other files that the block writes in that folder are moved with it, and replace such files only together with it. On
    an error the previous files stay. `former` is another name for the present version, which must exist then. With
    `follow_link`, the target of a link is replaced instead of the link.
    """
    target = followed(Path(path)) if follow_link else Path(path)
    with named_errors(Path(path)):
        if target.is_dir() and not target.is_symlink():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with unfinished_folder(target.parent) as folder:
            yield folder / target.name
            _publish(folder, target, former)
    sync_folder(target.parent)


@contextmanager
def replace_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder to write a report to; at the end it replaces the report at `path`, and no other files."""
    path = Path(os.path.realpath(path))
    _check_replaceable(path)
    with named_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with unfinished_folder(path.parent) as place:
            unfinished, former = place / "report", place / "former"
            unfinished.mkdir()
            yield unfinished
            files = sorted(file.relative_to(unfinished).as_posix() for file in unfinished.rglob("*") if file.is_file())
            (unfinished / MANIFEST).write_text(to_json({"format": _REPORT_FORMAT, "files": files}) + "\n")
            # Deleted together with the temporary folder.
            if path.exists():
                os.replace(path, former)
            try:
                os.replace(unfinished, path)
            except OSError:
                if former.exists():
                    os.replace(former, path)
                raise


def _check_replaceable(path: Path) -> None:
    """Raise a `FileExistsError` if the folder holds anything but a report."""
    if os.path.lexists(path) and not path.is_dir():
        raise FileExistsError(f"{path} is a file; choose another folder with --out")
    known: set[str] = set()
    with suppress(OSError, ValueError, LookupError, TypeError):
        manifest = parse_json(read_text(path / MANIFEST), MANIFEST)
        known = {MANIFEST, *check_header(manifest, MANIFEST, format=_REPORT_FORMAT)["files"]}
    files = (file for file in path.rglob("*") if file.is_symlink() or not file.is_dir())
    foreign = sorted(name for name in (file.relative_to(path).as_posix() for file in files) if name not in known)
    if foreign:
        more = f" and {len(foreign) - _SHOWN_FILES} more" if len(foreign) > _SHOWN_FILES else ""
        raise FileExistsError(
            f"{path} holds {', '.join(foreign[:_SHOWN_FILES])}{more}, which no report has written; "
            "move that elsewhere, or choose another folder with --out"
        )


@contextmanager
def named_errors(path: Path, action: str = "write") -> Iterator[None]:
    """Let errors of the disk name the action, the path and a remedy."""
    try:
        yield
    except OSError as error:
        # An error without strerror has a message of ours already.
        if error.strerror is None:
            raise
        kept = "what was there is kept; " if action == "write" and path.exists() else ""
        raise disk_error(action, path, error, kept) from error


@contextmanager
def unfinished_folder(place: Path) -> Iterator[Path]:
    """A temporary folder in `place`, on the same disk as the file to replace, so that a rename works."""
    # Not named after the file, whose name may have the maximum length already.
    with tempfile.TemporaryDirectory(prefix=UNFINISHED, dir=place, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def followed(path: Path) -> Path:
    """The target of a link; any other path unchanged."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path


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
    for companion in (path.with_name(file.name) for file in companions):
        if os.path.lexists(companion) and not path.exists():
            raise FileExistsError(
                f"{companion} would be replaced together with {path}, but is there alone, so that it belongs to "
                "something else; move it away, or choose another path"
            )
    files = [*companions, main]
    for file in files:
        with file.open("rb") as written:
            os.fsync(written.fileno())
    if former is not None:
        _keep(path, former, folder / "former")
    for file in files:
        os.replace(file, path.with_name(file.name))


def _keep(path: Path, former: Path, link: Path) -> None:
    """Link the file as `former`; it keeps its own name until the next version replaces it."""
    try:
        os.link(path, link)
    except OSError:
        # Some file systems have no links; there the file has only the name `former` for a moment.
        os.replace(path, former)
        return
    # If both are the same file already, after a killed process, POSIX says that the rename does nothing.
    with suppress(FileNotFoundError):
        os.replace(link, former)
