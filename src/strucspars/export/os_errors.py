"""Failures of the system, said in terms of what the user asked for."""

import errno

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
