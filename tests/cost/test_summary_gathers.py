"""The gathers that a summary counts: of dense, planned, converted and folded networks."""

import copy

import numpy as np
import pytest
import torch
from torch import fx, nn

import strucspars as ss
from strucspars.cost.gathers import RemainingGather
from strucspars.cost.summary import Summary
from strucspars.nn.layers import ShuffledGroupLinear

IMAGE = torch.zeros(1, 3, 8, 8)
FLOAT_BYTES = 4


def network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, stride=2), nn.ReLU(), nn.Conv2d(16, 8, 1))


def plan_of(model: nn.Module, *names: str, level: int = 2) -> ss.GroupingPlan:
    generator = np.random.default_rng(0)
    layers = {}
    for name in names:
        weight = model.get_submodule(name).get_parameter("weight")
        layers[name] = ss.LayerPlan(
            group_level=level,
            out_perm=generator.permutation(weight.shape[0]),
            in_perm=generator.permutation(weight.shape[1]),
            weight_shape=tuple(weight.shape),
        )
    return ss.GroupingPlan(layers)


def sides(report: Summary) -> list[tuple[str, str, int]]:
    assert report.gathers is not None
    return [(gather.layer, gather.side, gather.nbytes) for gather in report.gathers]


def test_a_dense_network_has_none() -> None:
    report = ss.summary(network(), IMAGE)
    assert report.gathers == ()
    assert "gathers" not in str(report)


def test_a_converted_layer_has_two_and_a_planned_one_will_have_the_same() -> None:
    model = network()
    plan = plan_of(model, "1", "3")
    planned = ss.summary(model, IMAGE, plan)
    done = ss.summary(ss.convert_(model, plan), IMAGE)
    in_bytes, middle_bytes, out_bytes = 8 * 64 * FLOAT_BYTES, 16 * 9 * FLOAT_BYTES, 8 * 9 * FLOAT_BYTES
    assert sides(done) == [
        ("1", "input", in_bytes),
        ("1", "output", middle_bytes),
        ("3", "input", middle_bytes),
        ("3", "output", out_bytes),
    ]
    assert planned.gathers == done.gathers
    assert str(done).splitlines()[-1] == f"gathers      4, {in_bytes + 2 * middle_bytes + out_bytes:,} bytes"


def test_a_planned_layer_of_one_group_has_none() -> None:
    model = network()
    assert ss.summary(model, IMAGE, plan_of(model, "1", level=1)).gathers == ()


def test_every_call_of_a_layer_counts() -> None:
    layer = ss.ShuffledGroupConv2d(4, 4, 1, groups=2)
    report = ss.summary(nn.Sequential(layer, layer), torch.zeros(1, 4, 3, 3))
    assert sides(report) == [("0", side, 4 * 9 * FLOAT_BYTES) for side in ("input", "output")] * 2
    assert str(report).splitlines()[2].split()[-1] == "4"


def test_a_layer_that_is_called_by_keyword_counts() -> None:
    class ByKeyword(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = ss.ShuffledGroupConv2d(4, 4, 1, groups=2)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = self.layer(input=images)
            return output

    assert len(sides(ss.summary(ByKeyword(), torch.zeros(1, 4, 3, 3)))) == 2


def test_gathers_copy_what_the_layer_puts_out_whatever_hooks_make_of_it() -> None:
    model = network()
    ss.convert_(model, plan_of(model, "3"))
    before = ss.summary(model, IMAGE).gathers
    model.get_submodule("3").register_forward_hook(lambda module, inputs, outputs: outputs.double())
    assert ss.summary(model, IMAGE).gathers == before


def test_runs_are_counted_and_those_of_unknown_orders_are_as_many_as_can_be() -> None:
    layer = ss.ShuffledGroupConv2d(4, 4, 1, groups=2)
    layer.in_perm.copy_(torch.tensor([2, 3, 0, 1]))
    images = torch.zeros(1, 4, 3, 3)
    first, second = ss.summary(layer, images).gathers or ()
    assert first == RemainingGather(layer="", side="input", channels=4, runs=2, nbytes=images.nbytes)
    assert second.runs == 1
    gathers = ss.summary(layer.to("meta"), images.to("meta")).gathers or ()
    assert [gather.runs for gather in gathers] == [4, 4]


def folded_and_plan(images: torch.Tensor) -> tuple[fx.GraphModule, ss.GroupingPlan]:
    model = network()
    plan = plan_of(model, "1", "3")
    return ss.fold(ss.convert_(model, plan), images), plan


def test_a_folded_network_has_what_folding_left() -> None:
    folded, plan = folded_and_plan(IMAGE)
    report = ss.summary(folded, IMAGE)
    assert report.gathers == ss.fold_report(folded).gathers
    assert 0 < len(sides(report)) < 2 * len(plan.layers)
    assert [row.groups.before == row.groups.after for row in report.rows] == [True] * 3
    assert [row.groups.after for row in report.rows] == [1, 2, 2]


def test_the_bytes_of_a_folded_network_are_those_of_the_inputs_that_it_was_folded_with() -> None:
    folded, _ = folded_and_plan(IMAGE)
    assert ss.summary(folded, torch.zeros(3, 3, 8, 8)).gathers == ss.fold_report(folded).gathers


@pytest.mark.parametrize("hooked", [True, False])
def test_shuffles_that_stay_inside_layers_are_counted_too(hooked: bool) -> None:
    class Hard(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = network()

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = self.layers(images)
            return output if hooked or output.mean() > 0 else -output

    model = Hard()
    ss.convert_(model, plan_of(model, "layers.3"))
    if hooked:
        model.get_submodule("layers.3").register_forward_hook(lambda module, inputs, outputs: outputs)
    folded = ss.fold(model, IMAGE)
    report = ss.summary(folded, IMAGE)
    prefix = "" if hooked else "model."
    assert sides(report) == [
        (f"{prefix}layers.3", "input", 16 * 9 * FLOAT_BYTES),
        (f"{prefix}layers.3", "output", 8 * 9 * FLOAT_BYTES),
    ]
    # The names are those of rows.
    assert {gather.layer for gather in report.gathers or ()} <= {row.name for row in report.rows}


def test_a_folded_linear_layer_shows_its_groups() -> None:
    head = nn.Sequential(nn.Linear(4, 8), ShuffledGroupLinear(8, 8, groups=4), nn.Linear(8, 2))
    report = ss.summary(ss.fold(head, torch.zeros(1, 4)), torch.zeros(1, 4))
    assert [row.groups.after for row in report.rows] == [1, 4, 1]
    assert [row.macs.after for row in report.rows if row.macs is not None] == [32, 16, 16]


def test_a_summary_changes_nothing_in_a_folded_network() -> None:
    folded, _ = folded_and_plan(IMAGE)
    before = copy.deepcopy(folded.state_dict())
    ss.summary(folded, IMAGE)
    torch.testing.assert_close(folded.state_dict(), before, rtol=0, atol=0)
    assert not any(module._forward_hooks for module in folded.modules())
