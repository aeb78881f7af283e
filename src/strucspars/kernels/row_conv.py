"""3x3 group convolution that goes down the rows of images, in Triton.

It loads every row of the input three times where one tap after the other would load it nine times, and keeps the weight
of a group in shared memory: made for narrow groups and large batches.
"""

import re
from collections.abc import Iterator, Sequence
from typing import final

import torch
from torch import Tensor

from strucspars.kernels.fused_conv import FusedConv, with_wider_groups
from strucspars.kernels.grouped_conv import (
    MOST_ENTRIES,
    MULTIPROCESSORS,
    order_table,
    power_of_two,
    wider_groups,
)
from strucspars.kernels.kernel import Call, Kernel, Run
from strucspars.kernels.launch import has_triton, launch

# Nine tiles of the weight have to fit into shared memory.
WIDEST_GROUP = 64
WIDEST_BYTES = 128


@final
class RowConv(Kernel):
    """3x3 kernels with padding 1 and stride 1 or 2, for groups of up to `WIDEST_GROUP` channels."""

    def supports(self, conv: FusedConv, call: Call) -> bool:
        """Whether there are tiles for the groups."""
        batch, channels, height, width = call.input_shape
        return (
            has_triton(call.device)
            and call.dtype in (torch.float16, torch.bfloat16, torch.float32)
            and conv.kernel_size == (3, 3)
            and conv.padding == conv.dilation == (1, 1)
            # With stride 2, float32 does not fit into shared memory.
            and (conv.stride == (1, 1) or (conv.stride == (2, 2) and call.dtype.itemsize == 2))
            and conv.pool is None
            and not call.has_residual
            and max(conv.in_width, conv.out_width) <= _widest(call)
            and batch * height * width * max(channels, conv.out_channels) <= MOST_ENTRIES
        )

    def options(self, conv: FusedConv, call: Call) -> Sequence[str]:
        """Some tiles for each useful number of groups."""
        return list(self._options(conv, call))

    def _options(self, conv: FusedConv, call: Call) -> Iterator[str]:
        batch, _, height, width = call.input_shape
        out_height, out_width = conv.out_size(height, width)
        wider = max(conv.in_channels, conv.out_channels)
        fitting = [groups for groups in wider_groups(conv, 32, WIDEST_GROUP) if wider // groups <= _widest(call)]
        for groups in fitting or [conv.groups]:
            group_width = wider // groups
            num_warps = 8 if group_width == WIDEST_GROUP or call.dtype.itemsize == 4 else 4
            for block_m, warps in ((128, num_warps), (64, 4)):
                tiles = -(-batch * out_width // block_m) * groups
                rows = next((r for r in (14, 7, 4) if tiles * -(-out_height // r) >= 2 * MULTIPROCESSORS), 2)
                # Stride 2 loads two rows at once: only narrow groups leave memory for those of the next step.
                stages = 1 if conv.stride == (2, 2) and group_width > 32 else 2
                rows = min(rows, out_height)
                yield f"groups {groups}, rows {rows}, columns {block_m}, warps {warps}, stages {stages}"

    def prepare(self, conv: FusedConv, call: Call, option: str) -> Run:
        """The convolution with these tiles."""
        groups, rows, block_m, num_warps, num_stages = map(int, re.findall(r"\d+", option))
        merged = with_wider_groups(conv, groups)
        weight = merged.weight.permute(0, 2, 3, 1).contiguous()
        out_places = None if conv.out_order is None else conv.out_order.argsort()
        in_pieces, in_piece = order_table(conv.in_order, merged.in_width)
        out_pieces, out_piece = order_table(out_places, merged.out_width)

        def run(x: Tensor, residual: Tensor | None) -> Tensor:
            from strucspars.kernels.row_conv_triton import row_conv_kernel

            x = x.contiguous(memory_format=torch.channels_last)
            batch, in_channels, in_height, in_width = x.shape
            out_height, out_width = conv.out_size(in_height, in_width)
            shape = (batch, conv.out_channels, out_height, out_width)
            out = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
            if not out.numel():
                return out
            launch(
                row_conv_kernel,
                (-(-batch * out_width // block_m) * groups, -(-out_height // rows)),
                x,
                weight,
                conv.bias,
                out,
                in_pieces,
                out_pieces,
                batch * out_width,
                in_height,
                in_width,
                out_height,
                out_width,
                in_channels,
                conv.out_channels,
                groups,
                STRIDE=conv.stride[0],
                GROUP_IN=merged.in_width,
                GROUP_OUT=merged.out_width,
                IN_PIECE=in_piece,
                OUT_PIECE=out_piece,
                RELU=conv.relu,
                PRODUCTS=call.float32_products,
                ROWS=rows,
                BLOCK_M=block_m,
                BLOCK_N=power_of_two(merged.out_width, WIDEST_GROUP),
                BLOCK_K=power_of_two(merged.in_width, WIDEST_GROUP),
                num_warps=num_warps,
                num_stages=num_stages,
            )
            return out

        return run


def _widest(call: Call) -> int:
    return WIDEST_BYTES // call.dtype.itemsize
