"""What is learned about one layer: the order of its channels, and how block-diagonal S becomes in it (Sec. 3.2)."""

from dataclasses import dataclass

from strucspars.core.arrays import FloatArray, IntArray


@dataclass(frozen=True, eq=False)
class Connectivity:
    """Learned channel orders of one layer.

    Attributes:
        out_perm: order P of the output channels, `perm[new] = old`, read-only.
        in_perm: order Q of the input channels, likewise.
        cost: what was minimised, `sum(S[out_perm][:, in_perm] * R)`.
        sweeps: pairs of exact half-steps made.
        converged: False if the sweep limit ended the search; the orders are valid all the same.
    """

    out_perm: IntArray
    in_perm: IntArray
    cost: float
    sweeps: int
    converged: bool


def connection_cost(importance: FloatArray, out_perm: IntArray, in_perm: IntArray, penalty: FloatArray) -> float:
    """`sum(S[P][:, Q] * R)` with R given between groups: the metric of block-diagonality (Sec. 3.2).

    >>> import numpy as np
    >>> connection_cost(np.ones((4, 4)), np.arange(4), np.arange(4), np.array([[0.0, 1.0], [1.0, 0.0]]))
    8.0
    """
    groups, in_channels = len(penalty), importance.shape[1]
    # Rows are added up before columns are moved: there is less to move then.
    by_row_group = importance.take(out_perm, axis=0).reshape(groups, -1, in_channels).sum(axis=1)
    by_group = by_row_group.take(in_perm, axis=1).reshape(groups, groups, -1).sum(axis=2)
    return float((by_group * penalty).sum())
