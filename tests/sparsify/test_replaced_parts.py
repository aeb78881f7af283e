"""Weights and modules that change under a sparsifier."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from sparse_training import (
    CONFIG,
    gradients,
    network,
    penalty_by_definition,
    sparsifier_with_penalty,
    train,
)
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import prune
from torch_warnings import COMPILER_WARNS

import strucspars as ss
from strucspars.core.importance import Norm


@pytest.mark.parametrize("use", ["penalty", "regularize_", "end_epoch", "plan"])
def test_a_sparsifier_says_that_its_model_has_been_converted(use: str) -> None:
    model = network()
    sparsifier = sparsifier_with_penalty(model)
    ss.convert_(model, sparsifier.plan())
    model(torch.zeros(1, 3, 4, 4)).sum().backward()
    with pytest.raises(ValueError, match=r"layer '\d' has been converted: sparse training ends with plan"):
        getattr(sparsifier, use)()


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
    sparsifier = sparsifier_with_penalty(model, replace(CONFIG, importance=norm))
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
    config = ss.SparsifyConfig(target=0.5, epochs=30, controller="paper", lambda_step=2e-3, lambda_warmup=2 / 30)
    sparsifier = ss.Sparsifier(model, config)
    load_assigning_(model)
    reports = train(model, sparsifier, 30)
    assert max(report.removed_fraction for report in reports) >= 0.4


@pytest.mark.parametrize("use", ["penalty", "regularize_", "end_epoch", "plan"])
def test_a_weight_that_is_no_parameter_any_more_is_named(use: str) -> None:
    model = network()
    sparsifier = sparsifier_with_penalty(model)
    prune.l1_unstructured(model[4], "weight", amount=2)  # type: ignore[no-untyped-call]  # untyped in torch
    with pytest.raises(ValueError, match=r"layer '4': its weight is no longer a parameter.*undo that"):
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


@pytest.mark.parametrize("use", ["end_epoch", "plan"])
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


@pytest.mark.parametrize("budget", ["params", "macs"])
def test_a_plan_meets_its_target_in_the_network_as_it_is_then(budget: str) -> None:
    model, images = Nested(), torch.zeros(1, 3, 4, 4)
    config = replace(CONFIG, target=0.4, budget=budget)
    sparsifier = ss.Sparsifier(model, config, example_inputs=images)
    model.rest[-1] = nn.Linear(16, 300)
    assert sparsifier.end_epoch().removed_fraction == 0
    plan, before = sparsifier.plan(), ss.count_macs(model, images)
    ss.convert_(model, plan)
    after = ss.count_macs(model, images)
    assert plan.removed_param_fraction == pytest.approx(1 - after.params / before.params)
    assert plan.removed_mac_fraction == pytest.approx(1 - after.macs / before.macs)


def test_operations_are_counted_again_where_a_module_without_weights_changes_them() -> None:
    model, images = Nested(), torch.zeros(1, 3, 4, 4)
    sparsifier = ss.Sparsifier(model, replace(CONFIG, target=0.4, budget="macs"), example_inputs=images)
    model.first[1] = nn.MaxPool2d(2)
    plan, before = sparsifier.plan(), ss.count_macs(model, images)
    ss.convert_(model, plan)
    assert plan.removed_mac_fraction == pytest.approx(1 - ss.count_macs(model, images).macs / before.macs)


def test_operations_of_layers_that_a_wrapper_of_later_renames_still_count() -> None:
    model, images = Nested(), torch.zeros(1, 3, 4, 4)
    sparsifier = ss.Sparsifier(model, replace(CONFIG, target=0.4, budget="macs"), example_inputs=images)
    before = sparsifier.plan()
    model.add_module("first", checkpoint_wrapper(model.first))
    assert sparsifier.plan() == before


def test_a_target_that_a_larger_network_rules_out_is_refused() -> None:
    model = Nested()
    sparsifier = sparsifier_with_penalty(model)
    model.rest[-1] = nn.Linear(16, 10_000)
    with pytest.raises(ValueError, match=r"target .* cannot be reached"):
        sparsifier.plan()


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
        sparsifier.end_epoch()


def test_recomputed_activations_change_no_layer() -> None:
    model = Nested()
    sparsifier = sparsifier_with_penalty(model)
    before = sparsifier.penalty()
    model.add_module("first", checkpoint_wrapper(model.first))
    assert torch.equal(sparsifier.penalty(), before)
    model.rest[0] = checkpoint_wrapper(model.rest[0])
    assert torch.equal(sparsifier.penalty(), before)


@pytest.mark.parametrize("block", [0, 1])
def test_layers_of_one_name_in_several_blocks_are_all_looked_after(block: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Conv2d(8, 8, 1)) for _ in range(2)))
    sparsifier = sparsifier_with_penalty(model)
    model.get_submodule(f"{block}").add_module("0", nn.Conv2d(8, 8, 1))
    with pytest.raises(ValueError, match=rf"layer '{block}\.0' has been replaced in the model"):
        sparsifier.end_epoch()
