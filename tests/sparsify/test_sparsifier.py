import copy
import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn import functional
from torch.nn.utils import prune

import strucspars as ss
from strucspars.core.hierarchy import penalty_matrix
from strucspars.core.importance import Norm
from strucspars.sparsify.report import EpochReport

CONFIG = ss.SparsifyConfig(target=0.4, epochs=8, lambda_step=1e-3, lambda_warmup_epochs=1)


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 16, 1, bias=False),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 4),
    )


def sparsifier_with_penalty(model: nn.Module, config: ss.SparsifyConfig = CONFIG) -> ss.Sparsifier:
    """After two epochs lambda is above zero."""
    sparsifier = ss.Sparsifier(model, config)
    sparsifier.end_epoch()
    sparsifier.end_epoch()
    assert sparsifier.lambda_value > 0
    return sparsifier


def penalty_by_definition(model: nn.Module, sparsifier: ss.Sparsifier, norm: Norm) -> float:
    """Sec. 3.3, layer by layer: lambda * sum(S[P][:, Q] * R_g)."""
    state = sparsifier.state_dict()
    total = 0.0
    for name, layer in state["layers"].items():
        importance = ss.importance_matrix(model.get_parameter(f"{name}.weight"), norm)
        permuted = importance[layer["out_perm"].numpy()][:, layer["in_perm"].numpy()]
        out_channels, in_channels = importance.shape
        total += float((permuted * penalty_matrix(out_channels, in_channels, layer["group_level"])).sum())
    return sparsifier.lambda_value * total


@pytest.mark.parametrize("norm", ["l1", "l2"])
def test_the_penalty_is_the_papers_sum(norm: Norm) -> None:
    model = network()
    sparsifier = sparsifier_with_penalty(model, replace(CONFIG, norm=norm))
    expected = penalty_by_definition(model, sparsifier, norm)
    assert expected > 0
    assert sparsifier.penalty().item() == pytest.approx(expected, rel=1e-5)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("norm", ["l1", "l2"])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_the_gradient_added_equals_that_of_the_loss_term(norm: Norm, memory_format: torch.memory_format) -> None:
    model = network().to(memory_format=memory_format)
    with torch.no_grad():
        model.get_parameter("2.weight")[:4].zero_()
    sparsifier = sparsifier_with_penalty(model, replace(CONFIG, norm=norm))
    images = torch.randn(2, 3, 8, 8)
    (model(images).square().mean() + sparsifier.penalty()).backward()
    by_loss = gradients(model)
    model.zero_grad()
    model(images).square().mean().backward()
    without = gradients(model)
    sparsifier.regularize_()
    by_hook = gradients(model)
    torch.testing.assert_close(by_hook, by_loss, rtol=1e-6, atol=1e-7)
    assert not torch.allclose(by_hook["2.weight"], without["2.weight"])
    assert torch.equal(by_hook["7.weight"], without["7.weight"])


@pytest.mark.parametrize("norm", ["l1", "l2"])
def test_the_subgradient_at_zero_is_zero(norm: Norm) -> None:
    model = network()
    sparsifier = sparsifier_with_penalty(model, replace(CONFIG, norm=norm))
    with torch.no_grad():
        model.get_parameter("2.weight").zero_()
    torch.autograd.backward(sparsifier.penalty())
    gradient = model.get_parameter("2.weight").grad
    assert gradient is not None
    assert torch.equal(gradient, torch.zeros_like(gradient))
    sparsifier.regularize_()
    assert torch.equal(gradient, torch.zeros_like(gradient))


def test_accumulated_and_scaled_gradients_get_the_penalty_once_and_unscaled() -> None:
    model = network()
    sparsifier = sparsifier_with_penalty(model)
    batches = torch.randn(2, 2, 3, 8, 8)
    for batch in batches:
        ((model(batch).square().mean() + sparsifier.penalty()) / 2).backward()
    expected = gradients(model)
    model.zero_grad()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for batch in batches:
        scaler.scale(model(batch).square().mean() / 2).backward()
    scaler.unscale_(optimizer)
    sparsifier.regularize_()
    torch.testing.assert_close(gradients(model), expected, rtol=1e-5, atol=1e-7)


def test_a_frozen_weight_is_left_alone() -> None:
    model = network()
    model.get_parameter("2.weight").requires_grad_(False)
    sparsifier = sparsifier_with_penalty(model)
    sparsifier.regularize_()
    assert model.get_parameter("2.weight").grad is None
    assert model.get_parameter("4.weight").grad is not None


# Torch 2.11 says so of its own compiler, seen on a machine with a GPU.
COMPILER_WARNS = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


@COMPILER_WARNS
def test_the_penalty_compiles_without_a_break() -> None:
    model = network()
    sparsifier = sparsifier_with_penalty(model)

    def loss(images: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = model(images).square().mean() + sparsifier.penalty()
        return value

    images = torch.randn(2, 3, 8, 8)
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(images), loss(images))


def test_half_precision_weights_get_the_same_gradient_both_ways() -> None:
    model = network().bfloat16()
    sparsifier = sparsifier_with_penalty(model)
    torch.autograd.backward(sparsifier.penalty())
    by_loss = gradients(model)
    model.zero_grad()
    sparsifier.regularize_()
    by_hook = gradients(model)
    assert by_hook["2.weight"].dtype == torch.bfloat16
    assert by_hook["2.weight"].any()
    for name in ("2.weight", "4.weight"):
        assert torch.equal(by_hook[name], by_loss[name])


def test_the_models_keys_and_modules_do_not_change() -> None:
    model = network()
    keys, types = list(model.state_dict()), [type(module) for module in model.modules()]
    sparsifier = sparsifier_with_penalty(model)
    sparsifier.plan()
    assert list(model.state_dict()) == keys
    assert [type(module) for module in model.modules()] == types


def labelled_images() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(32, 3, 8, 8, generator=generator), torch.randint(4, (32,), generator=generator)


def train(model: nn.Module, sparsifier: ss.Sparsifier, epochs: int) -> list[EpochReport]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    images, labels = labelled_images()
    reports = []
    for _ in range(epochs):
        for _ in range(5):
            optimizer.zero_grad()
            torch.autograd.backward(functional.cross_entropy(model(images), labels))
            sparsifier.regularize_()
            optimizer.step()
        reports.append(sparsifier.end_epoch())
    return reports


def test_sparse_training_makes_groups() -> None:
    model = network()
    config = ss.SparsifyConfig(target=0.5, epochs=30, lambda_step=2e-3, lambda_warmup_epochs=2)
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


def saved(state: dict[str, Any]) -> dict[str, Any]:
    """Through a file, as a checkpoint goes, without trusting it."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def test_a_resumed_run_continues_exactly() -> None:
    model = network()
    sparsifier = ss.Sparsifier(model, CONFIG)
    train(model, sparsifier, 3)
    resumed_model = network(seed=9)
    resumed = ss.Sparsifier(resumed_model, CONFIG)
    resumed_model.load_state_dict(copy.deepcopy(model.state_dict()))
    resumed.load_state_dict(saved(sparsifier.state_dict()))
    reports, resumed_reports = train(model, sparsifier, 3), train(resumed_model, resumed, 3)
    assert [replace(report, seconds=0) for report in reports] == [
        replace(report, seconds=0) for report in resumed_reports
    ]
    torch.testing.assert_close(resumed_model.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert resumed.plan() == sparsifier.plan()


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    sparsifier = sparsifier_with_penalty(network())
    state = sparsifier.state_dict()
    bad_orders = copy.deepcopy(state)
    bad_orders["layers"]["4"]["in_perm"][0] = 1
    for bad, complaint in (
        ({**state, "version": 99}, "version 99"),
        ({**state, "config": {**state["config"], "target": 0.1}}, "other options: target"),
        ({**state, "layers": {"other": {}}}, r"belongs to the layers \['other'\]"),
        (bad_orders, "layer '4': in_perm is not a permutation"),
    ):
        before = sparsifier.penalty().item()
        with pytest.raises(ValueError, match=complaint):
            sparsifier.load_state_dict(bad)
        assert sparsifier.penalty().item() == before


def test_fixed_and_largest_levels_hold_in_penalty_and_plan() -> None:
    rules = ss.LayerRules(fixed_levels={"2": 3}, largest_levels={"4": 2})
    model = network()
    sparsifier = ss.Sparsifier(model, replace(CONFIG, target=0.65), rules=rules)
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
    assert "of the grouped layers' norm: finetune" in caplog.text


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
        ({"lambda_warmup_epochs": 7}, "lambda_warmup_epochs must be at most 6 of 8 epochs, got 7"),
        ({"budget": "flops"}, "budget must be one of params, macs"),
        ({"norm": "l3"}, "norm must be one of l1, l2"),
        ({"method": "slow"}, "method must be one of fast, paper, paper-pot"),
        ({"decay": 0}, "decay must lie in"),
        ({"min_kept_norm": 2}, "min_kept_norm must lie in"),
        ({"seed": -1}, "seed must be a whole number from 0 on"),
        ({"min_channels_per_group": 0}, "min_channels_per_group must be a whole number from 1 on"),
    ],
)
def test_a_bad_option_is_named(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        replace(CONFIG, **options)


def test_a_budget_of_macs_is_counted_on_the_example_input() -> None:
    model = network()
    images = torch.randn(1, 3, 8, 8)
    plan = ss.one_shot_plan(model, target=0.4, budget="macs", example_inputs=images)
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
    rules = ss.LayerRules(layer_types=(nn.Conv2d, nn.Linear))
    model = network()
    plan = ss.one_shot_plan(model, target=0.5, rules=rules)
    assert list(plan.layers) == ["2", "4", "7"]
    assert ss.convert_(model, plan)(torch.randn(2, 3, 8, 8)).shape == (2, 4)


def test_nothing_is_penalised_while_everything_is_frozen() -> None:
    model = network().requires_grad_(False)
    sparsifier_with_penalty(model).regularize_()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_state_saved_with_other_rules_is_refused() -> None:
    state = ss.Sparsifier(network(), CONFIG).state_dict()
    limited = ss.Sparsifier(network(), CONFIG, rules=ss.LayerRules(largest_levels={"2": 3}))
    with pytest.raises(ValueError, match="layer '2': the state was saved with other rules"):
        limited.load_state_dict(state)
    with pytest.raises(ValueError, match="version -3"):
        limited.load_state_dict({"version": -3})


def test_compiled_and_plain_penalties_have_equal_gradients_after_an_epoch() -> None:
    model = network()
    sparsifier = sparsifier_with_penalty(model)
    compiled = torch.compile(sparsifier.regularize_, backend="aot_eager")
    compiled()
    sparsifier.end_epoch()
    model.zero_grad()
    compiled()
    by_compiler = gradients(model)
    model.zero_grad()
    sparsifier.regularize_()
    torch.testing.assert_close(by_compiler, gradients(model))


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
    numbers: dict[str, Any] = {"target": np.float64(0.4), "epochs": np.int64(20), "lambda_step": np.float32(1e-3)}
    levels: dict[str, Any] = {"2": np.int64(2)}
    config, rules = ss.SparsifyConfig(**numbers), ss.LayerRules(fixed_levels=levels)
    sparsifier = ss.Sparsifier(network(), config, rules=rules)
    file = io.BytesIO()
    torch.save(sparsifier.state_dict(), file)
    file.seek(0)
    again = ss.Sparsifier(network(), config, rules=rules)
    again.load_state_dict(torch.load(file, weights_only=True))
    assert again.state_dict()["config"] == sparsifier.state_dict()["config"]


@pytest.mark.parametrize("key", ["config", "controller", "layers"])
def test_a_state_that_lacks_something_says_what(key: str) -> None:
    sparsifier = ss.Sparsifier(network(), CONFIG)
    state = {name: value for name, value in sparsifier.state_dict().items() if name != key}
    with pytest.raises(ValueError, match=f"the sparsifier state lacks {key}; give what state_dict"):
        sparsifier.load_state_dict(state)


def test_a_controller_that_lacks_something_is_refused() -> None:
    sparsifier = ss.Sparsifier(network(), CONFIG)
    state = sparsifier.state_dict() | {"controller": {"epoch": 1}}
    with pytest.raises(ValueError, match="must hold epoch, lambda_value, removed_fraction; it has epoch"):
        sparsifier.load_state_dict(state)


@pytest.mark.parametrize("use", ["penalty", "regularize_", "end_epoch", "plan"])
def test_a_sparsifier_says_that_its_model_has_been_converted(use: str) -> None:
    model = network()
    sparsifier = sparsifier_with_penalty(model)
    ss.convert_(model, sparsifier.plan())
    model(torch.zeros(1, 3, 4, 4)).sum().backward()
    with pytest.raises(ValueError, match=r"layer '\d' has been converted: sparse training ends with plan"):
        getattr(sparsifier, use)()


def test_a_one_shot_plan_says_why_nothing_can_be_grouped() -> None:
    with pytest.raises(ValueError, match="no layer of the model can be grouped: 3 x 3 channels"):
        ss.one_shot_plan(nn.Sequential(nn.Conv2d(3, 3, 1)), target=0.3)


def load_assigning_(model: nn.Module) -> None:
    model.load_state_dict(copy.deepcopy(network(seed=1).state_dict()), assign=True)


def replace_weights_(model: nn.Module) -> None:
    for name, parameter in list(model.named_parameters()):
        module, _, own_name = name.rpartition(".")
        setattr(model.get_submodule(module), own_name, nn.Parameter(2 * parameter.detach()))


@pytest.mark.parametrize("norm", ["l1", "l2"])
@pytest.mark.parametrize("replace_", [load_assigning_, replace_weights_])
def test_weights_that_replace_others_are_the_ones_penalised(norm: Norm, replace_: Callable[[nn.Module], None]) -> None:
    model = network()
    sparsifier = sparsifier_with_penalty(model, replace(CONFIG, norm=norm))
    dead = list(model.parameters())
    replace_(model)
    assert not {id(parameter) for parameter in model.parameters()} & {id(parameter) for parameter in dead}
    value = sparsifier.penalty()
    assert value.item() == pytest.approx(penalty_by_definition(model, sparsifier, norm), rel=1e-5)
    torch.autograd.backward(value)
    by_loss = gradients(model)
    assert sorted(by_loss) == ["2.weight", "4.weight"]
    model.zero_grad()
    sparsifier.regularize_()
    torch.testing.assert_close(gradients(model), by_loss)
    assert all(parameter.grad is None for parameter in dead)


@COMPILER_WARNS
def test_a_compiled_penalty_follows_weights_that_replace_others() -> None:
    model = network()
    sparsifier = sparsifier_with_penalty(model)
    compiled = torch.compile(sparsifier.penalty, backend="aot_eager", fullgraph=True)
    compiled()
    replace_weights_(model)
    torch.autograd.backward(compiled())
    assert sorted(gradients(model)) == ["2.weight", "4.weight"]
    torch.testing.assert_close(compiled(), sparsifier.penalty())


def test_training_makes_groups_after_weights_were_assigned() -> None:
    model = network()
    config = ss.SparsifyConfig(target=0.5, epochs=30, lambda_step=2e-3, lambda_warmup_epochs=2)
    sparsifier = ss.Sparsifier(model, config)
    load_assigning_(model)
    reports = train(model, sparsifier, 30)
    assert max(report.removed_fraction for report in reports) >= 0.4


@pytest.mark.parametrize("use", ["penalty", "regularize_", "end_epoch", "plan"])
def test_a_weight_of_another_shape_is_named(use: str) -> None:
    model = network()
    sparsifier = sparsifier_with_penalty(model)
    model[4].weight = nn.Parameter(torch.randn(16, 8, 1, 1))
    with pytest.raises(ValueError, match=r"layer '4': .* shape \(16, 32, 1, 1\) .* \(16, 8, 1, 1\) now; make a new"):
        getattr(sparsifier, use)()


@pytest.mark.parametrize("use", ["penalty", "regularize_", "end_epoch", "plan"])
def test_a_weight_that_is_no_parameter_any_more_is_named(use: str) -> None:
    model = network()
    sparsifier = sparsifier_with_penalty(model)
    prune.l1_unstructured(model[4], "weight", amount=2)  # type: ignore[no-untyped-call]  # untyped in torch
    with pytest.raises(ValueError, match=r"layer '4': its weight is no parameter any more.*undo that"):
        getattr(sparsifier, use)()


class Nested(nn.Module):
    """The network, with blocks to replace."""

    def __init__(self) -> None:
        super().__init__()
        layers = network()
        self.first, self.rest = nn.Sequential(*layers[:4]), nn.Sequential(*layers[4:])

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.rest(self.first(images))
        return scores


def replace_layer_(model: Nested) -> None:
    model.first[2] = nn.Conv2d(16, 32, 3, padding=1)


def replace_block_(model: Nested) -> None:
    model.first = copy.deepcopy(model.first)


def remove_layer_(model: Nested) -> None:
    del model.first[2:]


@pytest.mark.parametrize("use", ["penalty", "regularize_", "end_epoch", "plan"])
@pytest.mark.parametrize("replace_", [replace_layer_, replace_block_, remove_layer_])
def test_a_module_that_has_been_replaced_is_named(use: str, replace_: Callable[[Nested], None]) -> None:
    model = Nested()
    sparsifier = sparsifier_with_penalty(model)
    replace_(model)
    with pytest.raises(ValueError, match=r"layer 'first\.2' has been replaced in the model.*make a new Sparsifier"):
        getattr(sparsifier, use)()


def test_modules_that_hold_no_layer_may_be_replaced() -> None:
    model = Nested()
    sparsifier = sparsifier_with_penalty(model)
    before = sparsifier.penalty()
    model.rest[-1], model.first[1] = nn.Linear(16, 7), nn.SiLU()
    assert torch.equal(sparsifier.penalty(), before)


@pytest.mark.parametrize("wrap", [lambda part: torch.compile(part, backend="eager"), nn.DataParallel])
def test_layers_that_are_wrapped_later_are_the_same_and_replaced_ones_are_still_named(
    wrap: Callable[[nn.Module], Any],
) -> None:
    model = Nested()
    sparsifier = sparsifier_with_penalty(model)
    before = sparsifier.penalty()
    model.first = wrap(model.first)
    assert torch.equal(sparsifier.penalty(), before)
    sparsifier.regularize_()
    assert sorted(sparsifier.plan().layers) == ["first.2", "rest.0"]
    model.first = wrap(copy.deepcopy(network()[:4]))
    with pytest.raises(ValueError, match=r"layer 'first\.2' has been replaced"):
        sparsifier.penalty()


def test_layers_that_move_to_other_names_are_named() -> None:
    model = network()
    sparsifier = sparsifier_with_penalty(model)
    del model[0]
    with pytest.raises(ValueError, match=r"layer '2' has been replaced in the model"):
        sparsifier.penalty()


def test_recomputed_activations_change_no_layer() -> None:
    model = Nested()
    sparsifier = sparsifier_with_penalty(model)
    before = sparsifier.penalty()
    model.add_module("first", checkpoint_wrapper(model.first))
    assert torch.equal(sparsifier.penalty(), before)
    model.rest[0] = checkpoint_wrapper(model.rest[0])
    assert torch.equal(sparsifier.penalty(), before)


def test_a_state_with_the_names_of_wrappers_is_read() -> None:
    model = network()
    sparsifier = ss.Sparsifier(model, CONFIG)
    train(model, sparsifier, 2)
    state = sparsifier.state_dict()
    older = {**state, "layers": {f"module.{name}": layer for name, layer in state["layers"].items()}}
    restored = ss.Sparsifier(nn.DataParallel(model), CONFIG)
    restored.load_state_dict(older)
    assert str(restored.state_dict()) == str(state)
    with pytest.raises(ValueError, match=r"belongs to the layers \['module.2', .* give that of the same network"):
        ss.Sparsifier(model, CONFIG).load_state_dict(older)


@COMPILER_WARNS
def test_a_compiled_penalty_notices_a_module_that_has_been_replaced() -> None:
    model = Nested()
    sparsifier = sparsifier_with_penalty(model)
    compiled = torch.compile(sparsifier.penalty, backend="aot_eager")
    torch.testing.assert_close(compiled(), sparsifier.penalty())
    replace_block_(model)
    with pytest.raises(ValueError, match=r"layer 'first\.2' has been replaced"):
        compiled()


def test_a_model_on_the_meta_device_is_told_to_get_memory() -> None:
    model = network().to("meta")
    told = r"layer '2' is on the meta device, .*; call model\.to_empty\(device=\.\.\.\) and load the weights first"
    with pytest.raises(ValueError, match=told):
        ss.Sparsifier(model, CONFIG)
    with pytest.raises(ValueError, match=told):
        ss.one_shot_plan(model, target=0.4)


# Torch deprecates scripting, in words of another category from version to version.
@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")
def test_a_scripted_model_is_told_to_be_grouped_first() -> None:
    scripted = torch.jit.script(network())
    told = "can be grouped: it is scripted or traced: group the network first, then script it"
    with pytest.raises(ValueError, match=told):
        ss.Sparsifier(scripted, CONFIG)
    with pytest.raises(ValueError, match=told):
        ss.one_shot_plan(scripted, target=0.4)


def test_the_penalty_falls_from_halving_to_halving_by_the_decay_asked_for() -> None:
    model = network()
    with torch.no_grad():
        # Of two groups, so that two halvings are penalised; the other layer lags, so that lambda rises.
        model.get_parameter("4.weight").mul_((torch.arange(16)[:, None] % 2 == torch.arange(32) % 2)[..., None, None])
    sparsifier = sparsifier_with_penalty(model, replace(CONFIG, decay=0.3))
    with torch.no_grad():
        model.get_parameter("4.weight").fill_(1)
    torch.autograd.backward(sparsifier.penalty())
    gradient = model.get_parameter("4.weight").grad
    assert gradient is not None
    strengths = np.unique(gradient.numpy()) / sparsifier.lambda_value
    np.testing.assert_allclose(strengths, [0.0, 0.3, 1.0], rtol=1e-6)


def test_a_state_with_an_impossible_controller_or_level_changes_nothing() -> None:
    sparsifier = sparsifier_with_penalty(network())
    before = str(sparsifier.state_dict())
    other = sparsifier_with_penalty(network(seed=5)).state_dict()
    bad_level = copy.deepcopy(other)
    bad_level["layers"]["4"]["group_level"] = 6
    for bad, complaint in (
        ({**other, "controller": {**other["controller"], "epoch": -1}}, "epoch must be a whole number from 0 on"),
        (bad_level, r"group_level must lie in 1\.\.5 for a 16 x 32 layer"),
        ({**other, "version": 0}, "version 0"),
    ):
        with pytest.raises(ValueError, match=complaint):
            sparsifier.load_state_dict(bad)
        assert str(sparsifier.state_dict()) == before


def test_a_state_of_the_same_layers_in_another_order_is_refused() -> None:
    # Of one width, so that the orders of one would fit the other.
    sparsifier = ss.Sparsifier(nn.Sequential(nn.Conv2d(16, 16, 1), nn.Conv2d(16, 16, 1)), CONFIG)
    state = sparsifier.state_dict()
    turned = dict(reversed(state["layers"].items()))
    with pytest.raises(ValueError, match=r"belongs to the layers \['1', '0'\], the model has \['0', '1'\]"):
        sparsifier.load_state_dict(state | {"layers": turned})


def test_a_level_that_was_fixed_is_another_rule_than_the_same_level_as_a_limit() -> None:
    fixed = ss.Sparsifier(network(), CONFIG, rules=ss.LayerRules(fixed_levels={"2": 3}))
    limited = ss.Sparsifier(network(), CONFIG, rules=ss.LayerRules(largest_levels={"2": 3}))
    with pytest.raises(ValueError, match="layer '2': the state was saved with other rules"):
        limited.load_state_dict(fixed.state_dict())


@pytest.mark.parametrize(("use", "operation"), [("penalty", "_foreach_copy_"), ("regularize_", "_foreach_addcmul_")])
def test_an_error_of_torch_is_passed_on(use: str, operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    sparsifier = sparsifier_with_penalty(network())
    monkeypatch.setattr(torch, operation, fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        getattr(sparsifier, use)()


def test_a_layer_whose_place_another_block_of_the_model_has_taken_is_named() -> None:
    model = Nested()
    sparsifier = sparsifier_with_penalty(model)
    model.spare, model.rest = model.rest, model.first
    with pytest.raises(ValueError, match=r"layer 'rest\.0' has been replaced in the model"):
        sparsifier.penalty()
