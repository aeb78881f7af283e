"""Folders that are replaced whole or not at all, and only if nobody else's files would go."""

import errno
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from strucspars.io.files import DISK_REMEDIES, reworded

MANIFEST = "report.json"
_FORMAT = "strucspars-report"
_SHOWN_FILES = 3
_REMEDIES = {
    **DISK_REMEDIES,
    errno.EACCES: "make the folder around it writable for you, or choose another one with --out",
    errno.EPERM: "make the folder around it writable for you, or choose another one with --out",
    errno.EROFS: "choose a disk that is not read-only with --out",
    errno.EEXIST: "a file stands in the way; choose another folder with --out",
    errno.ENOTDIR: "a file stands in the way; choose another folder with --out",
    errno.ENAMETOOLONG: "choose a shorter name with --out",
}


@contextmanager
def replaced_folder(path: Path) -> Iterator[Path]:
    """Give an empty folder to write a report to; it takes the name `path` when the block ends well.

    On any failure nothing of it is left, and the report that was there before stays.

    Raises:
        FileExistsError: `path` is a file, or holds files that no report has written.
        OSError: the folder cannot be written; the message names it and says what to do.
    """
    # What a link points to is replaced, not the link. A link to itself stays what it is.
    path = Path(os.path.realpath(path))
    check_replaceable(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Beside the folder, since a rename does not cross disks.
        with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=path.parent) as place:
            unfinished = Path(place) / "report"
            unfinished.mkdir()
            yield unfinished
            _write_manifest(unfinished)
            _swap(unfinished, path, former=Path(place) / "former")
    except OSError as error:
        # Ours have no number, and say all already.
        if error.errno is None:
            raise
        remedy = _REMEDIES.get(error.errno, "see to that, or choose another folder with --out")
        raise reworded(
            error,
            f"cannot write the report {path}: {error.strerror or error}; what was there before is kept. "
            f"{remedy[0].upper()}{remedy[1:]}",
        ) from error


def check_replaceable(path: Path) -> None:
    """Raise a `FileExistsError` unless a report may be written to the folder without loss of anything else."""
    if not os.path.lexists(path):
        return
    if not path.is_dir():
        raise FileExistsError(f"{path} is a file; choose another folder with --out")
    known = _manifest_files(path)
    files = (file for file in path.rglob("*") if file.is_symlink() or not file.is_dir())
    foreign = sorted(str(file.relative_to(path)) for file in files if file.relative_to(path).as_posix() not in known)
    if foreign:
        more = f" and {len(foreign) - _SHOWN_FILES} more" if len(foreign) > _SHOWN_FILES else ""
        raise FileExistsError(
            f"{path} holds {', '.join(foreign[:_SHOWN_FILES])}{more}, which no report has written; "
            "move that elsewhere, or choose another folder with --out"
        )


def _manifest_files(path: Path) -> set[str]:
    """The files of the report that is there."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] == _FORMAT:
            return {MANIFEST, *map(str, manifest["files"])}
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        # Nothing says that these files are ours, so they are not.
        pass
    return set()


def _write_manifest(folder: Path) -> None:
    files = sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
    text = json.dumps({"format": _FORMAT, "files": files}, indent=2)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def _swap(unfinished: Path, path: Path, *, former: Path) -> None:
    """Put the new folder where the old one was; the old one goes with the folder that `former` lies in."""
    if path.exists():
        os.replace(path, former)
    try:
        os.replace(unfinished, path)
    except OSError:
        with suppress(FileNotFoundError):
            os.replace(former, path)
        raise
