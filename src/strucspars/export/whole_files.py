"""Files that appear under their names only when they are complete and found good."""

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_REMEDIES = {
    errno.ENOSPC: "free some space on that disk",
    errno.EDQUOT: "free some of your disk quota",
    errno.EACCES: "make the folder writable for you, or choose another path",
    errno.EPERM: "make the folder writable for you, or choose another path",
    errno.EROFS: "choose a disk that is not read-only",
    errno.ENOENT: "make the folder first, or choose another path",
    errno.ENOTDIR: "choose a path whose folders are folders",
    errno.EISDIR: "choose the path of a file",
    errno.ENAMETOOLONG: "choose a shorter name",
}


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Give a file of the same name in an unfinished folder; it takes its place when the block ends well.

    Files that the block writes beside it, as formats of several files need, go with it. On any failure nothing is left,
    and what was there before stays.

    Raises:
        OSError: the file cannot be written; the message names it and says what to do.
    """
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        # Beside the file, since a rename does not cross disks. Not named after it: the name may be as long as allowed.
        with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=path.parent) as folder:
            yield Path(folder) / path.name
            _publish(Path(folder), path)
    except OSError as error:
        raise _reworded(error, path) from error


def _publish(folder: Path, path: Path) -> None:
    """Move all files of the folder to where `path` is, that of its name last."""
    main = folder / path.name
    companions = sorted(file for file in folder.iterdir() if file != main)
    for file in (*companions, main):
        with file.open("rb") as written:
            os.fsync(written.fileno())
    former: dict[Path, Path] = {}
    try:
        for file in companions:
            target = path.with_name(file.name)
            if target.exists():
                former[target] = file.with_name(f"{len(former)}.former")
                os.replace(target, former[target])
            os.replace(file, target)
        os.replace(main, path)
    except OSError:
        for target, kept in former.items():
            os.replace(kept, target)
        raise


def _reworded(error: OSError, path: Path) -> OSError:
    """An error of the same kind and number, said in terms of the file."""
    if error.errno is None:
        return error
    remedy = _REMEDIES.get(error.errno, "see to that, or choose another path")
    result = type(OSError(error.errno, ""))(f"cannot write {path}: {error.strerror or error}; {remedy}")
    result.errno = error.errno
    return result
