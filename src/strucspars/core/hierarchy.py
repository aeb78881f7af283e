"""Nested halvings of the channels: group levels, R_g and U_g (Sec. 3.2 to 3.4, Appendix A).

A layer with `C_out x C_in` channels, `gcd(C_out, C_in) = 2**u * odd`, can be halved `u` times on both sides. Group
level `g` from 1 to `u + 1` means `2**(g - 1)` groups. Two channels of the same finest block are interchangeable, so
every quantity that depends on the hierarchy is a small matrix over *groups*, expanded to channels only at the end.
"""

import math
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from strucspars.core.checks import BoolArray, FloatArray, checked_at_least, is_number

Scalar = TypeVar("Scalar", bound=np.generic)


def num_groups(group_level: int) -> int:
    """Number of groups (cardinality) of a group level: `2**(g - 1)` (Sec. 3.3).

    >>> [num_groups(group_level) for group_level in (1, 2, 3)]
    [1, 2, 4]
    """
    return 1 << (checked_at_least("group_level", group_level, 1) - 1)


def max_group_level(out_channels: int, in_channels: int, *, min_channels_per_group: int = 1) -> int:
    """Largest group level of a layer: `u + 1` with `gcd(C_out, C_in) = 2**u * odd` (Appendix A).

    An odd width allows one group only, so its largest level is 1.

    Differs from the paper: `min_channels_per_group` stops earlier, where a further halving would leave groups narrower
    than that on either side; see `docs/decisions/0013-minimum-group-width.md`. Level 1 divides nothing, so it is
    allowed for layers of any width.

    >>> max_group_level(256, 64), max_group_level(96, 40), max_group_level(64, 3)
    (7, 4, 1)
    >>> max_group_level(256, 64, min_channels_per_group=16)
    3
    """
    outputs, inputs = checked_at_least("out_channels", out_channels, 1), checked_at_least("in_channels", in_channels, 1)
    width = checked_at_least("min_channels_per_group", min_channels_per_group, 1)
    divisor = math.gcd(outputs, inputs)
    power_of_two = divisor & -divisor
    groups_of_width = max(1, min(outputs, inputs) // width)
    return min(power_of_two, groups_of_width).bit_length()


def group_penalty(halvings: int, *, decay: float = 0.5) -> FloatArray:
    """Cost between the `2**halvings` finest groups: `decay**(k - 1)` where halving `k` is the first to separate them.

    Each halving has two copies of the finer hierarchy, scaled by `decay`, on the diagonal and ones off the diagonal.

    Returns: symmetric `(2**halvings, 2**halvings)` matrix, zero on the diagonal.

    >>> group_penalty(2)
    array([[0. , 0.5, 1. , 1. ],
           [0.5, 0. , 1. , 1. ],
           [1. , 1. , 0. , 0.5],
           [1. , 1. , 0.5, 0. ]])
    """
    if not is_number(decay) or not 0 < decay <= 1:
        raise ValueError(f"decay must lie in (0, 1], got {decay!r}; the paper uses 0.5")
    penalty = np.zeros((1, 1))
    for _ in range(halvings):
        half = len(penalty)
        halved = np.ones((2 * half, 2 * half))
        halved[:half, :half] = halved[half:, half:] = decay * penalty
        penalty = halved
    return penalty


def penalty_matrix(
    out_channels: int,
    in_channels: int,
    group_level: int | None = None,
    *,
    decay: float = 0.5,
    largest_level: int | None = None,
) -> FloatArray:
    """Structured regularisation matrix R_g: the off-diagonal blocks of the first `g` halvings (Sec. 3.3, Appendix A).

    `group_level=None` gives the cost matrix R of Sec. 3.2 with all `u` halvings. Level 1 already penalises the first
    off-diagonal blocks; at the top levels `u` and `u + 1` there is nothing further to halve and `R_g = R`.

    With `largest_level`, only the halvings that lead to that level count: connections that conversion cannot remove
    must not be penalised.

    Returns: `(out_channels, in_channels)`, in the permuted channel order.

    >>> penalty_matrix(4, 4, group_level=1)
    array([[0., 0., 1., 1.],
           [0., 0., 1., 1.],
           [1., 1., 0., 0.],
           [1., 1., 0., 0.]])
    """
    halvings = max_group_level(out_channels, in_channels) - 1
    if largest_level is not None:
        halvings = checked_group_level(largest_level, out_channels, in_channels, name="largest_level") - 1
    if group_level is not None:
        halvings = min(checked_group_level(group_level, out_channels, in_channels), halvings)
    return spread_over_channels(group_penalty(halvings, decay=decay), out_channels, in_channels)


def connection_mask(out_channels: int, in_channels: int, group_level: int) -> BoolArray:
    """Relationship matrix U_g: the connections that `2**(g - 1)` equal diagonal blocks keep (Sec. 3.4).

    Returns: boolean `(out_channels, in_channels)`, in the permuted channel order.

    >>> connection_mask(2, 4, group_level=2).astype(int)
    array([[1, 1, 0, 0],
           [0, 0, 1, 1]])
    """
    groups = num_groups(checked_group_level(group_level, out_channels, in_channels))
    return spread_over_channels(np.eye(groups, dtype=np.bool_), out_channels, in_channels)


def block_sums(matrices: FloatArray, groups: int) -> FloatArray:
    """Sums over the `groups x groups` equal blocks of a matrix, or of each matrix of a stack."""
    *stack, rows, columns = matrices.shape
    blocks = matrices.reshape(*stack, groups, rows // groups, groups, columns // groups)
    sums: FloatArray = blocks.sum(axis=(-3, -1))
    return sums


def checked_group_level(group_level: int, out_channels: int, in_channels: int, *, name: str = "group_level") -> int:
    """The level as a plain int, or a `ValueError` that names the layer's limit."""
    limit = max_group_level(out_channels, in_channels)
    if checked_at_least(name, group_level, 1) > limit:
        raise ValueError(
            f"{name} must lie in 1..{limit} for a {out_channels} x {in_channels} layer "
            f"(at most {num_groups(limit)} groups), got {group_level}; lower it or leave the layer out"
        )
    return int(group_level)


def spread_over_channels(by_group: npt.NDArray[Scalar], out_channels: int, in_channels: int) -> npt.NDArray[Scalar]:
    """A matrix over groups as one over channels: every group's entry for all its channels."""
    groups = len(by_group)
    return by_group.repeat(out_channels // groups, axis=0).repeat(in_channels // groups, axis=1)
