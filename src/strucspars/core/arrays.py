"""The array types of the core, and the one test of what counts as a whole number."""

from typing import TypeGuard

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.int64]


def is_whole_number(value: object) -> TypeGuard[int]:
    """Whether the value is a Python or numpy integer. Booleans are integers to Python, but never a width or a level."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
