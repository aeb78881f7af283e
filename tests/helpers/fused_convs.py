"""Random fused convolutions of all kinds, and a comparison of kernels with double precision."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from strucspars.kernels.fused_conv import FusedConv, in_precision, reference
from strucspars.kernels.kernel import Call, Kernel, signature
from strucspars.kernels.pooled_stem import POOL
from strucspars.kernels.seam import Seam, SeamCall, SeamProblem, seam_in_precision, seam_reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Fractions of the largest entry: rounding of the result, and of sums in float32.
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 5e-6}
WIDTHS = (1, 3, 4, 8, 12, 16, 24, 32, 40, 64)


KERNELS = ((1, 1), (1, 1), (3, 3), (3, 3), (1, 3), (5, 5))


def random_conv(
    seed: int, *, most_images: int = 2, largest_image: int = 6, kernels: Sequence[tuple[int, int]] = KERNELS
) -> tuple[FusedConv, Call]:
    """A convolution of random shape, groups, stride, precision, orders and surroundings; some have no images."""
    draw = random.Random(seed)
    groups = draw.choice((1, 1, 2, 3, 4, 8))
    in_width, out_width = draw.choice(WIDTHS), draw.choice(WIDTHS)
    kernel = draw.choice(kernels)
    dtype = draw.choice((torch.float16, torch.bfloat16, torch.float32))
    generator = torch.Generator().manual_seed(seed)

    def order(channels: int) -> Tensor | None:
        pieces = [piece for piece in (1, 4, 8, 16) if channels % piece == 0]
        piece = draw.choice((0, *pieces))
        if not piece:
            return None
        places = torch.randperm(channels // piece, generator=generator)[:, None] * piece + torch.arange(piece)
        return places.flatten().to(DEVICE)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE, dtype)

    weight = drawn(groups * out_width, in_width, *kernel) * (in_width * kernel[0] * kernel[1]) ** -0.5
    conv = FusedConv(
        weight=weight,
        bias=drawn(groups * out_width),
        groups=groups,
        stride=draw.choice(((1, 1), (1, 1), (2, 2), (2, 1))),
        padding=draw.choice(((0, 0), (kernel[0] // 2, kernel[1] // 2), (1, 2))),
        in_order=order(groups * in_width),
        out_order=order(groups * out_width),
        relu=draw.random() < 0.5,
    )
    height, width = (draw.randint(size, max(size, largest_image)) for size in kernel)
    images = draw.choice((0, *range(1, most_images + 1), most_images))
    call = Call(
        input_shape=(images, conv.in_channels, height, width),
        has_residual=draw.random() < 0.5,
        dtype=dtype,
        device=DEVICE,
        float32_products=draw.choice(("ieee", "tf32x3")) if dtype == torch.float32 else "ieee",
    )
    return conv, call


def random_3x3(seed: int, *, most_images: int = 2, largest_image: int = 6) -> tuple[FusedConv, Call]:
    """A 3x3 convolution with padding, of stride 1 or 2."""
    conv, call = random_conv(seed, most_images=most_images, largest_image=largest_image, kernels=[(3, 3)])
    stride = 1 + seed % 2
    return replace(conv, stride=(stride, stride), padding=(1, 1)), replace(call, has_residual=False)


def pooled_stem(channels: int, outs: int, size: int, stride: int, padding: int, dtype: torch.dtype) -> FusedConv:
    """A convolution of few channels before the usual pooling."""
    torch.manual_seed(size)
    weight = torch.randn(outs, channels, size, size) / size
    return FusedConv(
        weight=weight.to(DEVICE, dtype),
        bias=torch.randn(outs).to(DEVICE, dtype),
        stride=(stride, stride),
        padding=(padding, padding),
        in_order=torch.randperm(channels).to(DEVICE),
        pool=POOL,
    )


def call_of(conv: FusedConv, batch: int, height: int, width: int) -> Call:
    """How it is called with so many images."""
    shape = (batch, conv.in_channels, height, width)
    return Call(input_shape=shape, has_residual=False, dtype=conv.weight.dtype, device=DEVICE)


def pointwise(outs: int, ins: int, draw: random.Random, dtype: torch.dtype, *, stride: int = 1) -> FusedConv:
    groups = draw.choice([groups for groups in (1, 2, 3, 4, 8) if outs % groups == ins % groups == 0])
    weight = torch.randn(outs, ins // groups, 1, 1) * (ins // groups) ** -0.5
    bias = torch.randn(outs)
    strides = (stride, stride)
    return FusedConv(weight=weight.to(DEVICE, dtype), bias=bias.to(DEVICE, dtype), groups=groups, stride=strides)


def random_seam(seed: int, *, most_images: int = 3, largest_image: int = 6) -> SeamProblem:
    """A seam of random widths, groups, orders and shortcut; of groups that do not fit, too."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    dtype = draw.choice((torch.float16, torch.bfloat16, torch.float32))
    wide = draw.choice((64, 96, 128, 192))
    narrow, narrow_out, others = (draw.choice((8, 16, 24, 48, 64)) for _ in range(3))
    stride = draw.choice((1, 2))
    first = replace(pointwise(wide, narrow, draw, dtype), relu=draw.random() < 0.8)
    piece = draw.choice((0, 1, 8))
    if piece:
        order = (torch.randperm(narrow // piece)[:, None] * piece + torch.arange(piece)).flatten()
        first = replace(first, in_order=order.to(DEVICE))
    shortcut = pointwise(wide, others, draw, dtype, stride=stride) if draw.random() < 0.5 else None
    second = replace(pointwise(narrow_out, wide, draw, dtype), relu=True) if draw.random() < 0.7 else None
    size = draw.randint(1, largest_image), draw.randint(1, largest_image)
    call = Call(
        input_shape=(draw.randint(0, most_images), narrow, *size),
        has_residual=shortcut is not None or draw.random() < 0.7,
        dtype=dtype,
        device=DEVICE,
    )
    odd = draw.randint(0, 1) if stride == 2 else 0
    other_size = size if shortcut is None else (size[0] * stride - odd, size[1] * stride)
    return SeamProblem(Seam(first=first, shortcut=shortcut, second=second), SeamCall(first=call, other_size=other_size))


def random_inputs(conv: FusedConv, call: Call, *, seed: int = 0) -> tuple[Tensor, Tensor | None]:
    """Input and residual, channels last; with odd seeds they begin in the middle of 16 bytes."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(batch: int, channels: int, height: int, width: int) -> Tensor:
        entries = batch * channels * height * width
        values = torch.randn(entries + 1, generator=generator).to(call.device, call.dtype)
        values = values[seed % 2 :][:entries]
        return values.view(batch, height, width, channels).permute(0, 3, 1, 2)

    batch, _, height, width = call.input_shape
    out_shape = (batch, conv.out_channels, *conv.out_size(height, width))
    return drawn(*call.input_shape), drawn(*out_shape) if call.has_residual else None


@contextmanager
def nan_in_new_memory() -> Iterator[None]:
    """What a kernel does not write is NaN: PyTorch fills new memory in its deterministic mode."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def assert_exact(kernel: Kernel, conv: FusedConv, call: Call, option: str, *, seed: int = 0) -> None:
    """A kernel gives what double precision gives, up to rounding, and writes every entry."""
    x, residual = random_inputs(conv, call, seed=seed)
    expected = reference(in_precision(conv, torch.float64), x.double(), None if residual is None else residual.double())
    run = kernel.prepare(conv, call, option)
    with nan_in_new_memory():
        found = run(x, residual)
    place = f"{signature(conv, call)}; {option}"
    assert found.dtype == call.dtype, place
    assert found.shape == expected.shape, place
    assert found.is_contiguous(memory_format=torch.channels_last), place
    if expected.numel():
        off = ((found.double() - expected).abs().max() / expected.abs().max().clamp(min=1e-30)).item()
        assert off <= TOLERANCE[call.dtype], f"off by {off}: {place}"


def assert_exact_seam(problem: SeamProblem, option: str) -> None:
    """A seam gives what double precision gives, up to rounding, and writes every entry."""
    inputs = problem.inputs()
    narrow, other = (None if each is None else each.double() for each in inputs)
    assert narrow is not None
    expected = seam_reference(seam_in_precision(problem.seam, torch.float64), narrow, other)
    with nan_in_new_memory():
        found = problem.prepare("", option)(*inputs)
    for one, wanted in zip(found, expected, strict=True):
        if one is None or wanted is None:
            assert one is wanted is None
            continue
        assert one.shape == wanted.shape
        if wanted.numel():
            off = ((one.double() - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30)).item()
            # The narrow result is computed from the rounded wide one.
            assert off <= 2 * TOLERANCE[problem.dtype], f"off by {off}: {problem.signature}; {option}"
