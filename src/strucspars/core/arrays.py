"""The array types of the core."""

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.int64]


def as_float_array(values: npt.ArrayLike, *, name: str) -> FloatArray:
    """The values in double precision, or a `ValueError` that names the argument.

    >>> as_float_array([[1, 2]], name="weight")
    array([[1., 2.]])
    """
    try:
        array = np.asarray(values)
        if np.iscomplexobj(array):
            raise TypeError("complex numbers have no order")
        return array.astype(np.float64, copy=False)
    # RuntimeError: tensors refuse to become arrays while they require gradients.
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name} must be an array of real numbers, got {type(values).__name__}: {error}") from error
