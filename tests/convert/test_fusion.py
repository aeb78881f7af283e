"""Fused convolutions: the same function, in fewer calls."""

import copy
from collections.abc import Callable

import pytest
import torch
from bottleneck_networks import IMAGE, bottleneck_network, grouped_bottleneck_network
from hypothesis import given, settings
from hypothesis import strategies as st
from random_networks import RandomNetwork, random_scales_
from torch import fx, nn
from torch.nn import functional

import strucspars as ss
from strucspars.convert.fusion import (
    ConvStep,
    fuse_convolutions_,
    gathers_between,
    with_gather_read,
    with_gather_written,
)
from strucspars.convert.seams import join_seam_, seam_sites

IMAGES = torch.randn(2, *IMAGE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def fused(model: nn.Module, images: torch.Tensor) -> tuple[fx.GraphModule, fx.GraphModule, dict[fx.Node, ConvStep]]:
    folded = ss.fold(model, images)
    graph = copy.deepcopy(folded)
    return folded, graph, fuse_convolutions_(graph)


def assert_same(one: nn.Module, other: nn.Module, images: torch.Tensor) -> None:
    with torch.no_grad():
        torch.testing.assert_close(one(images), other(images))


@pytest.mark.parametrize(("orders", "pieces"), [("free", 1), ("shared", 4), ("one-shuffle", 4)])
def test_everything_around_a_convolution_is_fused_into_it(orders: str, pieces: int) -> None:
    folded, graph, _ = fused(grouped_bottleneck_network(orders, pieces=pieces).double(), IMAGES)
    assert ss.fold_report(folded).gathers
    assert_same(graph, folded, IMAGES)
    others = [node for node in graph.graph.nodes if node.op not in ("placeholder", "output")]
    others = [node for node in others if not isinstance(graph.get_submodule(str(node.target)), ConvStep)][:-3]
    assert [str(node) for node in others] == []


@settings(max_examples=30)
@given(st.integers(0, 1_000_000))
def test_any_network_keeps_its_function(seed: int) -> None:
    torch.manual_seed(seed)
    model = RandomNetwork(seed)
    random_scales_(model.double())
    images = torch.randn(2, model.in_channels, 4, 4, dtype=torch.float64)
    folded, graph, _ = fused(model.eval(), images)
    assert_same(graph, folded, images)


@pytest.mark.parametrize("orders", ["free", "one-shuffle"])
def test_gathers_move_between_convolutions(orders: str) -> None:
    folded, graph, steps = fused(grouped_bottleneck_network(orders).double(), IMAGES)
    pairs = list(gathers_between(steps))
    assert pairs
    for move in (with_gather_read, with_gather_written, with_gather_read):
        for writer, reader in pairs:
            first, second = move(writer.conv, reader.conv)
            writer.set_conv(first)
            reader.set_conv(second)
        assert_same(graph, folded, IMAGES)


@pytest.mark.parametrize("part", [0, 1, 2])
def test_seams_keep_the_function(part: int) -> None:
    folded, graph, steps = fused(grouped_bottleneck_network("one-shuffle").double(), IMAGES)
    sites = list(seam_sites(steps))
    assert sum(site.shortcut is not None and site.second is not None for site in sites) == 2
    assert sum(site.second is not None for site in sites) == 3
    for site in sites:
        parts = list(site.parts())
        join_seam_(graph, parts[part % len(parts)], steps)
    assert_same(graph, folded, IMAGES)


def test_a_dense_network_is_fused_too() -> None:
    folded, graph, steps = fused(bottleneck_network().double(), IMAGES)
    assert len(steps) == 15
    assert sum(step.conv.relu for step in steps.values()) == 13
    assert_same(graph, folded, IMAGES)


class Reader(nn.Module):
    """Two convolutions and something that reads a tensor between them."""

    def __init__(self, forward: Callable[[nn.Module, nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1)
        self.function = forward

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.function(self.one, self.two, images)


def _in_place_sum(one: nn.Module, two: nn.Module, images: torch.Tensor) -> torch.Tensor:
    first = one(images)
    other = first.sigmoid()
    other += two(first)
    product: torch.Tensor = other.relu() * other
    return product


def _changed_first_summand(one: nn.Module, two: nn.Module, images: torch.Tensor) -> torch.Tensor:
    base = images * 2
    total = base.add_(one(images))
    result: torch.Tensor = functional.relu(total) + two(base)
    return result


def _read_before_relu(one: nn.Module, two: nn.Module, images: torch.Tensor) -> torch.Tensor:
    first: torch.Tensor = one(images)
    return functional.relu(first) + first


def _added_to_itself(one: nn.Module, two: nn.Module, images: torch.Tensor) -> torch.Tensor:
    first: torch.Tensor = one(images)
    return functional.relu(first + first)


def _broadcast(one: nn.Module, two: nn.Module, images: torch.Tensor) -> torch.Tensor:
    first: torch.Tensor = one(images)
    return functional.relu(first + two(images).mean((2, 3), keepdim=True))


def _scaled_sum(one: nn.Module, two: nn.Module, images: torch.Tensor) -> torch.Tensor:
    return torch.add(one(images), two(images), alpha=2).relu()


@pytest.mark.parametrize(
    "forward",
    [_in_place_sum, _changed_first_summand, _read_before_relu, _added_to_itself, _broadcast, _scaled_sum],
)
def test_what_others_read_or_change_is_not_fused(
    forward: Callable[[nn.Module, nn.Module, torch.Tensor], torch.Tensor],
) -> None:
    torch.manual_seed(0)
    images = torch.randn(2, 4, 5, 5, dtype=torch.float64)
    folded, graph, _ = fused(Reader(forward).double(), images)
    assert_same(graph, folded, images)
