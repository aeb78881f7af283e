"""The Triton kernel for seams: on a GPU where there is one, else in Triton's interpreter."""

import random
from dataclasses import replace

import pytest
import torch
from fused_convs import assert_exact_seam, pointwise, random_seam

from strucspars.kernels.fused_conv import FusedConv
from strucspars.kernels.seam import KERNEL, Seam

pytest.importorskip("triton")


@pytest.mark.parametrize("seed", range(40))
def test_random_seams_are_exact(seed: int) -> None:
    problem = random_seam(seed)
    options = [option for _, option in problem.implementations()]
    for option in options[seed % 4 :: 4][:1]:
        assert_exact_seam(problem, option)


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
