"""Failures of the system, said in terms of what the user asked for."""

import errno
from pathlib import Path

# What helps wherever a file or a folder was to be written; each place adds its own.
DISK_REMEDIES = {
    errno.ENOSPC: "free some space on that disk",
    errno.EDQUOT: "free some of your disk quota",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
}


def reworded(error: OSError, message: str) -> OSError:
    """An error of the same kind and number that reads as the message alone.

    >>> error = reworded(FileNotFoundError(2, "No such file or directory"), "there is no plan at plan.json")
    >>> type(error).__name__, error.errno, str(error)
    ('FileNotFoundError', 2, 'there is no plan at plan.json')
    """
    kind = type(OSError(error.errno, "")) if error.errno else OSError
    result = kind(message)
    result.errno = error.errno
    return result


def check_readable(path: Path) -> None:
    """Raise an `OSError` that says what to do where a file cannot be opened: readers of some formats call it damaged.

    >>> check_readable(Path("nowhere.safetensors"))
    Traceback (most recent call last):
    FileNotFoundError: cannot read nowhere.safetensors: No such file or directory; give a file that you may read
    """
    try:
        path.open("rb").close()
    except OSError as error:
        raise reworded(error, f"cannot read {path}: {error.strerror}; give a file that you may read") from error
