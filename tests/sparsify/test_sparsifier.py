"""Sparse training as a whole, its plans and its refusals."""

import io
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from sparse_training import CONFIG, network, sparsifier_with_penalty, train
from torch import nn
from torch_warnings import SCRIPTING_WARNS

import strucspars as ss


def test_the_models_keys_and_modules_do_not_change() -> None:
    model = network()
    keys, types = list(model.state_dict()), [type(module) for module in model.modules()]
    sparsifier = sparsifier_with_penalty(model)
    sparsifier.plan()
    assert list(model.state_dict()) == keys
    assert [type(module) for module in model.modules()] == types


def test_sparse_training_makes_groups() -> None:
    model = network()
    config = ss.SparsifyConfig(target=0.5, epochs=30, controller="paper", lambda_step=2e-3, lambda_warmup=2 / 30)
    sparsifier = ss.Sparsifier(model, config)
    fresh = ss.one_shot_plan(network(), target=0.5)
    reports = train(model, sparsifier, 30)
    assert reports[0].removed_fraction == 0
    assert reports[1].lambda_value == 0 < reports[3].lambda_value
    assert max(report.removed_fraction for report in reports) >= 0.4
    plan = sparsifier.plan()
    assert plan.removed_param_fraction >= 0.5
    assert plan.min_kept_norm is not None
    assert fresh.min_kept_norm is not None
    assert plan.min_kept_norm > 0.75 > fresh.min_kept_norm


def test_the_report_tells_levels_norms_costs_and_churn() -> None:
    model = network()
    with torch.no_grad():
        weight = model.get_parameter("4.weight")
        weight.mul_((torch.arange(16)[:, None] % 4 == torch.arange(32) % 4)[..., None, None])
    sparsifier = ss.Sparsifier(model, CONFIG)
    with torch.no_grad():
        weight[[0, 1]] = weight[[1, 0]]  # two outputs change places, and so their groups
    report = sparsifier.end_epoch()
    plain, grouped = report.layers
    assert (plain.name, grouped.name) == ("2", "4")
    assert grouped.group_level >= 3
    assert grouped.kept_norm[:3] == (1.0, 1.0, 1.0)
    assert plain.group_level == 1
    assert plain.churn == 0.0 < grouped.churn <= 1.0
    assert grouped.cost < plain.cost
    assert report.seconds > 0
    weights = {name: model.get_parameter(f"{name}.weight").numel() for name in ("2", "4")}
    kept = weights["2"] + weights["4"] / 2 ** (grouped.group_level - 1)
    whole = sum(parameter.numel() for parameter in model.parameters())
    assert report.removed_fraction == pytest.approx((weights["2"] + weights["4"] - kept) / whole)


def test_fixed_and_largest_levels_hold_in_penalty_and_plan() -> None:
    config = replace(CONFIG, target=0.65, fixed_levels={"2": 3}, largest_levels={"4": 2})
    model = network()
    sparsifier = ss.Sparsifier(model, config)
    sparsifier.end_epoch()
    sparsifier.end_epoch()
    plan = sparsifier.plan()
    assert {name: layer.group_level for name, layer in plan.layers.items()} == {"2": 3, "4": 2}
    torch.autograd.backward(sparsifier.penalty())
    for name, groups in (("2", 4), ("4", 2)):
        gradient = model.get_parameter(f"{name}.weight").grad
        assert gradient is not None
        unpenalised = (gradient == 0).flatten(2).all(dim=2).float().mean().item()
        assert unpenalised == pytest.approx(1 / groups)


def test_the_target_is_met_or_the_largest_reachable_is_named() -> None:
    assert ss.one_shot_plan(network(), target=0.6).removed_param_fraction >= 0.6
    with pytest.raises(ValueError, match=r"target 0\.95 cannot be reached: .* 0\.\d{4} of all params"):
        ss.one_shot_plan(network(), target=0.95)
    with pytest.raises(ValueError, match=r"target 0\.95 cannot be reached"):
        ss.Sparsifier(network(), replace(CONFIG, target=0.95))


def test_one_shot_says_what_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    ss.one_shot_plan(network(), target=0.3)
    assert "of the grouped layers' norm; without images the network is not usable as it is" in caplog.text


def test_a_model_without_groupable_layers_is_refused_with_reasons() -> None:
    with pytest.raises(ValueError, match="no layer of the model can be grouped: 5 x 3 channels"):
        ss.Sparsifier(nn.Sequential(nn.Conv2d(3, 5, 1)), CONFIG)


def test_a_nan_weight_is_named_with_its_layer() -> None:
    model = network()
    with torch.no_grad():
        model.get_parameter("4.weight")[0, 0] = np.nan
    with pytest.raises(ValueError, match=r"layer '4': .*(NaN|nan)"):
        ss.Sparsifier(model, CONFIG)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"target": 1.0}, "target is a removed fraction"),
        ({"epochs": 0}, "epochs must be a whole number from 1 on"),
        ({"lambda_warmup": 1}, "lambda_warmup must be below 1, got 1"),
        ({"budget": "flops"}, "budget must be one of params, macs"),
        ({"importance": "l3"}, "importance must be one of l1, l2"),
        ({"orders": "fre"}, "orders must be one of free.*did you mean 'free'"),
        ({"method": "slow"}, "method must be one of fast, paper, paper-pot"),
        ({"decay": 0}, "decay must lie in"),
        ({"min_kept_norm": 2}, "min_kept_norm must lie in"),
        ({"seed": -1}, "seed must be a whole number from 0 on"),
        ({"seed": 10**5000}, "seed must be below"),
        ({"min_channels_per_group": 0}, "min_channels_per_group must be a whole number from 1 on"),
    ],
)
def test_a_bad_option_is_named(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        replace(CONFIG, **options)


def test_a_budget_of_macs_is_counted_on_the_example_input() -> None:
    model = network()
    images = torch.randn(1, 3, 8, 8)
    plan = ss.one_shot_plan(model, ss.SparsifyConfig(target=0.4, budget="macs"), example_inputs=images)
    before = ss.count_macs(model, images).macs
    after = ss.count_macs(ss.convert_(model, plan), images).macs
    assert plan.removed_mac_fraction is not None
    assert 1 - after / before == pytest.approx(plan.removed_mac_fraction)
    assert plan.removed_mac_fraction >= 0.4
    with pytest.raises(ValueError, match="budget='macs' needs example_inputs"):
        ss.Sparsifier(network(), replace(CONFIG, budget="macs"))


def test_the_plans_parameters_are_those_of_the_converted_model() -> None:
    model = network()
    whole = sum(parameter.numel() for parameter in model.parameters())
    plan = sparsifier_with_penalty(model).plan()
    ss.convert_(model, plan)
    kept = sum(parameter.numel() for parameter in model.parameters())
    assert 1 - kept / whole == pytest.approx(plan.removed_param_fraction)
    assert ss.model_plan(model).removed_param_fraction == pytest.approx(plan.removed_param_fraction)


def test_other_layer_types_are_sparsified_by_naming_them() -> None:
    rules = ss.SparsifyConfig(target=0.5, layer_types=("Conv2d", "Linear"))
    model = network()
    plan = ss.one_shot_plan(model, rules)
    assert list(plan.layers) == ["2", "4", "7"]
    assert ss.convert_(model, plan)(torch.randn(2, 3, 8, 8)).shape == (2, 4)


def test_a_coarse_network_says_how_much_more_is_removed_than_asked(caplog: pytest.LogCaptureFixture) -> None:
    coarse_config = replace(CONFIG, target=0.3)

    def two_layers() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(8, 8, 3, bias=False), nn.Conv2d(8, 8, 3, bias=False))

    sparsifier = ss.Sparsifier(two_layers(), coarse_config)
    for planned in (sparsifier.plan, lambda: ss.one_shot_plan(two_layers(), target=0.3)):
        assert planned().removed_param_fraction == 0.5
        assert "the plan removes 50.0 % of all params where 30.0 % were asked for" in caplog.text
        assert "nothing nearer was found" in caplog.text
        caplog.clear()
    for target in (0.25, 0.495, 0.5):
        ss.one_shot_plan(two_layers(), target=target)
    assert "asked for" not in caplog.text


def test_numbers_of_numpy_are_as_good_as_plain_ones() -> None:
    numbers: dict[str, Any] = {"target": np.float64(0.4), "epochs": np.int64(20), "lambda_warmup": np.float32(0.25)}
    levels: dict[str, Any] = {"2": np.int64(2)}
    config = ss.SparsifyConfig(**numbers, fixed_levels=levels)
    sparsifier = ss.Sparsifier(network(), config)
    file = io.BytesIO()
    torch.save(sparsifier.state_dict(), file)
    file.seek(0)
    again = ss.Sparsifier(network(), config)
    again.load_state_dict(torch.load(file, weights_only=True))
    assert again.state_dict()["config"] == sparsifier.state_dict()["config"]


def test_a_one_shot_plan_says_why_nothing_can_be_grouped() -> None:
    with pytest.raises(ValueError, match="no layer of the model can be grouped: 3 x 3 channels"):
        ss.one_shot_plan(nn.Sequential(nn.Conv2d(3, 3, 1)), target=0.3)


def test_a_model_on_the_meta_device_is_told_to_get_memory() -> None:
    model = network().to("meta")
    told = r"layer '2' is on the meta device, .*; call model\.to_empty\(device=\.\.\.\) and load the weights first"
    with pytest.raises(ValueError, match=told):
        ss.Sparsifier(model, CONFIG)
    with pytest.raises(ValueError, match=told):
        ss.one_shot_plan(model, target=0.4)


@SCRIPTING_WARNS
def test_a_scripted_model_is_told_to_be_grouped_first() -> None:
    scripted = torch.jit.script(network())
    told = "can be grouped: it is scripted or traced: group the network first, then script it"
    with pytest.raises(ValueError, match=told):
        ss.Sparsifier(scripted, CONFIG)
    with pytest.raises(ValueError, match=told):
        ss.one_shot_plan(scripted, target=0.4)


@pytest.mark.parametrize(("use", "operation"), [("penalty", "_foreach_norm"), ("regularize_", "_foreach_addcmul_")])
def test_an_error_of_torch_is_passed_on(use: str, operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    sparsifier = sparsifier_with_penalty(network())
    monkeypatch.setattr(torch, operation, fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        getattr(sparsifier, use)()
