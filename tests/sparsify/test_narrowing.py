"""Plans with fewer channels: the target is met, the best go, and what cannot be is said."""

import copy
import logging
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

import strucspars as ss
from strucspars.models.cifar import CifarResNet, PreactivationResNet
from strucspars.sparsify.extensions import ClassMembers

IMAGES = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "strucspars")


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Conv2d(32, 16, 1), nn.ReLU(), nn.Conv2d(16, 5, 1)),
    )
    for module in model:
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.1, 2)
    return model.eval()


def plan(model: nn.Module, importance: str = "l1", **options: object) -> ss.GroupingPlan:
    defaults = {"target": 0.4, "narrow": "all", "width_multiple": 4}
    config = ss.SparsifyConfig(importance=importance, **(defaults | options))  # type: ignore[arg-type]  # values of several types
    data = [IMAGES] if importance in ("activation", "fisher") else None
    return ss.one_shot_plan(model, config, example_inputs=IMAGES[:1], calibration=data)


@pytest.mark.parametrize("budget", ["params", "macs"])
@pytest.mark.parametrize("build", [CifarResNet, PreactivationResNet])
@pytest.mark.parametrize("narrow", ["inside", "all"])
def test_the_network_really_loses_what_the_plan_says(
    build: Callable[[int], nn.Module], budget: str, narrow: str
) -> None:
    model = build(20).eval()
    found = plan(model, budget=budget, narrow=narrow)
    small = ss.convert_(copy.deepcopy(model), found, example_inputs=IMAGES)
    before, after = (ss.count_macs(each, IMAGES[:1]) for each in (model, small))
    assert found.removed_param_fraction == pytest.approx(1 - after.params / before.params)
    assert found.removed_mac_fraction == pytest.approx(1 - after.macs / before.macs)
    removed = found.removed_param_fraction if budget == "params" else found.removed_mac_fraction
    assert removed is not None
    assert 0.4 <= removed < 0.45
    assert all(len(each.kept) % 4 == 0 for each in found.kept_channels.values() if each.is_narrower)


def test_without_groups_it_is_plain_structured_pruning() -> None:
    model = network()
    found = plan(model, largest_levels={"*": 1})
    assert not found.layers
    assert any(each.is_narrower for each in found.kept_channels.values())
    small = ss.convert_(model, found)
    assert {type(module) for module in small.modules()} == {type(module) for module in network().modules()}


@pytest.mark.parametrize("importance", ["l1", "l2", "activation", "fisher", "batch-norm"])
def test_any_importance_chooses_channels(importance: str) -> None:
    found = plan(network(), importance, largest_levels={"*": 1})
    assert found.removed_param_fraction >= 0.4


def test_the_channels_of_the_smallest_norms_go() -> None:
    model = network()
    with torch.no_grad():
        model.get_parameter("0.weight")[4:12] *= 1e-3
    kept = plan(model, target=0.2, largest_levels={"*": 1}).kept_channels["0"].kept
    assert {0, 1, 2, 3, 12, 13, 14, 15} <= set(kept)
    assert len(kept) < 16


def test_slimming_removes_the_channels_of_the_smallest_scales() -> None:
    model = network()
    with torch.no_grad():
        model.get_parameter("1.weight")[:8] = -5
        model.get_parameter("1.weight")[8:] = 0.01
        # The weights would say otherwise, were they asked.
        model.get_parameter("0.weight")[8:] *= 1.2
    found = plan(model, "batch-norm", target=0.5, largest_levels={"*": 1})
    for name, norm in (("0", "1"), ("3", "4")):
        kept, scales = found.kept_channels[name], model.get_parameter(f"{norm}.weight").detach().abs().numpy()
        gone = np.setdiff1d(np.arange(kept.width), kept.kept)
        assert len(gone)
        assert scales[gone].max() <= scales[list(kept.kept)].min()


def test_classes_that_no_batch_norm_scales_stay_under_slimming() -> None:
    found = plan(network(), "batch-norm", largest_levels={"*": 1})
    assert "6" not in found.kept_channels


def test_an_importance_of_ones_own_scores_channels() -> None:
    def last_first(members: ClassMembers) -> np.ndarray:
        assert members.writers[0][0].name in ("0", "3", "6")
        return np.arange(members.width, dtype=float)

    ss.register_importance(
        "last-first", lambda layer: ss.core.importance_matrix(layer.weight.detach().numpy()), channel_scores=last_first
    )
    found = plan(network(), "last-first", largest_levels={"*": 1})
    for each in found.kept_channels.values():
        assert each.kept == tuple(range(each.width - len(each.kept), each.width))


@pytest.mark.parametrize("budget", ["params", "macs"])
def test_a_target_that_is_just_reachable_is_met(budget: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 1, bias=False), nn.ReLU(), nn.Conv2d(8, 5, 1, bias=False))
    found = plan(model, target=0.5, budget=budget, largest_levels={"*": 1})
    assert found.removed_param_fraction == found.removed_mac_fraction == 0.5
    assert len(found.kept_channels["0"].kept) == 4


def test_residual_streams_stay_if_asked() -> None:
    model = PreactivationResNet(20).eval()
    streams = {"layer1.0.conv3", "layer2.0.conv3", "layer3.0.conv3"}
    inside = plan(model, narrow="inside", largest_levels={"*": 1})
    assert streams.isdisjoint(name for name, each in inside.kept_channels.items() if each.is_narrower)


def test_groups_keep_their_smallest_width() -> None:
    found = plan(network(), target=0.7, min_channels_per_group=4, width_multiple=1)
    for name in found.layers:
        layer = found.narrowed_layer(name)
        if layer.num_groups > 1:
            assert min(layer.weight_shape[:2]) >= 4 * layer.num_groups


def test_a_target_out_of_reach_names_the_nearest_and_what_stays() -> None:
    with pytest.raises(
        ValueError, match=r"can remove is 0\.\d+ of all params; lower the target or lower width_mul.*'8' stay: the"
    ):
        plan(network(), target=0.99)
    with pytest.raises(ValueError, match="can remove is") as raised:
        plan(network(), target=0.99)
    reachable = float(str(raised.value).split("can remove is ")[1].split(" ")[0])
    assert plan(network(), target=reachable - 1e-3).removed_param_fraction >= reachable - 1e-3


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"narrow": "some"}, "narrow must be one of none, inside, all, got 'some'"),
        ({"width_multiple": 0}, "width_multiple must be a whole number from 1 on"),
        ({"budget": "latency"}, "narrow='all' works with the budgets params and macs, got 'latency'"),
    ],
)
def test_bad_options_are_refused(options: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        plan(network(), **options)  # type: ignore[arg-type]  # values of several types


def test_without_example_inputs_nothing_can_be_traced() -> None:
    with pytest.raises(ValueError, match="narrow='all' needs example_inputs"):
        ss.one_shot_plan(network(), ss.SparsifyConfig(target=0.4, narrow="all"))


def test_sparse_training_keeps_all_channels_so_far() -> None:
    with pytest.raises(ValueError, match="sparse training keeps all channels, got narrow='all'"):
        ss.Sparsifier(network(), ss.SparsifyConfig(target=0.4, narrow="all"), example_inputs=IMAGES)


@pytest.mark.parametrize("build", [CifarResNet, PreactivationResNet])
def test_a_narrower_network_is_refitted_to_the_dense_one(build: Callable[[int], nn.Module]) -> None:
    torch.manual_seed(0)
    dense = build(20).eval()
    batches = [torch.randn(16, 3, 32, 32, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    ss.recalibrate_(dense, batches)
    found = plan(dense, budget="macs", largest_levels={"*": 2})
    assert any(each.is_narrower for each in found.kept_channels.values())
    converted = ss.convert_(copy.deepcopy(dense), found)
    refitted = copy.deepcopy(converted)
    ss.reconstruct_(refitted, dense, batches)
    with torch.no_grad():
        errors = [(each.eval()(IMAGES) - dense(IMAGES)).square().mean() for each in (converted, refitted)]
    assert errors[1] < 0.5 * errors[0]


def test_compress_takes_the_option() -> None:
    model = network()
    found = ss.compress(
        model, ss.SparsifyConfig(target=0.3, narrow="all", largest_levels={"*": 1}), calibration=[IMAGES, IMAGES]
    )
    assert sum(map(torch.numel, model.parameters())) < 0.7 * sum(map(torch.numel, network().parameters()))
    assert ss.model_plan(model).kept_channels == found.kept_channels
