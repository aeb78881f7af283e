"""Order policies from the options to the plan, in one shot and in training."""

import copy
import logging
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import strucspars as ss
from strucspars.channels import NetworkChannels, OrderSharing
from strucspars.core.hierarchy import group_penalty, max_group_level
from strucspars.core.permutation import connection_cost
from strucspars.core.plan import GroupingPlan
from strucspars.sparsify.extensions import ORDERS

IMAGES = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(0))
CONFIG = ss.SparsifyConfig(target=0.4, epochs=4, orders="shared")


class Block(nn.Module):
    """A bottleneck with a residual connection."""

    def __init__(self, width: int, narrow: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, narrow, 1)
        self.conv2 = nn.Conv2d(narrow, narrow, 3, padding=1)
        self.conv3 = nn.Conv2d(narrow, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inside = functional.relu(self.conv2(functional.relu(self.conv1(x))))
        return functional.relu(x + self.conv3(inside))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    stem, blocks = nn.Conv2d(3, 32, 3), [Block(32, 16), Block(32, 16)]
    return nn.Sequential(stem, nn.ReLU(), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 5))


STREAM_SIDES = [("2.conv1", "in"), ("2.conv3", "out"), ("3.conv1", "in"), ("3.conv3", "out")]


def orders(plan: GroupingPlan, sides: list[tuple[str, str]]) -> list[list[int]]:
    return [getattr(plan.layers[name], f"{side}_perm").tolist() for name, side in sides]


def num_gathers(plan: GroupingPlan) -> int:
    folded = ss.fold(ss.convert_(network(), plan), IMAGES)
    report = ss.fold_report(folded)
    assert report is not None
    assert not report.untraced_reason
    return len(report.gathers)


def test_layers_on_a_stream_share_one_order_and_it_costs_no_gather() -> None:
    plan = ss.one_shot_plan(network(), replace(CONFIG, target=0.6), example_inputs=IMAGES)
    assert all(layer.num_groups > 1 for layer in plan.layers.values())
    first, *others = orders(plan, STREAM_SIDES)
    assert all(order == first for order in others)
    assert plan.shared_orders == {"0": tuple(first)}
    assert plan.layers["2.conv1"].in_orders == ("0",)
    assert plan.layers["2.conv1"].out_orders == ()
    # Two orders of every narrow tensor: that of its writer and that of its reader.
    assert num_gathers(plan) == 4


def test_one_shuffle_is_left_in_a_block() -> None:
    config = replace(CONFIG, target=0.6, orders="one-shuffle")
    plan = ss.one_shot_plan(network(), config, example_inputs=IMAGES)
    assert orders(plan, [("2.conv1", "out")]) == orders(plan, [("2.conv2", "in")])
    assert orders(plan, [("2.conv2", "out")]) != orders(plan, [("2.conv3", "in")])
    assert num_gathers(plan) == 2


def test_orders_differ_by_pieces() -> None:
    plan = ss.one_shot_plan(network(), replace(CONFIG, target=0.6, pieces=4), example_inputs=IMAGES)
    written, read = (np.array(order).reshape(-1, 4) for order in orders(plan, [("2.conv1", "out"), ("2.conv2", "in")]))
    assert written.tolist() != read.tolist()
    assert sorted(written.tolist()) == sorted(read.tolist())
    assert plan.layers["2.conv1"].pieces == 4
    assert GroupingPlan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("options", [{}, {"orders": "one-shuffle"}, {"pieces": 8}, {"orders": "free", "pieces": 4}])
def test_converted_networks_compute_what_masked_ones_do(options: dict[str, object]) -> None:
    plan = ss.one_shot_plan(network(), replace(CONFIG, **options), example_inputs=IMAGES)  # type: ignore[arg-type]  # values of several types
    masked = ss.mask_(network(), plan)(IMAGES)
    torch.testing.assert_close(ss.convert_(network(), plan)(IMAGES), masked)


class Exchanged(nn.Module):
    """Two parts of the channels change places; a linear layer, which is not grouped, reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.written, self.head = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 16, 1), nn.Linear(16, 5)

    def forward(self, images: torch.Tensor) -> Any:
        first, second = self.written(functional.relu(self.stem(images))).split([10, 6], dim=1)
        return self.head(torch.cat([second, first], 1).mean((2, 3)))


def test_channels_of_several_parts_that_only_one_layer_orders_stay_in_their_parts() -> None:
    torch.manual_seed(0)
    model = Exchanged()
    plan = ss.one_shot_plan(model, CONFIG, example_inputs=IMAGES)
    assert sorted(plan.layers["written"].out_perm[:10].tolist()) == list(range(10))
    report = ss.fold_report(ss.fold(ss.convert_(model, plan), IMAGES))
    assert report is not None
    assert "output" not in [gather.side for gather in report.gathers]


def test_calibrated_plans_share_orders_without_example_inputs() -> None:
    plan = ss.compress(network(), replace(CONFIG, target=0.3), calibration=[IMAGES.repeat(8, 1, 1, 1)])
    first, *others = orders(plan, STREAM_SIDES)
    assert all(order == first for order in others)
    assert plan.predicted_divergence is not None


def trained(sparsifier: ss.Sparsifier, model: nn.Module, epochs: int) -> ss.Sparsifier:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(1)
    for _ in range(epochs):
        for _ in range(3):
            optimizer.zero_grad()
            torch.autograd.backward(
                model(torch.randn(4, 3, 12, 12, generator=generator)).square().mean() + sparsifier.penalty()
            )
            optimizer.step()
        sparsifier.end_epoch()
    return sparsifier


def test_training_keeps_shared_orders_and_resumes_exactly() -> None:
    model = network()
    sparsifier = trained(ss.Sparsifier(model, CONFIG, example_inputs=IMAGES), model, epochs=2)
    resumed_model = copy.deepcopy(model)
    resumed = ss.Sparsifier(resumed_model, CONFIG, example_inputs=IMAGES)
    resumed.load_state_dict(sparsifier.state_dict())
    plans = [trained(*pair, epochs=1).plan() for pair in ((sparsifier, model), (resumed, resumed_model))]
    assert plans[0] == plans[1]
    first, *others = orders(plans[0], STREAM_SIDES)
    assert all(order == first for order in others)


def summed_cost(sparsifier: ss.Sparsifier) -> float:
    """What the refresh minimises, at the present weights."""
    total = 0.0
    states = sparsifier.state_dict()["layers"]
    for name, importance in sparsifier.importances().items():
        out_perm, in_perm = (states[name][side].numpy() for side in ("out_perm", "in_perm"))
        penalty = group_penalty(max_group_level(*importance.shape) - 1)
        total += connection_cost(importance / importance.sum(), penalty, out_perm, in_perm)
    return total


def test_a_refresh_lowers_the_cost_of_all_layers_together() -> None:
    model = network()
    sparsifier = ss.Sparsifier(model, CONFIG, example_inputs=IMAGES)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)))
    before = summed_cost(sparsifier)
    sparsifier.end_epoch()
    assert summed_cost(sparsifier) < before


def test_a_network_that_cannot_be_traced_keeps_free_orders_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    class Branching(nn.Sequential):
        def forward(self, x: torch.Tensor) -> Any:
            return nn.Sequential.forward(self, x if x.mean() > 0 else -x)  # type: ignore[no-untyped-call]  # PyTorch's

    model = Branching(*network())
    with caplog.at_level(logging.WARNING):
        plan = ss.one_shot_plan(model, CONFIG, example_inputs=IMAGES)
    assert not plan.shared_orders
    (warning,) = [record.getMessage() for record in caplog.records if "traced" in record.getMessage()]
    assert "Branching" in warning
    assert "the shuffles between them remain as copies" in warning


def test_shared_orders_need_example_inputs() -> None:
    with pytest.raises(ValueError, match=r"orders='shared' and pieces=1 need example_inputs.*orders='free'"):
        ss.Sparsifier(network(), CONFIG)
    with pytest.raises(ValueError, match="orders='free' and pieces=8 need example_inputs"):
        ss.one_shot_plan(network(), ss.SparsifyConfig(pieces=8))


def test_pieces_must_divide_the_channels() -> None:
    with pytest.raises(ValueError, match=r"pieces=12 does not divide the 16 channels that layer '2\.conv1' writes"):
        ss.one_shot_plan(network(), replace(CONFIG, pieces=12), example_inputs=IMAGES)
    with pytest.raises(ValueError, match="pieces must be a whole number from 1 on"):
        replace(CONFIG, pieces=0)


def test_pieces_do_not_matter_where_only_one_layer_orders_the_channels() -> None:
    # The images have three channels, so that nothing groups the first layer.
    model = nn.Sequential(nn.Conv2d(3, 12, 1), nn.Conv2d(12, 16, 1), nn.Conv2d(16, 16, 1))
    plan = ss.one_shot_plan(model, replace(CONFIG, pieces=8), example_inputs=IMAGES)
    assert [layer.pieces for layer in plan.layers.values()] == [8, 8]


def test_the_name_of_a_policy_is_checked_with_a_suggestion() -> None:
    with pytest.raises(ValueError, match=r"orders must be one of free, shared, one-shuffle.* did you mean 'shared'"):
        replace(CONFIG, orders="share")


def test_a_policy_of_ones_own_decides_what_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ORDERS, "_entries", dict(ORDERS._entries))

    def narrow(channels: NetworkChannels) -> OrderSharing:
        shared = frozenset(name for name, each in channels.classes.items() if each.width == 16)
        return OrderSharing(shared, pieces={"0": 2})

    ss.register_orders("narrow", narrow)
    plan = ss.one_shot_plan(network(), replace(CONFIG, orders="narrow"), example_inputs=IMAGES)
    assert set(plan.shared_orders) == {"2.conv1", "2.conv2", "3.conv1", "3.conv2"}
    pieces = [sorted(np.array(order).reshape(-1, 2).tolist()) for order in orders(plan, STREAM_SIDES)]
    assert all(each == pieces[0] for each in pieces)
    ss.register_orders("wrong", lambda channels: OrderSharing(frozenset({"conv9"})))
    with pytest.raises(ValueError, match="orders 'wrong': the network has no class of channels 'conv9'"):
        ss.one_shot_plan(network(), replace(CONFIG, orders="wrong"), example_inputs=IMAGES)
