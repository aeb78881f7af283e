import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import strucspars as ss
from strucspars.channels.orders import GroupedLayer, OrderClasses, placement
from strucspars.convert.reordering import (
    reorder_channelwise_,
    reorder_dense_,
    reorder_grouped_,
    reordered_grouped_weight,
)


def block_diagonal(weight: torch.Tensor, groups: int) -> torch.Tensor:
    out_width, in_width = weight.shape[0] // groups, weight.shape[1]
    return torch.eye(groups).repeat_interleave(out_width, 0).repeat_interleave(in_width, 1) * weight.repeat(1, groups)


@given(st.integers(0, 1000), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
def test_the_reordered_grouped_weight_is_the_reordered_dense_one(
    seed: int, groups: int, in_width: int, out_width: int
) -> None:
    generator = np.random.default_rng(seed)
    weight = torch.from_numpy(generator.normal(size=(groups * out_width, in_width)))
    sequence = generator.permutation(groups)
    in_order = np.concatenate([group * in_width + generator.permutation(in_width) for group in sequence])
    out_order = np.concatenate([group * out_width + generator.permutation(out_width) for group in sequence])
    reordered = reordered_grouped_weight(weight, groups, out_order, in_order)
    expected = block_diagonal(weight, groups)[out_order][:, in_order]
    torch.testing.assert_close(block_diagonal(reordered, groups), expected, rtol=0, atol=0)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_a_dense_layer_takes_any_order_on_both_sides(memory_format: torch.memory_format) -> None:
    layer = nn.Conv2d(6, 4, 3).to(memory_format=memory_format)
    features = torch.randn(2, 6, 5, 5)
    expected = layer(features)
    out_order, in_order = torch.randperm(4), torch.randperm(6)
    reorder_dense_(layer, out_order.numpy(), in_order.numpy())
    assert layer.weight.is_contiguous(memory_format=memory_format)
    torch.testing.assert_close(layer(features[:, in_order]), expected[:, out_order])


def test_batch_norms_and_depthwise_convolutions_follow_the_order() -> None:
    norm = nn.BatchNorm2d(6).eval()
    for tensor in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
        assert tensor is not None
        nn.init.uniform_(tensor, 0.5, 1.5)
    order = torch.randperm(6)
    features = torch.randn(2, 6, 5, 5)
    for layer in (norm, nn.Conv2d(6, 6, 3, groups=6)):
        expected = layer(features)
        reorder_channelwise_(layer, order.numpy())
        torch.testing.assert_close(layer(features[:, order]), expected[:, order])


def test_a_shuffled_layer_becomes_a_plain_one_between_the_placed_orders() -> None:
    model = nn.Sequential(nn.Conv2d(8, 12, 3))
    generator = np.random.default_rng(0)
    plan = ss.LayerPlan(
        group_level=3,
        out_perm=generator.permutation(12),
        in_perm=generator.permutation(8),
        weight_shape=(12, 8, 3, 3),
    )
    ss.convert_(model, ss.GroupingPlan({"0": plan}))
    features = torch.randn(2, 8, 5, 5)
    expected = model(features)
    classes = OrderClasses()
    grouped = GroupedLayer(
        num_groups=4,
        in_places=np.argsort(plan.in_perm),
        out_places=np.argsort(plan.out_perm),
        inputs=classes.new(8, 1),
        outputs=classes.new(12, 1),
        in_bytes=1,
        out_bytes=1,
    )
    placed = placement(grouped, generator.permutation(8), generator.permutation(12))
    reorder_grouped_(model[0], placed)
    assert type(model[0]) is nn.Conv2d
    assert set(model.state_dict()) == {"0.weight", "0.bias"}
    computed = model(features[:, torch.from_numpy(placed.in_order)])
    torch.testing.assert_close(computed, expected[:, torch.from_numpy(placed.out_order)])
