"""The Triton kernel for 3x3 convolutions: on a GPU where there is one, else in Triton's interpreter."""

import re
from dataclasses import replace

import pytest
import torch
from fused_convs import assert_exact, random_3x3

from strucspars.kernels.row_conv import RowConv

pytest.importorskip("triton")

KERNEL = RowConv()


@pytest.mark.parametrize("seed", range(24))
def test_random_convolutions_are_exact(seed: int) -> None:
    conv, call = random_3x3(seed)
    if not KERNEL.supports(conv, call):
        assert conv.stride == (2, 2)
        return
    for option in KERNEL.options(conv, call)[seed % 2 :: 3]:
        # Small tiles and strips: interpreted programs are slow, and several strips have edges between them.
        assert_exact(KERNEL, conv, call, re.sub(r"rows \d+, columns \d+", "rows 2, columns 16", option), seed=seed)


def test_a_tile_of_several_images_is_exact() -> None:
    conv, call = random_3x3(1)
    call = replace(call, input_shape=(5, conv.in_channels, 5, 3))
    assert_exact(KERNEL, conv, call, KERNEL.options(conv, call)[0])


def test_what_cannot_be_computed_is_not_supported() -> None:
    conv, call = random_3x3(0)
    assert KERNEL.supports(conv, call)
    weight = conv.weight
    for other in (
        replace(conv, padding=(0, 0)),
        replace(conv, stride=(2, 1)),
        replace(conv, weight=weight[..., :1, :1]),
        replace(conv, weight=torch.zeros(weight.shape[0], 65, 3, 3).to(weight)),
    ):
        assert not KERNEL.supports(other, call)
    assert not KERNEL.supports(conv, replace(call, has_residual=True))
