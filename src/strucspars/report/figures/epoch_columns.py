"""Columns of a figure that has one for every epoch."""

import numpy as np

from strucspars.core.checks import FloatArray


def epoch_columns(epochs: FloatArray, values: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Edges and values of columns from the first to the last epoch; NaN where one in between is missing.

    Args:
        epochs: whole numbers, ascending, at least one.
        values: `(rows, len(epochs))`.

    >>> edges, columns = epoch_columns(np.array([1.0, 3.0]), np.array([[5.0, 7.0]]))
    >>> edges.tolist(), columns.tolist()
    ([0.5, 1.5, 2.5, 3.5], [[5.0, nan, 7.0]])
    """
    places = (epochs - epochs[0]).astype(np.int64)
    columns = np.full((len(values), int(places[-1]) + 1), np.nan)
    columns[:, places] = values
    return epochs[0] - 0.5 + np.arange(columns.shape[1] + 1), columns
