"""Atomic replacement of report folders, refused where it would delete other files."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from strucspars.io.files import disk_error, read_text, unfinished_folder
from strucspars.io.records import parse_json, to_json

MANIFEST = "report.json"
_FORMAT = "strucspars-report"
_SHOWN_FILES = 3


@contextmanager
def replace_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder to write a report to; it is renamed to `path` when the block ends without an error.

    On an error the previous report stays. The target of a link is replaced, not the link.

    Raises:
        FileExistsError: `path` is a file, or holds files that no report has written.
        OSError: the folder cannot be written; the message names it and says what to do.
    """
    path = Path(os.path.realpath(path))
    check_replaceable(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with unfinished_folder(path.parent) as place:
            unfinished = place / "report"
            unfinished.mkdir()
            yield unfinished
            _write_manifest(unfinished)
            _swap(unfinished, path, former=place / "former")
    except OSError as error:
        # An error without strerror has a message of ours already.
        if error.strerror is None:
            raise
        raise disk_error("write", path, error, "what was there is kept; " if path.exists() else "") from error


def check_replaceable(path: Path) -> None:
    """Raise a `FileExistsError` if the folder holds anything but a report."""
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
    """The files of the report in the folder; empty if there is no readable manifest."""
    with suppress(OSError, ValueError):
        manifest = parse_json(read_text(path / MANIFEST), MANIFEST)
        if isinstance(manifest, dict) and manifest.get("format") == _FORMAT and isinstance(manifest.get("files"), list):
            return {MANIFEST, *map(str, manifest["files"])}
    return set()


def _write_manifest(folder: Path) -> None:
    files = sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
    (folder / MANIFEST).write_text(to_json({"format": _FORMAT, "files": files}) + "\n", encoding="utf-8")


def _swap(unfinished: Path, path: Path, *, former: Path) -> None:
    """Replace the old folder by the new one; the old one is deleted with the temporary folder of `former`."""
    if path.exists():
        os.replace(path, former)
    try:
        os.replace(unfinished, path)
    except OSError:
        with suppress(FileNotFoundError):
            os.replace(former, path)
        raise
