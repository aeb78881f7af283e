import copy
from collections.abc import Callable
from typing import cast

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import strucspars as ss
from strucspars.core.importance import Norm
from strucspars.nn.importance import importance_matrix
from strucspars.nn.layers import kept_connections
from strucspars.sparsify.reports import EpochReport
from strucspars.train.rules import HeldZerosRule, SlimmingRule, SparsifyRule, TrainingRule

STEPS = 5


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 8, 1, bias=False),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )


def trained(model: nn.Module, after_backward: Callable[[], None]) -> nn.Module:
    """Some steps of SGD with momentum and weight decay; the same images every time."""
    generator = torch.Generator().manual_seed(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    for _ in range(STEPS):
        images = torch.randn(16, 3, 6, 6, generator=generator)
        labels = torch.randint(8, (16,), generator=generator)
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(functional.cross_entropy(model(images), labels))
        after_backward()
        optimizer.step()
    return model.eval()


@pytest.fixture(scope="module")
def plan() -> ss.GroupingPlan:
    plan = ss.one_shot_plan(network(), target=0.7)
    assert sum(layer.group_level > 1 for layer in plan.layers.values()) == 2
    return plan


@pytest.fixture(scope="module")
def held(plan: ss.GroupingPlan) -> nn.Module:
    model = network()
    return trained(model, HeldZerosRule(model, plan).add_gradient_)


def test_pruned_weights_stay_exactly_zero_under_momentum_and_weight_decay(
    held: nn.Module, plan: ss.GroupingPlan
) -> None:
    for name, layer in plan.layers.items():
        if layer.group_level > 1:
            weight, kept = held.get_submodule(name).get_parameter("weight"), kept_connections(layer)
            assert (weight[~kept] == 0).all()
            assert (weight[kept] != 0).all()


def test_held_zeros_train_as_masked_layers_do(held: nn.Module, plan: ss.GroupingPlan) -> None:
    masked = trained(ss.mask_(network(), plan), lambda: None)
    torch.testing.assert_close(dict(held.state_dict()), dict(masked.state_dict()), rtol=0, atol=1e-6)


@pytest.mark.parametrize("form", ["masked", "grouped"])
def test_either_form_trains_the_same_function(held: nn.Module, plan: ss.GroupingPlan, form: str) -> None:
    model, rule = network(), TrainingRule()
    if form == "masked":
        rule = HeldZerosRule(model, plan)
    else:
        ss.convert_(model, plan)
    small = trained(model, rule.add_gradient_)
    images = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(small(images), held(images), rtol=0, atol=1e-4)
    params = sum(parameter.numel() for parameter in small.parameters())
    assert (params < sum(parameter.numel() for parameter in held.parameters())) == (form == "grouped")


def test_held_zeros_work_on_weights_in_channels_last(held: nn.Module, plan: ss.GroupingPlan) -> None:
    model = network().to(memory_format=torch.channels_last)
    rule = HeldZerosRule(model, plan)
    torch.testing.assert_close(dict(trained(model, rule.add_gradient_).state_dict()), dict(held.state_dict()))
    assert model.get_parameter("3.weight").is_contiguous(memory_format=torch.channels_last)


def test_a_layer_that_took_no_part_has_no_gradient_to_mask(plan: ss.GroupingPlan) -> None:
    model = network()
    rule = HeldZerosRule(model, plan)
    used = model.get_parameter("5.weight")
    used.grad = torch.ones_like(used)
    rule.add_gradient_()
    assert torch.equal(used.grad[:, :, 0, 0] == 1, kept_connections(plan.layers["5"]))
    assert model.get_parameter("3.weight").grad is None


def test_a_plan_without_groups_holds_nothing() -> None:
    layer = ss.LayerPlan(group_level=1, out_perm=np.arange(16), in_perm=np.arange(3), weight_shape=(16, 3, 3, 3))
    model, other = network(), network()
    trained(model, HeldZerosRule(model, ss.GroupingPlan({"0": layer})).add_gradient_)
    torch.testing.assert_close(model.state_dict(), trained(other, TrainingRule().add_gradient_).state_dict())


def sparsify_rule(model: nn.Module) -> tuple[SparsifyRule, ss.Sparsifier]:
    sparsifier = ss.Sparsifier(
        model, ss.SparsifyConfig(target=0.5, epochs=9, controller="paper", lambda_step=1e-2, lambda_warmup=0)
    )
    return SparsifyRule(sparsifier), sparsifier


def test_the_sparsify_rule_adds_the_gradient_of_the_penalty() -> None:
    model = network()
    rule, sparsifier = sparsify_rule(model)
    rule.end_epoch()
    assert sparsifier.lambda_value == 1e-2
    rule.add_gradient_()
    added = [parameter.grad for parameter in model.parameters() if parameter.dim() == 4]
    for parameter in model.parameters():
        parameter.grad = None
    torch.autograd.backward(sparsifier.penalty())
    torch.testing.assert_close(added, [parameter.grad for parameter in model.parameters() if parameter.dim() == 4])


def test_the_row_of_an_epoch_says_which_lambda_it_had_and_what_it_came_to() -> None:
    rule, _ = sparsify_rule(network())
    first, second = rule.end_epoch(), rule.end_epoch()
    assert (first["lambda"], second["lambda"]) == (0.0, 1e-2)
    assert first["removed_fraction"] == second["removed_fraction"] == 0.0


def test_the_arrays_of_an_epoch_hold_levels_kept_norms_and_orders_of_all_layers() -> None:
    model = network()
    rule, sparsifier = sparsify_rule(model)
    assert rule.arrays() == {}
    rule.end_epoch()
    arrays = rule.arrays()
    shapes = [layer.weight_shape for layer in sparsifier.selection.layers]
    assert arrays["group_level"].tolist() == [1] * len(shapes)
    assert arrays["out_perm"].shape == (sum(shape[0] for shape in shapes),)
    assert arrays["in_perm"].shape == (sum(shape[1] for shape in shapes),)
    first = arrays["out_perm"][: shapes[0][0]]
    assert sorted(first.tolist()) == list(range(shapes[0][0]))
    # The second layer is narrower, and has a level less.
    assert arrays["kept_norm"].shape == (2, 5)
    assert arrays["kept_norm"][:, 0].tolist() == [1, 1]
    assert np.argwhere(np.isnan(arrays["kept_norm"])).tolist() == [[1, 4]]


def test_a_restored_sparsify_rule_goes_on_in_step_with_the_first() -> None:
    model = network()
    rule, sparsifier = sparsify_rule(model)
    for _ in range(3):
        trained(model.train(), rule.add_gradient_)
        rule.end_epoch()
    twin = copy.deepcopy(model)
    other_rule, other = sparsify_rule(twin)
    other_rule.load_state_dict(rule.state_dict())
    assert other.lambda_value == sparsifier.lambda_value > 0
    for candidate, candidate_rule in ((model, rule), (twin, other_rule)):
        trained(candidate.train(), candidate_rule.add_gradient_)
    torch.testing.assert_close(dict(twin.state_dict()), dict(model.state_dict()), rtol=0, atol=0)
    assert other.plan() == sparsifier.plan()


def test_the_slimming_rule_pulls_every_scale_towards_zero() -> None:
    model = network()
    norm = cast(nn.BatchNorm2d, model[1])
    with torch.no_grad():
        norm.weight[:3] = torch.tensor([-1.0, 0.0, 2.0])
    SlimmingRule(model, 0.25).add_gradient_()
    assert norm.weight.grad is not None
    assert norm.weight.grad[:4].tolist() == [-0.25, 0.0, 0.25, 0.25]
    assert norm.bias.grad is None


def test_the_arrays_of_an_epoch_are_those_of_its_report(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    rule, sparsifier = sparsify_rule(model)
    reports = []
    end_epoch = sparsifier.end_epoch

    def noted() -> EpochReport:
        reports.append(end_epoch())
        return reports[-1]

    monkeypatch.setattr(sparsifier, "end_epoch", noted)
    with torch.no_grad():
        model.get_parameter("3.weight").normal_()
    row, arrays = rule.end_epoch(), rule.arrays()
    layers = reports[0].layers
    churns = [layer.churn for layer in layers]
    assert len(set(churns)) == len(layers) == 2
    assert row["mean_churn"] == pytest.approx(sum(churns) / 2)
    assert arrays["churn"].tolist() == pytest.approx(churns)
    assert arrays["cost"].tolist() == [layer.cost for layer in layers]
    orders = sparsifier.state_dict()["layers"].values()
    for key in ("out_perm", "in_perm"):
        assert arrays[key].tolist() == [channel for order in orders for channel in order[key]]


@pytest.mark.parametrize("norm", ["l1", "l2"])
def test_the_pictured_matrices_are_in_the_present_orders_and_norm(norm: Norm) -> None:
    model = network()
    config = ss.SparsifyConfig(
        target=0.5, epochs=9, controller="paper", lambda_step=1e-2, lambda_warmup=0, importance=norm
    )
    sparsifier = ss.Sparsifier(model, config)
    matrices = SparsifyRule(sparsifier).matrices()
    orders = sparsifier.state_dict()["layers"]
    assert list(matrices) == [layer.name for layer in sparsifier.selection.layers]
    for layer in sparsifier.selection.layers:
        order, importance = orders[layer.name], importance_matrix(layer.weight, norm)
        assert list(order["out_perm"]) != list(range(len(order["out_perm"])))
        for row, out_channel in enumerate(order["out_perm"]):
            for column, in_channel in enumerate(order["in_perm"]):
                assert matrices[layer.name][row, column] == importance[out_channel, in_channel]
