"""The code of `GroupedConv` that runs on the GPU.

A program computes a tile of positions times output channels of one group. For every tap of the kernel and every block
of input channels it multiplies a tile of the input with a tile of the weight: nothing is unfolded in memory. Bias,
residual and ReLU follow before the tile is stored.
"""

# What Triton compiles has types of its own.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl

# Compiled code that depends on these would be compiled for every batch and image anew.
SIZES = ["num_positions", "in_height", "in_width", "out_height", "out_width", "num_groups"]


@triton.jit(do_not_specialize=SIZES)
def grouped_conv_kernel(
    x,
    weight,
    bias,
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
    out_channels,
    num_groups,
    stride_h,
    stride_w,
    pad_h,
    pad_w,
    GROUP_IN: tl.constexpr,
    GROUP_OUT: tl.constexpr,
    KERNEL_H: tl.constexpr,
    KERNEL_W: tl.constexpr,
    IS_POINTWISE: tl.constexpr,
    IN_PIECE: tl.constexpr,
    OUT_PIECE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    RELU: tl.constexpr,
    PRODUCTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute `reference` of fused_conv.py for tensors that are channels last, and a weight that is so too."""
    # Tiles of the same positions are neighbours, so that they read the same lines of memory at about the same time.
    tiles_per_group: tl.constexpr = (GROUP_OUT + BLOCK_N - 1) // BLOCK_N
    column_tile = tl.program_id(0) % (num_groups * tiles_per_group)
    group = column_tile // tiles_per_group
    positions = tl.program_id(0) // (num_groups * tiles_per_group) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = column_tile % tiles_per_group * BLOCK_N + tl.arange(0, BLOCK_N)
    is_position = positions < num_positions
    is_column = columns < GROUP_OUT

    # The channels of the result.
    places = group * GROUP_OUT + columns
    if OUT_PIECE > 0:
        written = tl.load(out_pieces + places // OUT_PIECE, mask=is_column, other=0)
        places_out = written * OUT_PIECE + places % OUT_PIECE
        places_out = tl.max_contiguous(tl.multiple_of(places_out, OUT_PIECE), OUT_PIECE)
    else:
        places_out = places
    out_offsets = positions[:, None] * out_channels + places_out[None, :]
    is_inside = is_position[:, None] & is_column[None, :]

    # Loaded early and added late: the products need not wait for them.
    shift = tl.load(bias + places_out, mask=is_column, other=0.0)
    if HAS_RESIDUAL:
        others = tl.load(residual + out_offsets, mask=is_inside, other=0.0)
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)

    # The first position that each row reads; in the padding it is outside of the input.
    if IS_POINTWISE:
        row_offsets = positions * in_channels
    else:
        images = positions // (out_height * out_width)
        within = positions % (out_height * out_width)
        first_row = within // out_width * stride_h - pad_h
        first_column = within % out_width * stride_w - pad_w
        row_offsets = ((images * in_height + first_row) * in_width + first_column) * in_channels

    blocks: tl.constexpr = (GROUP_IN + BLOCK_K - 1) // BLOCK_K
    for step in range(KERNEL_H * KERNEL_W * blocks):
        tap = step // blocks
        channels = step % blocks * BLOCK_K + tl.arange(0, BLOCK_K)
        is_channel = channels < GROUP_IN
        sources = group * GROUP_IN + channels
        if IN_PIECE > 0:
            read = tl.load(in_pieces + sources // IN_PIECE, mask=is_channel, other=0)
            sources = read * IN_PIECE + sources % IN_PIECE
            sources = tl.max_contiguous(tl.multiple_of(sources, IN_PIECE), IN_PIECE)
        if IS_POINTWISE:
            is_read = is_position
            tap_offsets = row_offsets
        else:
            row = first_row + tap // KERNEL_W
            column = first_column + tap % KERNEL_W
            is_read = is_position & (row >= 0) & (row < in_height) & (column >= 0) & (column < in_width)
            tap_offsets = row_offsets + (tap // KERNEL_W * in_width + tap % KERNEL_W) * in_channels
        inputs = tl.load(
            x + tap_offsets[:, None] + sources[None, :], mask=is_read[:, None] & is_channel[None, :], other=0.0
        )
        weight_offsets = places[None, :] * (KERNEL_H * KERNEL_W * GROUP_IN) + tap * GROUP_IN + channels[:, None]
        weights = tl.load(weight + weight_offsets, mask=is_channel[:, None] & is_column[None, :], other=0.0)
        accumulator = tl.dot(inputs, weights, accumulator, input_precision=PRODUCTS)

    accumulator += shift.to(tl.float32)[None, :]
    if HAS_RESIDUAL:
        accumulator += others.to(tl.float32)
    if RELU:
        accumulator = tl.maximum(accumulator, 0.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(out + out_offsets, accumulator.to(out.dtype.element_ty), mask=is_inside)
