"""Whether a runtime computes what the network does; nothing that does not is worth timing."""

import math

import numpy as np
import numpy.typing as npt
import torch

from strucspars.export.agreement import TOLERANCE, relative_error

ALLOWED_DIFFERENCE = TOLERANCE[torch.float32]


def relative_difference(outputs: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]) -> float:
    """Largest difference between outputs, relative to the largest expected one; infinite where they do not compare.

    >>> relative_difference(np.float32([1, 3]), np.float32([1, 4]))
    0.25
    """
    if outputs.shape != expected.shape or not np.isfinite(expected).all():
        return math.inf
    # Copies: runtimes give out memory that is theirs, and read-only.
    return relative_error(torch.tensor(outputs), torch.tensor(expected))


def difference_error(difference: float) -> str:
    """Why outputs that differ so much are refused; empty if they are the same up to rounding.

    >>> difference_error(3e-7)
    ''
    >>> difference_error(0.5)
    'not timed: its outputs are off by 0.5 of the largest one, where rounding explains 0.0001'
    """
    if difference <= ALLOWED_DIFFERENCE:
        return ""
    off = f"its outputs are off by {difference:.2g} of the largest one"
    return f"not timed: {off}, where rounding explains {ALLOWED_DIFFERENCE:g}"
