"""Other forms of a fused convolution compute the same."""

import pytest
import torch
from fused_convs import random_conv, random_inputs
from hypothesis import given
from hypothesis import strategies as st

from strucspars.kernels.fused_conv import (
    FusedConv,
    in_precision,
    piece_table,
    reference,
    with_orders_in_weight,
    with_wider_groups,
)
from strucspars.kernels.registry import ConvProblem
from strucspars.kernels.stock import MatrixProduct, StockConv

seeds = st.integers(0, 2**16)


@given(seeds)
def test_wider_groups_and_orders_in_the_weight_compute_the_same(seed: int) -> None:
    conv, call = random_conv(seed)
    conv = in_precision(conv, torch.float64)
    x, residual = (None if each is None else each.double() for each in random_inputs(conv, call))
    assert x is not None
    expected = reference(conv, x, residual)
    for groups in (groups for groups in range(1, conv.groups + 1) if conv.groups % groups == 0):
        torch.testing.assert_close(reference(with_wider_groups(conv, groups), x, residual), expected)
    torch.testing.assert_close(reference(with_orders_in_weight(conv), x, residual), expected)


@given(seeds)
def test_the_libraries_compute_the_same(seed: int) -> None:
    conv, call = random_conv(seed)
    problem = ConvProblem(in_precision(conv, torch.float32), call)
    x, residual = (None if each is None else each.float() for each in random_inputs(conv, call))
    assert x is not None
    expected = reference(problem.conv, x, residual)
    for kernel in (StockConv(), MatrixProduct()):
        if kernel.supports(problem.conv, call):
            for option in kernel.options(problem.conv, call):
                found = kernel.prepare(problem.conv, call, option)(x, residual)
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@given(seeds, st.sampled_from((1, 2, 4, 8, 16, 32)), st.sampled_from((4, 8, 24, 32)))
def test_a_piece_table_says_the_whole_order(seed: int, piece: int, group_width: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    order = (torch.randperm(96 // piece, generator=generator)[:, None] * piece + torch.arange(piece)).flatten()
    table, width = piece_table(order, group_width)
    assert group_width % width == 0
    assert width >= min(piece, group_width & -group_width, 16)
    torch.testing.assert_close((table[:, None].long() * width + torch.arange(width)).flatten(), order)


def test_sizes_are_those_of_the_result() -> None:
    weight = torch.randn(8, 4, 3, 3)
    conv = FusedConv(weight=weight, bias=torch.zeros(8), stride=(2, 1), padding=(1, 0), dilation=(2, 1))
    assert reference(conv, torch.zeros(1, 4, 11, 9)).shape[2:] == conv.out_size(11, 9)


@pytest.mark.parametrize("option", ["dense", "grouped"])
def test_a_bias_is_added_once_where_the_result_is_gathered(option: str) -> None:
    order = torch.tensor([1, 0])
    conv = FusedConv(weight=torch.zeros(2, 1, 1, 1), bias=torch.tensor([1.0, 2.0]), groups=2, out_order=order)
    x = torch.zeros(1, 2, 1, 1)
    call = ConvProblem(conv, random_conv(0)[1]).call
    found = StockConv().prepare(conv, call, option)(x, None)
    torch.testing.assert_close(found.flatten(), torch.tensor([1.0, 2.0]))
