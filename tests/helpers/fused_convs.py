"""Random fused convolutions of all kinds, and a comparison of kernels with double precision."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from strucspars.kernels.fused_conv import FusedConv, in_precision, reference
from strucspars.kernels.kernel import Call, Kernel, signature

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
