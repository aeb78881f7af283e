"""The Triton kernel for the first convolution: on a GPU where there is one, else in Triton's interpreter."""

from dataclasses import replace

import pytest
import torch
from fused_convs import assert_exact, call_of, pooled_stem

from strucspars.kernels.fused_conv import MaxPool
from strucspars.kernels.pooled_stem import PooledStem

pytest.importorskip("triton")

KERNEL = PooledStem()


@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize(
    ("shape", "window"),
    [
        ((2, 13, 15), (3, 32, 7, 2, 3)),
        ((1, 8, 9), (3, 16, 3, 1, 1)),
        ((3, 6, 4), (1, 64, 5, 2, 2)),
        ((2, 7, 3), (4, 48, 3, 2, 0)),
        ((0, 16, 16), (3, 16, 7, 2, 3)),
    ],
)
def test_stems_are_exact(shape: tuple[int, int, int], window: tuple[int, int, int, int, int], relu: bool) -> None:
    dtype = torch.float16 if relu else torch.float32
    conv = replace(pooled_stem(*window, dtype), relu=relu)
    call = call_of(conv, *shape)
    for option in (KERNEL.options(conv, call)[-1], "strip 3, tile 16x16, warps 4, stages 3"):
        assert_exact(KERNEL, conv, call, option)


def test_other_stems_are_not_supported() -> None:
    conv = pooled_stem(3, 32, 7, 2, 3, torch.float32)
    call = call_of(conv, 1, 9, 9)
    assert KERNEL.supports(conv, call)
    for other in (
        replace(conv, pool=None),
        replace(conv, pool=MaxPool((2, 2), (2, 2), (0, 0))),
        replace(conv, stride=(2, 1)),
        pooled_stem(3, 24, 7, 2, 3, torch.float32),
    ):
        assert not KERNEL.supports(other, call)
    wide = pooled_stem(5, 32, 7, 2, 3, torch.float32)
    assert not KERNEL.supports(wide, call_of(wide, 1, 9, 9))
