"""Options and weights reach the solver, the penalty and the plan: each is compared with the core's own functions."""

import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import strucspars as ss
from strucspars.core.checks import IntArray
from strucspars.core.importance import Norm
from strucspars.nn.importance import importance_matrix
from strucspars.sparsify.planning import LayerState, learned_states, network_size, plan_for_target
from strucspars.sparsify.reports import churn

CONFIG = ss.SparsifyConfig(target=0.4, epochs=8, controller="paper", lambda_step=1e-3, lambda_warmup=1 / 8)
SOLVER_OPTIONS: list[dict[str, Any]] = [{"seed": 3}, {"decay": 0.3}, {"method": "paper"}, {"importance": "l2"}]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()
    return nn.Sequential(*layers, nn.Conv2d(32, 16, 1, bias=False), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def orders(sparsifier: ss.Sparsifier) -> dict[str, tuple[list[int], list[int]]]:
    layers = sparsifier.state_dict()["layers"]
    return {name: (layer["out_perm"].tolist(), layer["in_perm"].tolist()) for name, layer in layers.items()}


@pytest.mark.parametrize("options", SOLVER_OPTIONS)
def test_the_options_reach_the_solver_and_a_refresh_starts_from_the_last_orders(options: dict[str, Any]) -> None:
    model = network()
    config = replace(CONFIG, **options)
    sparsifier = ss.Sparsifier(model, config)
    assert orders(sparsifier) != orders(ss.Sparsifier(model, CONFIG))
    start: dict[str, Any] = dict.fromkeys(orders(sparsifier))
    for _ in range(2):
        expected = {}
        for name in start:
            importance = importance_matrix(
                model.get_parameter(f"{name}.weight"), "l2" if config.importance == "l2" else "l1"
            )
            learned = ss.core.learn_permutations(
                importance, config.method, decay=config.decay, start=start[name], seed=config.seed
            )
            expected[name] = learned.out_perm.tolist(), learned.in_perm.tolist()
        assert orders(sparsifier) == expected
        start = expected
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.01 * torch.randn_like(parameter))
        sparsifier.end_epoch()


@pytest.mark.parametrize("options", SOLVER_OPTIONS)
def test_the_options_reach_the_solver_of_a_one_shot_plan(options: dict[str, Any]) -> None:
    model = network()
    config = replace(CONFIG, **options)
    selection = ss.select_layers(model)
    states = learned_states(selection.layers, config, None)
    expected = plan_for_target(selection, states, network_size(model, None), config)
    assert ss.one_shot_plan(model, config) == expected
    assert expected.layers != ss.one_shot_plan(model, CONFIG.target).layers


def test_the_orders_are_learned_for_no_level_beyond_the_largest() -> None:
    model = network()
    limited = orders(ss.Sparsifier(model, replace(replace(CONFIG, target=0.2), largest_levels={"2": 2})))
    importance = importance_matrix(model.get_parameter("2.weight"))
    learned = ss.core.learn_permutations(importance, max_group_level=2)
    assert limited["2"] == (learned.out_perm.tolist(), learned.in_perm.tolist())
    assert limited["2"] != orders(ss.Sparsifier(model, CONFIG))["2"]


@pytest.mark.parametrize("min_kept_norm", [0.5, 0.9])
def test_the_levels_of_an_epoch_are_those_that_keep_the_norm_asked_for(min_kept_norm: float) -> None:
    report = ss.Sparsifier(network(), replace(CONFIG, min_kept_norm=min_kept_norm)).end_epoch()
    levels = [sum(kept >= min_kept_norm for kept in layer.kept_norm) for layer in report.layers]
    assert [layer.group_level for layer in report.layers] == levels
    assert max(levels) == (2 if min_kept_norm == 0.5 else 1)


@pytest.mark.parametrize("norm", ["l1", "l2"])
def test_a_plan_refines_the_learned_orders_at_its_levels(norm: Norm) -> None:
    model = network()
    plan = ss.one_shot_plan(model, ss.SparsifyConfig(target=0.7, importance=norm))
    changed = 0
    for name, layer in plan.layers.items():
        importance = importance_matrix(model.get_parameter(f"{name}.weight"), norm)
        learned = ss.core.learn_permutations(importance)
        refined = ss.core.refine_at_level(importance, learned, group_level=layer.group_level)
        assert layer.out_perm.tolist() == refined.out_perm.tolist()
        assert layer.in_perm.tolist() == refined.in_perm.tolist()
        changed += layer.out_perm.tolist() != learned.out_perm.tolist()
    assert changed > 0


@pytest.mark.parametrize("norm", ["l1", "l2"])
def test_the_lost_norm_that_one_shot_names_is_what_falls_outside_the_groups(
    norm: Norm, caplog: pytest.LogCaptureFixture
) -> None:
    model = network()
    plan = ss.one_shot_plan(model, ss.SparsifyConfig(target=0.4, importance=norm))
    lost, whole = 0.0, 0.0
    for name, layer in plan.layers.items():
        importance = importance_matrix(model.get_parameter(f"{name}.weight"), norm)
        out_channels, in_channels = importance.shape
        kept = ss.core.connection_mask(out_channels, in_channels, layer.group_level)
        lost += importance[layer.out_perm][:, layer.in_perm][~kept].sum()
        whole += importance.sum()
    assert f"removes {100 * plan.removed_param_fraction:.1f} % of all parameters" in caplog.text
    assert f"loses {100 * lost / whole:.1f} % of the grouped layers' norm" in caplog.text


def test_an_error_of_the_solver_comes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ot", None)
    with pytest.raises(ValueError, match="method='paper-pot' needs the package POT"):
        ss.Sparsifier(network(), replace(CONFIG, method="paper-pot"))


def swapped(width: int, first: int, second: int) -> IntArray:
    order = np.arange(width)
    order[[first, second]] = second, first
    return order


@pytest.mark.parametrize(
    ("out_pair", "in_pair", "moved"),
    [((0, 7), (3, 4), 4), ((0, 7), (0, 3), 2), ((0, 3), (3, 4), 2), ((0, 1), (2, 3), 0)],
)
def test_churn_is_the_share_of_channels_on_both_sides_that_change_their_group_of_the_next_level(
    out_pair: tuple[int, int], in_pair: tuple[int, int], moved: int
) -> None:
    # At level 1 the next has two groups of four; at level 2 with nothing beyond it, they are the last.
    for level, rules in ((1, None), (2, ss.SparsifyConfig(largest_levels={"0": 2}))):
        (layer,) = ss.select_layers(nn.Sequential(nn.Conv2d(8, 8, 1)), rules).layers
        before = LayerState(np.arange(8), np.arange(8), cost=0.0, kept_norm=(1.0,), group_level=level)
        after = replace(before, out_perm=swapped(8, *out_pair), in_perm=swapped(8, *in_pair))
        assert churn(layer, before, after) == moved / 16


def test_the_churn_of_a_report_is_counted_in_the_groups_after_its_new_level() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(16, 16, 1, bias=False))
    sparsifier = ss.Sparsifier(model, CONFIG)
    before = orders(sparsifier)["0"]
    half_of = torch.arange(16) % 2
    with torch.no_grad():
        model.get_parameter("0.weight").mul_((half_of[:, None] == half_of)[..., None, None])
    (layer,) = sparsifier.end_epoch().layers
    after = orders(sparsifier)["0"]
    assert layer.group_level == 2

    def moved(groups: int) -> float:
        places = [np.argsort(side) * groups // 16 for side in (*before, *after)]
        return float(np.mean([places[0] != places[2], places[1] != places[3]]))

    assert layer.churn == moved(4) != moved(2)


@pytest.mark.parametrize("budget", ["params", "macs"])
def test_both_removed_fractions_are_those_of_the_converted_model(budget: str) -> None:
    model, images = network(), torch.randn(1, 3, 8, 8)
    plan = ss.one_shot_plan(model, ss.SparsifyConfig(target=0.4, budget=budget), example_inputs=images)
    dense = ss.count_macs(model, images)
    grouped = ss.count_macs(ss.convert_(model, plan), images)
    assert plan.removed_param_fraction == pytest.approx(1 - grouped.params / dense.params)
    assert plan.removed_mac_fraction == pytest.approx(1 - grouped.macs / dense.macs)
    assert plan.removed_param_fraction != pytest.approx(plan.removed_mac_fraction, abs=1e-3)


@pytest.mark.parametrize("budget", ["params", "macs"])
def test_no_layer_of_a_plan_has_groups_that_its_budget_does_not_need(budget: str) -> None:
    torch.manual_seed(0)
    # The first layer has most of the MACs, the last most of the parameters.
    model = nn.Sequential(
        nn.Conv2d(16, 16, 3, padding=1, bias=False),
        nn.Conv2d(16, 32, 1, bias=False),
        nn.AdaptiveAvgPool2d(1),
        nn.Conv2d(32, 128, 1, bias=False),
    )
    images = torch.randn(1, 16, 6, 6)
    costs: dict[str, int] = {
        name: getattr(layer, budget) for name, layer in ss.count_macs(model, images).layers.items()
    }

    def removed(levels: dict[str, int]) -> float:
        return sum(costs[name] * (1 - 1 / ss.core.num_groups(level)) for name, level in levels.items()) / sum(
            costs.values()
        )

    for target in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7):
        plan = ss.one_shot_plan(model, ss.SparsifyConfig(target=target, budget=budget), example_inputs=images)
        levels = {name: layer.group_level for name, layer in plan.layers.items()}
        assert removed(levels) >= target
        for name, level in levels.items():
            assert level == 1 or removed(levels | {name: level - 1}) < target


def test_a_filter_leaves_layers_alone() -> None:
    def all_but_the_last(_: nn.Module, name: str) -> bool:
        return name != "4"

    sparsifier = ss.Sparsifier(network(), CONFIG, all_but_the_last)
    assert list(sparsifier.plan().layers) == ["2"]
    assert list(ss.one_shot_plan(network(), target=0.4, filter_fn=all_but_the_last).layers) == ["2"]


def test_a_plan_refreshes_the_orders_for_the_present_weights() -> None:
    model = network()
    sparsifier = ss.Sparsifier(model, replace(CONFIG, target=0.7))
    start = orders(sparsifier)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    for name, layer in sparsifier.plan().layers.items():
        importance = importance_matrix(model.get_parameter(f"{name}.weight"))
        learned = ss.core.learn_permutations(importance, start=start[name])
        refined = ss.core.refine_at_level(importance, learned, group_level=layer.group_level)
        assert (layer.out_perm.tolist(), layer.in_perm.tolist()) == (
            refined.out_perm.tolist(),
            refined.in_perm.tolist(),
        )
    assert orders(sparsifier) == start


def test_a_report_counts_the_macs_that_are_removed_where_the_target_does() -> None:
    model, images = network(), torch.randn(1, 3, 8, 8)
    with torch.no_grad():
        model.get_parameter("4.weight").mul_((torch.arange(16)[:, None] % 2 == torch.arange(32) % 2)[..., None, None])
    report = ss.Sparsifier(model, replace(CONFIG, budget="macs"), example_inputs=images).end_epoch()
    assert [layer.group_level for layer in report.layers] == [1, 2]
    count = ss.count_macs(model, images)
    assert report.removed_fraction == pytest.approx(count.layers["4"].macs / 2 / count.macs)


def test_the_default_step_of_lambda_follows_epochs_steps_and_learning_rate() -> None:
    config = ss.SparsifyConfig(target=0.5, epochs=40, steps_per_epoch=100, lr=0.03)
    assert config.penalty_schedule.lambda_step == ss.core.default_lambda_step(40, steps_per_epoch=100, lr=0.03)
    assert replace(config, controller="paper", lambda_step=0.5).penalty_schedule.lambda_step == 0.5


def test_the_defaults_are_the_papers() -> None:
    config = ss.SparsifyConfig(target=0.6, epochs=100)
    assert config == replace(
        config, budget="params", min_kept_norm=0.9, decay=0.5, importance="l1", lambda_warmup=0.1, lambda_step=None
    )
    assert (config.min_channels_per_group, config.method, config.seed) == (1, "fast", 0)
    assert config.penalty_schedule == ss.core.LambdaSchedule(target=0.6, epochs=100, lambda_step=2e-6, warmup=0.1)
