"""The Triton kernel for group convolutions: on a GPU where there is one, else in Triton's interpreter."""

import itertools
from dataclasses import replace

import pytest
import torch
from fused_convs import DEVICE, assert_exact, random_conv

from strucspars.kernels.fused_conv import FusedConv
from strucspars.kernels.grouped_conv import GroupedConv, Tiles
from strucspars.kernels.kernel import Call

pytest.importorskip("triton")

KERNEL = GroupedConv()


@pytest.mark.parametrize("seed", range(40))
def test_random_convolutions_are_exact(seed: int) -> None:
    conv, call = random_conv(seed)
    options = KERNEL.options(conv, call)
    assert_exact(KERNEL, conv, call, options[seed % len(options)], seed=seed)


@pytest.mark.parametrize(("block_m", "block_n", "block_k"), list(itertools.product((16, 64), (16, 32), (16, 64))))
def test_tiles_larger_and_smaller_than_the_groups_are_exact(block_m: int, block_n: int, block_k: int) -> None:
    conv, call = random_conv(3)
    conv = replace(conv, weight=torch.randn(48, 24, 3, 3).to(conv.weight), groups=2, bias=torch.randn(48).to(conv.bias))
    conv = replace(conv, in_order=torch.randperm(48).to(DEVICE), out_order=torch.randperm(48).to(DEVICE))
    call = replace(call, input_shape=(2, 48, 5, 4))
    for groups in (1, 2):
        assert_exact(KERNEL, conv, call, str(Tiles(groups, block_m, block_n, block_k, 4, 3)))


def test_the_text_of_tiles_says_all_of_them() -> None:
    tiles = Tiles(groups=4, block_m=128, block_n=64, block_k=32, num_warps=8, num_stages=3)
    assert Tiles.read(str(tiles)) == tiles


def test_an_empty_batch_gives_an_empty_result() -> None:
    conv, call = random_conv(0)
    call = replace(call, input_shape=(0, *call.input_shape[1:]))
    assert_exact(KERNEL, conv, call, KERNEL.options(conv, call)[0])


def test_not_a_number_passes_through_relu() -> None:
    conv = FusedConv(weight=torch.ones(16, 16, 1, 1, device=DEVICE), bias=torch.zeros(16, device=DEVICE), relu=True)
    call = Call(input_shape=(1, 16, 2, 2), has_residual=False, dtype=torch.float32, device=DEVICE)
    x = torch.full(call.input_shape, torch.nan, device=DEVICE)
    assert KERNEL.prepare(conv, call, KERNEL.options(conv, call)[0])(x, None).isnan().all()


def test_what_cannot_be_computed_is_not_supported() -> None:
    conv, call = random_conv(0)
    assert KERNEL.supports(conv, call)
    assert not KERNEL.supports(replace(conv, dilation=(2, 2)), call)
    assert not KERNEL.supports(conv, replace(call, dtype=torch.float64))
    assert not KERNEL.supports(conv, replace(call, input_shape=(2**20, conv.in_channels, 200, 200)))
