"""The Triton kernel for seams: on a GPU where there is one, else in Triton's interpreter."""

import random
from dataclasses import replace

import pytest
import torch
from fused_convs import DEVICE, TOLERANCE, nan_in_new_memory
from torch import Tensor

from strucspars.kernels.fused_conv import FusedConv
from strucspars.kernels.kernel import Call
from strucspars.kernels.seam import KERNEL, Seam, SeamCall, SeamProblem, seam_in_precision, seam_reference

pytest.importorskip("triton")


def pointwise(outs: int, ins: int, draw: random.Random, dtype: torch.dtype, *, stride: int = 1) -> FusedConv:
    groups = draw.choice([groups for groups in (1, 2, 3, 4, 8) if outs % groups == ins % groups == 0])
    weight = torch.randn(outs, ins // groups, 1, 1) * (ins // groups) ** -0.5
    bias = torch.randn(outs)
    strides = (stride, stride)
    return FusedConv(weight=weight.to(DEVICE, dtype), bias=bias.to(DEVICE, dtype), groups=groups, stride=strides)


def random_seam(seed: int) -> SeamProblem:
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
    size = draw.randint(1, 6), draw.randint(1, 6)
    call = Call(
        input_shape=(draw.choice((0, 1, 2, 3)), narrow, *size),
        has_residual=shortcut is not None or draw.random() < 0.7,
        dtype=dtype,
        device=DEVICE,
    )
    odd = draw.randint(0, 1) if stride == 2 else 0
    other_size = size if shortcut is None else (size[0] * stride - odd, size[1] * stride)
    return SeamProblem(Seam(first=first, shortcut=shortcut, second=second), SeamCall(first=call, other_size=other_size))


@pytest.mark.parametrize("seed", range(60))
def test_random_seams_are_exact(seed: int) -> None:
    problem = random_seam(seed)
    inputs = problem.inputs()
    narrow, other = (None if each is None else each.double() for each in inputs)
    assert narrow is not None
    expected = seam_reference(seam_in_precision(problem.seam, torch.float64), narrow, other)
    options = [option for _, option in problem.implementations()]
    for option in options[seed % 4 :: 4][:1]:
        with nan_in_new_memory():
            found = problem.prepare("", option)(*inputs)
        for one, wanted in zip(found, expected, strict=True):
            assert_close(one, wanted, problem.dtype)


def assert_close(found: Tensor | None, expected: Tensor | None, dtype: torch.dtype) -> None:
    if expected is None or found is None:
        assert found is expected is None
        return
    assert found.shape == expected.shape
    if expected.numel():
        off = (found.double() - expected).abs().max() / expected.abs().max().clamp(min=1e-30)
        # The narrow result is computed from the rounded wide one.
        assert off.item() <= 2 * TOLERANCE[dtype]


def test_most_random_seams_are_supported() -> None:
    assert sum(bool(list(random_seam(seed).implementations())) for seed in range(60)) > 30


def test_groups_without_common_chunks_are_not_supported() -> None:
    problem = random_seam(0)
    call = problem.call
    draw = random.Random(0)
    narrow = FusedConv(weight=torch.zeros(24, 8, 1, 1), bias=torch.zeros(24), groups=3)
    assert not KERNEL.supports(Seam(first=narrow, second=pointwise(8, 24, draw, torch.float32)), call)
    first = problem.seam.first
    for other in (
        replace(first, stride=(2, 2)),
        replace(first, out_order=torch.arange(first.out_channels)),
    ):
        assert not KERNEL.supports(Seam(first=other), call)
