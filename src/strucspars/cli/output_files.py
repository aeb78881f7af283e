"""Files that commands write."""

import os
from collections.abc import Sequence
from pathlib import Path

from strucspars.export.whole_files import followed


def check_can_be_written(out: Path, *, force: bool = False, companions: Sequence[Path] = ()) -> None:
    """Raise an `OSError` that says what to do where a file cannot be written: before the work, not after it.

    Args:
        out: the file.
        force: whether a file that is there may be replaced.
        companions: files that may be written together with it. They are replaced together with it, but never alone: one
            that is there without `out` belongs to something else.
    """
    if out.is_dir():
        raise IsADirectoryError(f"{out} is a folder; name a file with --out")
    if out.exists() and not force:
        raise FileExistsError(f"{out} is there already; replace it with --force, or write elsewhere with --out")
    foreign = [file for file in companions if os.path.lexists(file)]
    if foreign and not out.exists():
        raise FileExistsError(
            f"{foreign[0]} is there already, without {out}, so that it belongs to something else; move it away, or "
            "write elsewhere with --out"
        )
    folder = followed(out).parent
    if not folder.is_dir():
        raise FileNotFoundError(f"{out} cannot be written: there is no folder {folder}; make it, or change --out")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(
            f"{out} cannot be written: the folder {folder} is not writable for you; change that, or --out"
        )
