"""A convolution with what surrounds it in an inference graph: what it computes, and a plain implementation."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from strucspars.nn.layers import merged_weight

Pair = tuple[int, int]
# Wider pieces would not make loads wider, and every tile of a kernel is a multiple of this.
LARGEST_PIECE = 16


@dataclass(frozen=True)
class MaxPool:
    """The window of a max pooling."""

    kernel_size: Pair
    stride: Pair
    padding: Pair


@dataclass(frozen=True, kw_only=True, eq=False)
class FusedConv:
    """`max_pool(relu(conv(x[:, in_order])[:, out_order] + bias + residual))`; None for the natural order, and no pool.

    Attributes:
        weight: `(C_out, C_in / G, height, width)`, for channels in the orders that the convolution sees.
        bias: `(C_out,)`, for the channels of the result.
        in_order: position k of the convolution reads channel `in_order[k]` of the input.
        out_order: channel j of the result is position `out_order[j]` of the convolution.
        relu: whether negative results become zero, after the residual is added.
    """

    weight: Tensor
    bias: Tensor
    groups: int = 1
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)
    in_order: Tensor | None = None
    out_order: Tensor | None = None
    relu: bool = False
    pool: MaxPool | None = None

    @property
    def in_channels(self) -> int:
        """Channels of the input."""
        return self.in_width * self.groups

    @property
    def out_channels(self) -> int:
        """Channels of the result."""
        return self.weight.shape[0]

    @property
    def in_width(self) -> int:
        """Input channels of a group."""
        return self.weight.shape[1]

    @property
    def out_width(self) -> int:
        """Output channels of a group."""
        return self.weight.shape[0] // self.groups

    @property
    def kernel_size(self) -> Pair:
        """Height and width of the kernel."""
        return self.weight.shape[2], self.weight.shape[3]

    @property
    def is_pointwise(self) -> bool:
        """Whether each result depends on the input at its own position alone."""
        return self.kernel_size == self.stride == (1, 1) and self.padding == (0, 0)

    def conv_size(self, height: int, width: int) -> Pair:
        """Height and width after the convolution, for an input of this size."""
        reach = _pair(step * (kernel - 1) + 1 for step, kernel in zip(self.dilation, self.kernel_size, strict=True))
        return _window_places((height, width), reach, self.stride, self.padding)

    def out_size(self, height: int, width: int) -> Pair:
        """Height and width of the result for an input of this size."""
        size = self.conv_size(height, width)
        if self.pool is None:
            return size
        return _window_places(size, self.pool.kernel_size, self.pool.stride, self.pool.padding)


def _window_places(size: Pair, window: Pair, stride: Pair, padding: Pair) -> Pair:
    """In how many places a window lies, along both axes."""
    axes = zip(size, window, stride, padding, strict=True)
    return _pair((length + 2 * pad - reach) // step + 1 for length, reach, step, pad in axes)


def _pair(values: Iterable[int]) -> Pair:
    one, other = values
    return one, other


def reference(conv: FusedConv, x: Tensor, residual: Tensor | None = None) -> Tensor:
    """The same by plain operations of PyTorch, one after the other."""
    if conv.in_order is not None:
        x = x.index_select(1, conv.in_order)
    y = functional.conv2d(x, conv.weight, None, conv.stride, conv.padding, conv.dilation, conv.groups)
    if conv.out_order is not None:
        y = y.index_select(1, conv.out_order)
    y = y + conv.bias[:, None, None]
    if residual is not None:
        y = y + residual
    return pooled(y.relu() if conv.relu else y, conv.pool)


def pooled(y: Tensor, pool: MaxPool | None) -> Tensor:
    """The result after the pooling."""
    return y if pool is None else functional.max_pool2d(y, pool.kernel_size, pool.stride, pool.padding)


def in_precision(conv: FusedConv, dtype: torch.dtype) -> FusedConv:
    """The same convolution in another precision."""
    return replace(conv, weight=conv.weight.to(dtype), bias=conv.bias.to(dtype))


def with_wider_groups(conv: FusedConv, groups: int) -> FusedConv:
    """The same function with fewer groups, a divisor of the number there are, and zeros between the merged ones."""
    return replace(conv, weight=merged_weight(conv.weight, conv.groups, groups), groups=groups)


def with_orders_in_weight(conv: FusedConv) -> FusedConv:
    """The same function of one group, whose weight absorbs both orders."""
    dense = with_wider_groups(conv, 1)
    weight = dense.weight
    if conv.in_order is not None:
        weight = torch.zeros_like(weight).index_add_(1, conv.in_order, weight)
    if conv.out_order is not None:
        weight = weight.index_select(0, conv.out_order)
    return replace(dense, weight=weight, in_order=None, out_order=None)


def piece_table(order: Tensor, group_width: int) -> tuple[Tensor, int]:
    """An order as numbers of whole pieces of neighbouring channels, and their width, which divides that of the groups.

    The width is a power of two, as large as possible up to `LARGEST_PIECE`.

    >>> piece_table(torch.tensor([4, 5, 6, 7, 0, 1, 2, 3]), 4)
    (tensor([1, 0], dtype=torch.int32), 4)
    """
    piece = math.gcd(LARGEST_PIECE, group_width)
    while piece > 1 and not _has_pieces(order, piece):
        piece //= 2
    return (order[::piece] // piece).to(torch.int32), piece


def _has_pieces(order: Tensor, piece: int) -> bool:
    pieces = order.reshape(-1, piece)
    first, steps = pieces[:, :1], torch.arange(piece, device=order.device)
    return not (first % piece).any() and torch.equal(pieces, first + steps)
