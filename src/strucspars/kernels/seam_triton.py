"""The code of `SeamKernel` that runs on the GPU.

A program computes a tile of positions for one group of the second convolution. It goes through the wide channels that
this group reads, in chunks: each is the product of narrow channels with a tile of the first weight, plus shortcut and
bias, and is stored, and multiplied with a tile of the second weight while it is still in registers.
"""

# What Triton compiles has types of its own.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

import triton
import triton.language as tl

# Compiled code that depends on these would be compiled for every batch and image anew.
SIZES = ["num_positions", "in_height", "in_width", "out_height", "out_width", "num_groups"]


@triton.jit
def _channels_of(
    x, rows, is_row, group, PIECE: tl.constexpr, pieces, num_channels, WIDTH: tl.constexpr, K: tl.constexpr
):
    """The channels of one group at some positions, in the order of the pieces."""
    channels = tl.arange(0, K)
    sources = group * WIDTH + channels
    if PIECE > 0:
        found = tl.load(pieces + sources // PIECE, mask=channels < WIDTH, other=0)
        sources = found * PIECE + sources % PIECE
        sources = tl.max_contiguous(tl.multiple_of(sources, PIECE), PIECE)
    is_inside = is_row[:, None] & (channels < WIDTH)[None, :]
    return tl.load(x + rows[:, None] * num_channels + sources[None, :], mask=is_inside, other=0.0)


@triton.jit
def _weights_of(weight, outs, WIDTH: tl.constexpr, K: tl.constexpr):
    """Rows of a weight as the columns of a tile."""
    channels = tl.arange(0, K)
    return tl.load(weight + outs[None, :] * WIDTH + channels[:, None], mask=(channels < WIDTH)[:, None], other=0.0)


@triton.jit(do_not_specialize=SIZES)
def seam_kernel(
    narrow,
    first_weight,
    first_bias,
    other,
    shortcut_weight,
    wide_out,
    second_weight,
    second_bias,
    narrow_out,
    pieces,
    num_positions,
    in_height,
    in_width,
    out_height,
    out_width,
    num_groups,
    narrow_channels,
    wide_channels,
    other_channels,
    narrow_out_channels,
    STRIDE: tl.constexpr,
    PIECE: tl.constexpr,
    FIRST_IN: tl.constexpr,
    FIRST_OUT: tl.constexpr,
    FIRST_K: tl.constexpr,
    # "none", "residual", or "product" with a weight.
    SHORTCUT: tl.constexpr,
    SHORTCUT_IN: tl.constexpr,
    SHORTCUT_OUT: tl.constexpr,
    SHORTCUT_K: tl.constexpr,
    HAS_SECOND: tl.constexpr,
    # Wide channels of a program.
    SECOND_IN: tl.constexpr,
    SECOND_OUT: tl.constexpr,
    FIRST_RELU: tl.constexpr,
    SECOND_RELU: tl.constexpr,
    PRODUCTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Compute `reference` of seam.py for tensors that are channels last; chunks divide the groups of all weights."""
    group = tl.program_id(0) % num_groups
    positions = tl.program_id(0) // num_groups * BLOCK_M + tl.arange(0, BLOCK_M)
    is_position = positions < num_positions
    begin = group * SECOND_IN
    wide_rows = positions * wide_channels
    if STRIDE > 1:
        within = positions % (out_height * out_width)
        images = positions // (out_height * out_width)
        other_rows = (images * in_height + within // out_width * STRIDE) * in_width + within % out_width * STRIDE
    else:
        other_rows = positions
    # Where all chunks of a program are in one group of the first weight, its inputs are loaded once.
    if FIRST_OUT % SECOND_IN == 0:
        inputs = _channels_of(
            narrow, positions, is_position, begin // FIRST_OUT, PIECE, pieces, narrow_channels, FIRST_IN, FIRST_K
        )
    if SHORTCUT == "product" and SHORTCUT_OUT % SECOND_IN == 0:
        others = _channels_of(
            other, other_rows, is_position, begin // SHORTCUT_OUT, 0, pieces, other_channels, SHORTCUT_IN, SHORTCUT_K
        )
    places = tl.arange(0, CHUNK)
    if SHORTCUT == "residual":
        added = tl.load(other + wide_rows[:, None] + (begin + places)[None, :], mask=is_position[:, None], other=0.0)
    outs = group * SECOND_OUT + tl.arange(0, BLOCK_N)
    is_out = tl.arange(0, BLOCK_N) < SECOND_OUT
    result = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, SECOND_IN, CHUNK):
        wide = begin + start + places
        if FIRST_OUT % SECOND_IN != 0:
            inputs = _channels_of(
                narrow,
                positions,
                is_position,
                (begin + start) // FIRST_OUT,
                PIECE,
                pieces,
                narrow_channels,
                FIRST_IN,
                FIRST_K,
            )
        chunk = tl.dot(inputs, _weights_of(first_weight, wide, FIRST_IN, FIRST_K), input_precision=PRODUCTS)
        if SHORTCUT == "product":
            if SHORTCUT_OUT % SECOND_IN != 0:
                others = _channels_of(
                    other,
                    other_rows,
                    is_position,
                    (begin + start) // SHORTCUT_OUT,
                    0,
                    pieces,
                    other_channels,
                    SHORTCUT_IN,
                    SHORTCUT_K,
                )
            weights = _weights_of(shortcut_weight, wide, SHORTCUT_IN, SHORTCUT_K)
            chunk = tl.dot(others, weights, chunk, input_precision=PRODUCTS)
        chunk += tl.load(first_bias + wide).to(tl.float32)[None, :]
        if SHORTCUT == "residual":
            chunk += added.to(tl.float32)
            # Of the next chunk, while this one is computed.
            is_next = is_position[:, None] & (start + CHUNK + places < SECOND_IN)[None, :]
            added = tl.load(other + wide_rows[:, None] + (wide + CHUNK)[None, :], mask=is_next, other=0.0)
        if FIRST_RELU:
            chunk = tl.maximum(chunk, 0.0, propagate_nan=tl.PropagateNan.ALL)
        rounded = chunk.to(wide_out.dtype.element_ty)
        tl.store(wide_out + wide_rows[:, None] + wide[None, :], rounded, mask=is_position[:, None])
        if HAS_SECOND:
            weights = tl.load(
                second_weight + outs[None, :] * SECOND_IN + (start + places)[:, None], mask=is_out[None, :], other=0.0
            )
            result = tl.dot(rounded, weights, result, input_precision=PRODUCTS)
    if HAS_SECOND:
        result += tl.load(second_bias + outs, mask=is_out, other=0.0).to(tl.float32)[None, :]
        if SECOND_RELU:
            result = tl.maximum(result, 0.0, propagate_nan=tl.PropagateNan.ALL)
        offsets = positions[:, None] * narrow_out_channels + outs[None, :]
        is_inside = is_position[:, None] & is_out[None, :]
        tl.store(narrow_out + offsets, result.to(narrow_out.dtype.element_ty), mask=is_inside)
