"""Files that appear under their names only when they are complete and found good."""

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from strucspars.export.os_errors import DISK_REMEDIES, reworded

_REMEDIES = {
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
        remedy = _REMEDIES.get(error.errno, "see to that, or choose another path")
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
