"""Checks of numbers, fractions, seeds and arrays, with errors that name the argument and its limit."""

from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt


def is_whole_number(value: object) -> TypeGuard[int]:
    """Whether the value is a Python or numpy integer. Booleans are excluded: they are never a width or a level."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Whether the value is a real number, NaN and infinity included."""
    return is_whole_number(value) or isinstance(value, float | np.floating)


def checked_at_least(name: str, value: int, least: int) -> int:
    """The value as a plain int, or a `ValueError` unless it is a whole number from `least` on."""
    if not is_whole_number(value) or value < least:
        raise ValueError(f"{name} must be a whole number from {least} on, got {value!r}")
    return int(value)


def checked_fraction(name: str, value: float) -> float:
    """The value as a plain float, or a `ValueError` unless it lies in [0, 1]."""
    if not is_number(value) or not 0 <= value <= 1:
        raise ValueError(f"{name} must lie in [0, 1], got {value!r}")
    return float(value)


def checked_target(value: float) -> float:
    """The requested removed fraction, or a `ValueError` unless it lies in [0, 1)."""
    if not is_number(value) or not 0 <= value < 1:
        raise ValueError(f"target is a removed fraction and must lie in [0, 1), got {value!r}")
    return float(value)


def checked_seed(name: str, value: int) -> int:
    """The seed as a plain int, or a `ValueError` unless every random number generator accepts it."""
    seed = checked_at_least(name, value, 0)
    if seed >= 2**63:
        raise ValueError(f"{name} must be below 2**63, got a number of {seed.bit_length()} bits")
    return seed


# Not `npt.NDArray`, an alias that hides the class of the array from those who read annotations (`io.records`).
FloatArray = np.ndarray[Any, np.dtype[np.float64]]
BoolArray = np.ndarray[Any, np.dtype[np.bool_]]
IntArray = np.ndarray[Any, np.dtype[np.int64]]


def as_float_array(values: npt.ArrayLike, *, name: str) -> FloatArray:
    """The values in double precision, or a `ValueError` that names the argument."""
    try:
        array = np.asarray(values)
        if np.iscomplexobj(array):
            raise TypeError("complex numbers have no order")
        return array.astype(np.float64, copy=False)
    # RuntimeError: tensors refuse to become arrays while they require gradients.
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name} must be an array of real numbers, got {type(values).__name__}: {error}") from error
