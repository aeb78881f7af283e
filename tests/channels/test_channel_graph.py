"""The graph of channels by itself, without folding, and rules from outside."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch
from torch import fx, nn

import strucspars as ss
from strucspars.channels import ChannelGraph, channel_graph, elementwise, register_channel_rule, traced
from strucspars.channels import graph as graph_module
from strucspars.channels.orders import Layout
from strucspars.channels.tracing import LEAF_TYPES

IMAGES = torch.zeros(1, 3, 4, 4)


@pytest.fixture(autouse=True)
def _same_rules_afterwards(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    leaves = set(LEAF_TYPES)
    monkeypatch.setattr(graph_module, "_RULES", dict(graph_module._RULES))
    yield
    LEAF_TYPES.intersection_update(leaves)


class Block(nn.Module):
    """Two branches that are added, and a head."""

    def __init__(self, last: nn.Module) -> None:
        super().__init__()
        self.stem, self.branch, self.norm = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8)
        self.last, self.head = last, nn.Linear(8, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = self.stem(images).relu()
        features = self.last(self.norm(self.branch(features)) + features)
        scores: torch.Tensor = self.head(features.mean((2, 3)))
        return scores


def shared_orders(model: nn.Module) -> list[list[tuple[str, str]]]:
    """The sides of layers, as (name, side), that must share one channel order; pinned ones are left out."""
    graph = channel_graph(traced(model.eval(), (IMAGES,)))
    members: dict[int, list[tuple[str, str]]] = {}
    for node in graph.graph_module.graph.nodes:
        for side, layout in zip(("input", "output"), graph.sides(node), strict=False):
            for root in graph.classes.roots(layout):
                if not graph.classes.is_pinned(root):
                    members.setdefault(root, []).append((str(node.target), side))
    return list(members.values())


def test_layers_along_a_residual_stream_share_an_order() -> None:
    sides = [("stem", "output"), ("branch", "input"), ("branch", "output"), ("norm", "input"), ("head", "input")]
    assert shared_orders(Block(nn.ReLU())) == [sides]


class Mirrored(nn.Module):
    """Channels back to front."""

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return features.flip(1)


class Doubled(nn.Module):
    """Entry by entry, but too clever to be traced."""

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return features * 2 if bool((features == features).all()) else features


def test_channels_of_which_the_order_matters_share_none() -> None:
    assert shared_orders(Block(Mirrored())) == []


def test_a_rule_from_outside_leads_through_a_module_of_somebody_else() -> None:
    model = Block(Doubled())
    with pytest.raises(fx.proxy.TraceError):
        traced(model, (IMAGES,))
    register_channel_rule(elementwise, Doubled)
    assert shared_orders(model) == shared_orders(Block(nn.ReLU()))
    folded = ss.fold(ss.convert_(model, ss.one_shot_plan(model, target=0.3)), IMAGES)
    assert ss.fold_report(folded).untraced_reason == ""


def test_a_wrong_rule_from_outside_makes_no_wrong_graph() -> None:
    def same_order(node: fx.Node, graph: ChannelGraph) -> Layout | None:
        return graph.source(node)

    register_channel_rule(same_order, Mirrored)
    layer = ss.ShuffledGroupConv2d(8, 8, 1, groups=2)
    layer.out_inverse.copy_(torch.randperm(8, generator=torch.Generator().manual_seed(0)))
    model = nn.Sequential(nn.Conv2d(3, 8, 1), layer, Mirrored(), nn.Conv2d(8, 2, 1)).eval()
    images = torch.randn(2, 3, 4, 4)
    folded = ss.fold(model, images)
    assert "off by" in ss.fold_report(folded).untraced_reason
    torch.testing.assert_close(folded(images), model(images))


def test_networks_of_other_threads_run_and_are_traced_meanwhile() -> None:
    other, images = Block(nn.ReLU()).eval(), torch.randn(1, 3, 4, 4)
    wanted = other(images)

    class Visited(Block):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            computed.append(threads.submit(other, symbol_free).result())
            waiting.append(threads.submit(traced, other, (symbol_free,)))
            return super().forward(images)

    symbol_free = images.clone()
    computed: list[torch.Tensor] = []
    waiting: list[Future[fx.GraphModule]] = []
    with ThreadPoolExecutor(2) as threads:
        graph = traced(Visited(nn.ReLU()), (images,))
    assert torch.equal(computed[0], wanted)
    # The first call traces, the second one computes the shapes.
    for each in (graph, *(future.result() for future in waiting)):
        assert {str(node.target) for node in each.graph.nodes if node.op == "call_module"} >= {"stem", "norm", "head"}
