"""The first convolution of a network with its ReLU and max pooling in one pass, in Triton.

The images are copied into larger ones with four channels and zeros around them, so that the pixels under a row of the
kernel are one aligned piece of memory. The convolution's result, the largest tensor of many networks, stays in
registers.
"""

import re
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor
from torch.nn import functional

from strucspars.kernels.fused_conv import FusedConv, MaxPool, with_orders_in_weight
from strucspars.kernels.grouped_conv import MOST_ENTRIES
from strucspars.kernels.kernel import Call, Kernel, Run
from strucspars.kernels.launch import has_triton, launch

POOL = MaxPool((3, 3), (2, 2), (1, 1))
# Channels of a pixel in the padded images.
PIXEL = 4
COPIED_PIXELS = 1024
# Rows of a strip, columns and output channels of a tile, warps, depth of the pipeline of loads.
OPTIONS = ((8, 64, 64, 4, 3), (8, 64, 64, 8, 3), (8, 128, 64, 8, 3), (8, 64, 64, 8, 1), (2, 64, 32, 4, 3))


@final
class PooledStem(Kernel):
    """Dense convolution of few channels, ReLU, and max pooling 3 x 3 with stride 2."""

    def supports(self, conv: FusedConv, call: Call) -> bool:
        """Convolutions of up to four channels with one stride, before the usual pooling."""
        batch, channels, height, width = call.input_shape
        padded = _padded_size(conv, height, width)
        entries = batch * max(padded[0] * padded[1] * PIXEL, conv.out_channels * height * width)
        return (
            has_triton(call.device)
            and call.dtype in (torch.float16, torch.bfloat16, torch.float32)
            and channels <= PIXEL
            and conv.pool == POOL
            and conv.dilation == (1, 1)
            and conv.stride[0] == conv.stride[1]
            and conv.out_channels % 16 == 0
            and not call.has_residual
            and entries <= MOST_ENTRIES
        )

    def options(self, conv: FusedConv, call: Call) -> Sequence[str]:
        """Strips of some rows, and tiles of some columns."""
        return [
            f"strip {strip}, tile {columns}x{_tile_width(conv, outs)}, warps {warps}, stages {stages}"
            for strip, columns, outs, warps, stages in OPTIONS
        ]

    def prepare(self, conv: FusedConv, call: Call, option: str) -> Run:
        """The convolution with these strips and tiles."""
        strip, columns, block_n, warps, stages = map(int, re.findall(r"\d+", option))
        dense = with_orders_in_weight(conv)
        kernel_h, kernel_w = conv.kernel_size
        entries = max(16, 1 << (kernel_w * PIXEL - 1).bit_length())
        # (C_out, height, width * PIXEL), with zeros for channels and pixels that there are not.
        weight = functional.pad(dense.weight.permute(0, 2, 3, 1), (0, PIXEL - conv.in_channels)).flatten(2)
        weight = functional.pad(weight, (0, entries - weight.shape[2])).contiguous()
        stride = conv.stride[0]

        def run(x: Tensor, residual: Tensor | None) -> Tensor:
            from strucspars.kernels.pooled_stem_triton import pad_kernel, pooled_stem_kernel

            x = x.contiguous(memory_format=torch.channels_last)
            batch, channels, height, width = x.shape
            conv_height, conv_width = conv.conv_size(height, width)
            pooled_height, pooled_width = conv.out_size(height, width)
            shape = (batch, conv.out_channels, pooled_height, pooled_width)
            out = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
            if not out.numel():
                return out
            padded_height, padded_width = _padded_size(conv, height, width)
            num_pixels = batch * padded_height * padded_width
            padded = torch.empty(num_pixels * PIXEL, dtype=x.dtype, device=x.device)
            launch(
                pad_kernel,
                (-(-num_pixels // COPIED_PIXELS),),
                x,
                padded,
                num_pixels,
                height,
                width,
                padded_height,
                padded_width,
                # A stride more than the convolution pads: pooling looks at row and column -1.
                conv.padding[0] + stride,
                conv.padding[1] + stride,
                CHANNELS=channels,
                PIXEL=PIXEL,
                BLOCK=COPIED_PIXELS,
            )
            grid = (-(-batch * pooled_width // columns), -(-pooled_height // strip), conv.out_channels // block_n)
            launch(
                pooled_stem_kernel,
                grid,
                padded,
                weight,
                dense.bias,
                out,
                batch * pooled_width,
                pooled_height,
                pooled_width,
                conv_height,
                conv_width,
                padded_height,
                padded_width,
                OUT=conv.out_channels,
                KERNEL_H=kernel_h,
                STRIDE=stride,
                PIXEL=PIXEL,
                ENTRIES=entries,
                RELU=conv.relu,
                PRODUCTS=call.float32_products,
                STRIP=strip,
                BLOCK_M=columns,
                BLOCK_N=block_n,
                num_warps=warps,
                num_stages=stages,
            )
            return out

        return run


def _tile_width(conv: FusedConv, most: int) -> int:
    """The widest tile that divides the output channels."""
    return next(width for width in (64, 32, 16) if width <= most and conv.out_channels % width == 0)


def _padded_size(conv: FusedConv, height: int, width: int) -> tuple[int, int]:
    """Of the larger images: everything that the windows of the last row and column read is inside."""
    stride, (kernel_h, kernel_w) = conv.stride[0], conv.kernel_size
    pooled_height, pooled_width = conv.out_size(height, width)
    pixels = max(16, 1 << (kernel_w * PIXEL - 1).bit_length()) // PIXEL
    # The last window ends at row 2 * pooled - 1 of the convolution. Rows begin at multiples of 16 pixels: the compiler
    # looks for that, and loads 16 bytes at a time.
    reached = 2 * pooled_width * stride + pixels
    return 2 * pooled_height * stride + kernel_h, -(-reached // 16) * 16
