"""Group convolution as matrix products on tensor cores, in Triton: channels last, any kernel size, stride and padding.

Orders of channels are tables of pieces: a piece of 8 channels in half precision is one load of 16 bytes.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self, final

import torch
from torch import Tensor

from strucspars.kernels.fused_conv import FusedConv, piece_table, with_wider_groups
from strucspars.kernels.kernel import Call, Kernel, Run
from strucspars.kernels.launch import has_triton, launch

# Triton's matrix products need 16 rows and columns.
SMALLEST_TILE = 16
# Offsets are 32 bits wide.
MOST_ENTRIES = 2**31 - 1
# Of the smallest GPU in mind: fewer programs leave some idle.
MULTIPROCESSORS = 128


@dataclass(frozen=True)
class Tiles:
    """How the work is cut: groups that run as one, the tile, warps per program, and depth of the pipeline of loads."""

    groups: int
    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int

    def __str__(self) -> str:
        return (
            f"groups {self.groups}, tile {self.block_m}x{self.block_n}x{self.block_k}, warps {self.num_warps}, "
            f"stages {self.num_stages}"
        )

    @classmethod
    def read(cls, text: str) -> Self:
        """The tiles that `str` wrote."""
        return cls(*map(int, re.findall(r"\d+", text)))


@final
class GroupedConv(Kernel):
    """`grouped_conv_kernel` with the tiles that fit a convolution."""

    def supports(self, conv: FusedConv, call: Call) -> bool:
        """Any convolution without dilation and pooling, on GPUs with tensor cores, in three precisions."""
        batch, channels, height, width = call.input_shape
        out_height, out_width = conv.out_size(height, width)
        entries = batch * max(height * width * channels, out_height * out_width * conv.out_channels)
        is_known_dtype = call.dtype in (torch.float16, torch.bfloat16, torch.float32)
        is_known_conv = conv.dilation == (1, 1) and conv.pool is None
        return has_triton(call.device) and is_known_dtype and is_known_conv and entries <= MOST_ENTRIES

    def options(self, conv: FusedConv, call: Call) -> Sequence[str]:
        """Some tiles for each useful number of groups."""
        widths = (32, 64) if max(conv.kernel_size) > 1 else (32,)
        return [str(tiles) for groups in wider_groups(conv, *widths) for tiles in _tiles(conv, call, groups)]

    def prepare(self, conv: FusedConv, call: Call, option: str) -> Run:
        """The convolution with these tiles."""
        tiles = Tiles.read(option)
        merged = with_wider_groups(conv, tiles.groups)
        weight = merged.weight.permute(0, 2, 3, 1).contiguous()
        out_places = None if conv.out_order is None else conv.out_order.argsort()
        in_pieces, in_piece = order_table(conv.in_order, merged.in_width)
        out_pieces, out_piece = order_table(out_places, merged.out_width)
        kernel_h, kernel_w = conv.kernel_size

        def run(x: Tensor, residual: Tensor | None) -> Tensor:
            from strucspars.kernels.grouped_conv_triton import grouped_conv_kernel

            x = x.contiguous(memory_format=torch.channels_last)
            batch, in_channels, in_height, in_width = x.shape
            out_height, out_width = conv.out_size(in_height, in_width)
            shape = (batch, conv.out_channels, out_height, out_width)
            out = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
            if residual is not None:
                residual = residual.expand(shape).contiguous(memory_format=torch.channels_last)
            num_positions = batch * out_height * out_width
            programs = -(-num_positions // tiles.block_m) * tiles.groups * -(-merged.out_width // tiles.block_n)
            if not programs:
                return out
            launch(
                grouped_conv_kernel,
                (programs,),
                x,
                weight,
                conv.bias,
                residual,
                out,
                in_pieces,
                out_pieces,
                num_positions,
                in_height,
                in_width,
                out_height,
                out_width,
                in_channels,
                conv.out_channels,
                tiles.groups,
                *conv.stride,
                *conv.padding,
                GROUP_IN=merged.in_width,
                GROUP_OUT=merged.out_width,
                KERNEL_H=kernel_h,
                KERNEL_W=kernel_w,
                IS_POINTWISE=conv.is_pointwise,
                IN_PIECE=in_piece,
                OUT_PIECE=out_piece,
                HAS_RESIDUAL=residual is not None,
                RELU=conv.relu,
                PRODUCTS=call.float32_products,
                BLOCK_M=tiles.block_m,
                BLOCK_N=tiles.block_n,
                BLOCK_K=tiles.block_k,
                num_warps=tiles.num_warps,
                num_stages=tiles.num_stages,
            )
            return out

        return run


def order_table(order: Tensor | None, group_width: int) -> tuple[Tensor | None, int]:
    """The table of an order and the width of its pieces; no table and no width for the natural order."""
    return (None, 0) if order is None else piece_table(order, group_width)


def wider_groups(conv: FusedConv, *widths: int) -> list[int]:
    """Numbers of groups to run with, so that both sides of a group have at least so many channels, if there are."""
    narrower = min(conv.in_width, conv.out_width)
    found = []
    for width in widths:
        fitting = (n for n in range(conv.groups, 1, -1) if conv.groups % n == 0)
        found.append(next((n for n in fitting if narrower * (conv.groups // n) >= width), 1))
    return list(dict.fromkeys(found))


def _tiles(conv: FusedConv, call: Call, groups: int) -> Iterator[Tiles]:
    """Large tiles where there is enough work for all multiprocessors, smaller ones where there is not."""
    batch, _, height, width = call.input_shape
    out_height, out_width = conv.out_size(height, width)
    num_positions = batch * out_height * out_width
    group_in, group_out = conv.in_channels // groups, conv.out_channels // groups
    widest_k = 64 if call.dtype.itemsize == 2 else 32
    block_k = power_of_two(group_in, widest_k)
    widest_n = power_of_two(group_out, 128)
    narrowest_n = widest_n if max(conv.kernel_size) > 1 else min(widest_n, 64)
    for block_n in dict.fromkeys((widest_n, narrowest_n)):
        columns = groups * -(-group_out // block_n)
        largest = (256,) if block_n <= 32 and max(conv.kernel_size) > 1 else ()
        enough = [m for m in (*largest, 128, 64, 32, 16) if -(-num_positions // m) * columns >= MULTIPROCESSORS]
        for block_m in (enough or [16])[:2]:
            num_warps = 8 if block_m * block_n >= 128 * 128 else 4
            yield Tiles(groups, block_m, block_n, block_k, num_warps, 3)


def power_of_two(number: int, most: int) -> int:
    """The smallest power of two that is as large, between the smallest tile and the most."""
    return min(max(1 << (number - 1).bit_length(), SMALLEST_TILE), most)
