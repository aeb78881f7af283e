"""The code of `PooledStem` that runs on the GPU."""

# What Triton compiles has types of its own.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

import triton
import triton.language as tl

# Compiled code that depends on these would be compiled for every batch and image anew.
SIZES = ["num_pixels", "height", "width", "padded_height", "padded_width", "top", "left"]
POOLED_SIZES = ["num_columns", "pooled_height", "pooled_width", "conv_height", "conv_width"]


@triton.jit(do_not_specialize=SIZES)
def pad_kernel(
    x,
    padded,
    num_pixels,
    height,
    width,
    padded_height,
    padded_width,
    top,
    left,
    CHANNELS: tl.constexpr,
    PIXEL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy images, channels last, into larger ones with `PIXEL` channels; the rest is zero."""
    pixels = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = pixels // padded_width % padded_height - top
    column = pixels % padded_width - left
    image = pixels // (padded_width * padded_height)
    channels = tl.arange(0, PIXEL)
    is_inside = (pixels < num_pixels) & (row >= 0) & (row < height) & (column >= 0) & (column < width)
    sources = ((image * height + row) * width + column) * CHANNELS
    values = tl.load(
        x + sources[:, None] + channels[None, :], mask=is_inside[:, None] & (channels < CHANNELS)[None, :], other=0.0
    )
    tl.store(padded + pixels[:, None] * PIXEL + channels[None, :], values, mask=(pixels < num_pixels)[:, None])


@triton.jit
def _largest_of_row(
    padded,
    weight,
    starts,
    columns,
    row,
    is_column,
    conv_height,
    conv_width,
    padded_width,
    OUT: tl.constexpr,
    KERNEL_H: tl.constexpr,
    STRIDE: tl.constexpr,
    PIXEL: tl.constexpr,
    ENTRIES: tl.constexpr,
    PRODUCTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The largest of three neighbours in a row of the convolution's result, around every second column."""
    outs = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    entries = tl.arange(0, ENTRIES)
    left = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    middle = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    right = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for tap in range(KERNEL_H):
        # The images begin a stride later in both directions: row and column -1 can be read.
        begin = starts + ((row + 1) * STRIDE + tap) * padded_width * PIXEL
        sources = padded + begin[:, None] + entries[None, :]
        weights = tl.load(weight + outs[None, :] * (KERNEL_H * ENTRIES) + tap * ENTRIES + entries[:, None])
        inputs = tl.load(sources, mask=is_column[:, None], other=0.0)
        left = tl.dot(inputs, weights, left, input_precision=PRODUCTS)
        inputs = tl.load(sources + STRIDE * PIXEL, mask=is_column[:, None], other=0.0)
        middle = tl.dot(inputs, weights, middle, input_precision=PRODUCTS)
        inputs = tl.load(sources + 2 * STRIDE * PIXEL, mask=is_column[:, None], other=0.0)
        right = tl.dot(inputs, weights, right, input_precision=PRODUCTS)
    lowest = -float("inf")
    left = tl.where((columns > 0)[:, None], left, lowest)
    right = tl.where((2 * columns + 1 < conv_width)[:, None], right, lowest)
    largest = tl.maximum(middle, left, propagate_nan=tl.PropagateNan.ALL)
    largest = tl.maximum(largest, right, propagate_nan=tl.PropagateNan.ALL)
    return tl.where((row >= 0) & (row < conv_height), largest, lowest)


@triton.jit(do_not_specialize=POOLED_SIZES)
def pooled_stem_kernel(
    padded,
    weight,
    bias,
    out,
    num_columns,
    pooled_height,
    pooled_width,
    conv_height,
    conv_width,
    padded_height,
    padded_width,
    OUT: tl.constexpr,
    KERNEL_H: tl.constexpr,
    STRIDE: tl.constexpr,
    PIXEL: tl.constexpr,
    ENTRIES: tl.constexpr,
    RELU: tl.constexpr,
    PRODUCTS: tl.constexpr,
    STRIP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Convolve padded images, and keep the largest of 3 x 3 around every second row and column.

    A program goes down a strip of rows, and keeps the last row of each window for the next one.
    """
    places = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_column = places < num_columns
    columns = places % pooled_width
    images = places // pooled_width
    starts = (images * padded_height * padded_width + 2 * columns * STRIDE) * PIXEL
    outs = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    shift = tl.load(bias + outs).to(tl.float32)
    first = tl.program_id(1) * STRIP
    above = _largest_of_row(
        padded,
        weight,
        starts,
        columns,
        2 * first - 1,
        is_column,
        conv_height,
        conv_width,
        padded_width,
        OUT,
        KERNEL_H,
        STRIDE,
        PIXEL,
        ENTRIES,
        PRODUCTS,
        BLOCK_M,
        BLOCK_N,
    )
    for row in range(first, min(first + STRIP, pooled_height)):
        middle = _largest_of_row(
            padded,
            weight,
            starts,
            columns,
            2 * row,
            is_column,
            conv_height,
            conv_width,
            padded_width,
            OUT,
            KERNEL_H,
            STRIDE,
            PIXEL,
            ENTRIES,
            PRODUCTS,
            BLOCK_M,
            BLOCK_N,
        )
        below = _largest_of_row(
            padded,
            weight,
            starts,
            columns,
            2 * row + 1,
            is_column,
            conv_height,
            conv_width,
            padded_width,
            OUT,
            KERNEL_H,
            STRIDE,
            PIXEL,
            ENTRIES,
            PRODUCTS,
            BLOCK_M,
            BLOCK_N,
        )
        largest = tl.maximum(above, middle, propagate_nan=tl.PropagateNan.ALL)
        largest = tl.maximum(largest, below, propagate_nan=tl.PropagateNan.ALL) + shift[None, :]
        if RELU:
            largest = tl.maximum(largest, 0.0, propagate_nan=tl.PropagateNan.ALL)
        offsets = ((images * pooled_height + row) * pooled_width + columns)[:, None] * OUT + outs[None, :]
        tl.store(out + offsets, largest.to(out.dtype.element_ty), mask=is_column[:, None])
        above = below
