"""Folders that are replaced whole or not at all, and only if no files of anyone else would go."""

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
    """Give an empty folder to write a report to; it takes the name `path` when the block ends well.

    On any failure nothing of it is left, and the report that was there before stays. What a link points to is replaced,
    not the link.

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
        # Without the system's words it is a sentence already, which names its own file.
        if error.strerror is None:
            raise
        raise disk_error("write", path, error, "what was there is kept; " if path.exists() else "") from error


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
    """The files of the report that is there; none where nothing says that they are of a report."""
    with suppress(OSError, ValueError):
        manifest = parse_json(read_text(path / MANIFEST), MANIFEST)
        if isinstance(manifest, dict) and manifest.get("format") == _FORMAT and isinstance(manifest.get("files"), list):
            return {MANIFEST, *map(str, manifest["files"])}
    return set()


def _write_manifest(folder: Path) -> None:
    files = sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
    (folder / MANIFEST).write_text(to_json({"format": _FORMAT, "files": files}) + "\n", encoding="utf-8")


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
