"""Files that commands write."""

import os
from pathlib import Path


def check_can_be_written(out: Path, *, force: bool = False) -> None:
    """Raise an `OSError` that says what to do where a file cannot be written: before the work, not after it.

    Args:
        out: the file.
        force: whether a file that is there may be replaced.
    """
    if out.is_dir():
        raise IsADirectoryError(f"{out} is a folder; name a file with --out")
    if out.exists() and not force:
        raise FileExistsError(f"{out} is there already; replace it with --force, or write elsewhere with --out")
    if not out.parent.is_dir():
        raise FileNotFoundError(f"{out} cannot be written: there is no folder {out.parent}; make it, or change --out")
    if not os.access(out.parent, os.W_OK | os.X_OK):
        raise PermissionError(
            f"{out} cannot be written: the folder {out.parent} is not writable for you; change that, or --out"
        )
