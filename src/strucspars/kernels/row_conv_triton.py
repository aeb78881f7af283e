"""The code of `RowConv` that runs on the GPU.

A program computes some columns of several images for one group, and goes down their rows. Every row of the input is
loaded in its three shifts, and multiplied with the three rows of the kernel: for the rows of the result above it, at it
and below it.
"""

# What Triton compiles has types of its own.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

import triton
import triton.language as tl

# Compiled code that depends on these would be compiled for every batch and image anew.
SIZES = ["num_columns", "in_height", "in_width", "out_height", "out_width", "num_groups"]


@triton.jit
def _weights_of_tap(weight, outs, is_out, tap: tl.constexpr, WIDTH: tl.constexpr, K: tl.constexpr):
    channels = tl.arange(0, K)
    offsets = outs[None, :] * (9 * WIDTH) + tap * WIDTH + channels[:, None]
    return tl.load(weight + offsets, mask=is_out[None, :] & (channels < WIDTH)[:, None], other=0.0)


@triton.jit
def _row(x, starts, sources, is_source, columns, num_columns, column, row, in_height, in_width, in_channels):
    """A row of the input under the three columns of the kernel."""
    is_inside = columns < tl.where((row >= 0) & (row < in_height), num_columns, 0)
    pointers = x + (starts + row * in_width * in_channels)[:, None] + sources[None, :]
    left = tl.load(pointers - in_channels, mask=(is_inside & (column > 0))[:, None] & is_source[None, :], other=0.0)
    middle = tl.load(pointers, mask=is_inside[:, None] & is_source[None, :], other=0.0)
    is_right = is_inside & (column + 1 < in_width)
    right = tl.load(pointers + in_channels, mask=is_right[:, None] & is_source[None, :], other=0.0)
    return left, middle, right


@triton.jit
def _plus_products(total, left, middle, right, one, two, three, PRODUCTS: tl.constexpr):
    total = tl.dot(left, one, total, input_precision=PRODUCTS)
    total = tl.dot(middle, two, total, input_precision=PRODUCTS)
    return tl.dot(right, three, total, input_precision=PRODUCTS)


@triton.jit
def _store_row(out, total, shift, offsets, is_inside, RELU: tl.constexpr):
    total += shift[None, :]
    if RELU:
        total = tl.maximum(total, 0.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(out + offsets, total.to(out.dtype.element_ty), mask=is_inside)


@triton.jit(do_not_specialize=SIZES)
def row_conv_kernel(
    x,
    weight,
    bias,
    out,
    in_pieces,
    out_pieces,
    num_columns,
    in_height,
    in_width,
    out_height,
    out_width,
    in_channels,
    out_channels,
    num_groups,
    STRIDE: tl.constexpr,
    GROUP_IN: tl.constexpr,
    GROUP_OUT: tl.constexpr,
    IN_PIECE: tl.constexpr,
    OUT_PIECE: tl.constexpr,
    RELU: tl.constexpr,
    PRODUCTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute `reference` of fused_conv.py for 3x3 kernels with padding 1, on tensors that are channels last."""
    group = tl.program_id(0) % num_groups
    columns = tl.program_id(0) // num_groups * BLOCK_M + tl.arange(0, BLOCK_M)
    images = columns // out_width
    column = columns % out_width * STRIDE
    starts = (images * in_height * in_width + column) * in_channels
    sources = group * GROUP_IN + tl.arange(0, BLOCK_K)
    is_source = tl.arange(0, BLOCK_K) < GROUP_IN
    if IN_PIECE > 0:
        read = tl.load(in_pieces + sources // IN_PIECE, mask=is_source, other=0)
        sources = read * IN_PIECE + sources % IN_PIECE
        sources = tl.max_contiguous(tl.multiple_of(sources, IN_PIECE), IN_PIECE)
    outs = group * GROUP_OUT + tl.arange(0, BLOCK_N)
    is_out = tl.arange(0, BLOCK_N) < GROUP_OUT
    places = outs
    if OUT_PIECE > 0:
        written = tl.load(out_pieces + outs // OUT_PIECE, mask=is_out, other=0)
        places = written * OUT_PIECE + outs % OUT_PIECE
        places = tl.max_contiguous(tl.multiple_of(places, OUT_PIECE), OUT_PIECE)
    shift = tl.load(bias + places, mask=is_out, other=0.0).to(tl.float32)
    offsets = (images * out_height * out_width + columns % out_width)[:, None] * out_channels + places[None, :]

    one = _weights_of_tap(weight, outs, is_out, 0, GROUP_IN, BLOCK_K)
    two = _weights_of_tap(weight, outs, is_out, 1, GROUP_IN, BLOCK_K)
    three = _weights_of_tap(weight, outs, is_out, 2, GROUP_IN, BLOCK_K)
    four = _weights_of_tap(weight, outs, is_out, 3, GROUP_IN, BLOCK_K)
    five = _weights_of_tap(weight, outs, is_out, 4, GROUP_IN, BLOCK_K)
    six = _weights_of_tap(weight, outs, is_out, 5, GROUP_IN, BLOCK_K)
    seven = _weights_of_tap(weight, outs, is_out, 6, GROUP_IN, BLOCK_K)
    eight = _weights_of_tap(weight, outs, is_out, 7, GROUP_IN, BLOCK_K)
    nine = _weights_of_tap(weight, outs, is_out, 8, GROUP_IN, BLOCK_K)

    first = tl.program_id(1) * ROWS
    last = min(first + ROWS, out_height)
    here = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if STRIDE == 1:
        above = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in range(last - first + 2):
            row = first - 1 + step
            left, middle, right = _row(
                x, starts, sources, is_source, columns, num_columns, column, row, in_height, in_width, in_channels
            )
            below = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            above = _plus_products(above, left, middle, right, seven, eight, nine, PRODUCTS)
            here = _plus_products(here, left, middle, right, four, five, six, PRODUCTS)
            below = _plus_products(below, left, middle, right, one, two, three, PRODUCTS)
            is_complete = columns < tl.where(row > first, num_columns, 0)
            _store_row(
                out,
                above,
                shift,
                offsets + (row - 1) * out_width * out_channels,
                is_complete[:, None] & is_out[None, :],
                RELU,
            )
            above = here
            here = below
    else:
        left, middle, right = _row(
            x, starts, sources, is_source, columns, num_columns, column, 2 * first - 1, in_height, in_width, in_channels
        )
        here = _plus_products(here, left, middle, right, one, two, three, PRODUCTS)
        for step in range(last - first):
            row = first + step
            left, middle, right = _row(
                x, starts, sources, is_source, columns, num_columns, column, 2 * row, in_height, in_width, in_channels
            )
            here = _plus_products(here, left, middle, right, four, five, six, PRODUCTS)
            left, middle, right = _row(
                x,
                starts,
                sources,
                is_source,
                columns,
                num_columns,
                column,
                2 * row + 1,
                in_height,
                in_width,
                in_channels,
            )
            here = _plus_products(here, left, middle, right, seven, eight, nine, PRODUCTS)
            is_inside = (columns < num_columns)[:, None] & is_out[None, :]
            _store_row(out, here, shift, offsets + row * out_width * out_channels, is_inside, RELU)
            here = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            here = _plus_products(here, left, middle, right, one, two, three, PRODUCTS)
