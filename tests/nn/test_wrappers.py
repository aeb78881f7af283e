"""A layer has one name, whichever parts of its network `torch.compile`, `DataParallel` and their like hold."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from data_parallel import parallel
from lightning.fabric import Fabric
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper

import strucspars as ss
from strucspars.nn.names import bare_modules, bare_state_names, unwrapped

Wrap = Callable[[nn.Module], nn.Module]


def compiled(model: nn.Module) -> nn.Module:
    return cast(nn.Module, torch.compile(model, backend="eager"))


WRAPPERS: list[Wrap] = [
    compiled,
    parallel,
    lambda model: compiled(parallel(model)),
    checkpoint_wrapper,
    lambda model: parallel(checkpoint_wrapper(offload_wrapper(model))),
]
NAMES = ["compiled", "parallel", "compiled-parallel", "recomputed", "parallel-recomputed-offloaded"]
IMAGES = torch.randn(2, 8, 6, 6, generator=torch.Generator().manual_seed(0))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Conv2d(8, 16, 1), nn.ReLU(), nn.Sequential(nn.Conv2d(16, 8, 1)))
    return nn.Sequential(block, nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3))


def wrapped_in_parts(wrap: Wrap) -> nn.Sequential:
    """A block, a block inside of it, and a single layer."""
    block, norm, layer = network()
    assert isinstance(block, nn.Sequential)
    block[2] = wrap(block[2])
    return nn.Sequential(wrap(block), norm, wrap(layer))


def wrapped_everywhere(wrap: Wrap) -> nn.Module:
    return wrap(wrapped_in_parts(wrap))


BUILDERS = [wrapped_in_parts, wrapped_everywhere]
wrapped = pytest.mark.parametrize("build", BUILDERS)
in_each = pytest.mark.parametrize("wrap", WRAPPERS, ids=NAMES)


@wrapped
@in_each
def test_modules_and_states_have_the_names_of_the_bare_network(build: Callable[[Wrap], nn.Module], wrap: Wrap) -> None:
    model = build(wrap)
    kinds = [(name, type(module)) for name, module in bare_modules(model)]
    assert kinds == [(name, type(module)) for name, module in network().named_modules()]
    assert list(bare_state_names(model)) == list(model.state_dict())
    assert list(bare_state_names(model).values()) == list(network().state_dict())


def test_a_shared_wrapper_has_all_its_names() -> None:
    wrapper = parallel(nn.Conv2d(4, 4, 1))
    model = nn.Sequential(wrapper, nn.Sequential(wrapper))
    assert [name for name, _ in bare_modules(model)] == ["", "0", "1"]
    assert [name for name, _ in bare_modules(model, remove_duplicate=False)] == ["", "0", "1", "1.0"]
    assert set(bare_state_names(model).values()) == {"0.weight", "0.bias", "1.0.weight", "1.0.bias"}


def test_modules_that_are_only_called_like_a_wrappers_keep_their_names() -> None:
    model = nn.ModuleDict({"module": nn.ModuleDict({"_orig_mod": nn.Linear(2, 2)})})
    assert [name for name, _ in bare_modules(model)] == ["", "module", "module._orig_mod"]
    assert list(bare_state_names(model).values()) == list(model.state_dict())


@wrapped
@in_each
def test_a_plan_is_the_bare_networks_and_fits_both(build: Callable[[Wrap], nn.Module], wrap: Wrap) -> None:
    model, bare = build(wrap), network()
    plan = ss.one_shot_plan(model, target=0.4)
    assert plan == ss.one_shot_plan(bare, target=0.4)
    assert sorted(plan.layers) == ["0.0", "0.2.0", "2"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ss.convert_(ss.mask_(model, plan, optimizer), plan, optimizer)
    ss.convert_(bare, plan)
    assert ss.model_plan(model) == ss.model_plan(bare)
    states = bare_state_names(model)
    torch.testing.assert_close({states[key]: value for key, value in model.state_dict().items()}, bare.state_dict())


@wrapped
@in_each
def test_a_plan_that_names_the_wrappers_fits_too(build: Callable[[Wrap], nn.Module], wrap: Wrap) -> None:
    model = build(wrap)
    plan = ss.one_shot_plan(model, target=0.4)
    names = {module: name for name, module in model.named_modules()}
    full = replace(
        plan, layers={names[module]: plan.layers[name] for name, module in bare_modules(model) if name in plan.layers}
    )
    assert full.layers.keys() != plan.layers.keys()
    assert ss.count_macs(model, IMAGES, full) == ss.count_macs(network(), IMAGES, plan)
    ss.convert_(model, full)
    assert ss.model_plan(model).layers.keys() == {name for name in plan.layers if plan.layers[name].group_level > 1}


@wrapped
@in_each
def test_sparse_training_knows_the_layers_by_their_own_names(build: Callable[[Wrap], nn.Module], wrap: Wrap) -> None:
    config = ss.SparsifyConfig(target=0.2, epochs=20, exclude=("2",))
    sparsifier = ss.Sparsifier(build(wrap), config, example_inputs=IMAGES)
    bare = ss.Sparsifier(network(), config, example_inputs=IMAGES)
    assert list(sparsifier.state_dict()["layers"]) == ["0.0", "0.2.0"]
    bare.load_state_dict(sparsifier.state_dict())
    assert sparsifier.plan() == bare.plan()


@wrapped
@in_each
def test_counts_and_tables_are_those_of_the_bare_network(build: Callable[[Wrap], nn.Module], wrap: Wrap) -> None:
    model, bare = build(wrap), network()
    plan = ss.one_shot_plan(bare, target=0.4)
    assert str(ss.summary(model, IMAGES, plan)) == str(ss.summary(bare, IMAGES, plan))
    for each in (model, bare):
        ss.convert_(each, plan)
    assert ss.count_macs(model, IMAGES) == ss.count_macs(bare, IMAGES)
    assert str(ss.summary(model, IMAGES)) == str(ss.summary(bare, IMAGES))


def test_a_wrapped_layer_whose_weight_its_parent_reads_is_left_alone() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model.linear1 = parallel(model.linear1)  # type: ignore[assignment]  # what users of it do
    selection = ss.select_layers(model, ss.SparsifyConfig(layer_types=("Linear",)))
    reasons = {layer.name: layer.reason for layer in selection.skipped}
    assert "TransformerEncoderLayer computes with its weight itself" in reasons["linear1"]


def set_up(model: nn.Module, precision: Any = "32-true") -> nn.Module:
    """What Fabric trains with."""
    return cast(nn.Module, Fabric(accelerator="cpu", devices=1, precision=precision).setup_module(model))


@wrapped
@in_each
def test_files_of_wrapped_networks_are_the_bare_networks(
    build: Callable[[Wrap], nn.Module], wrap: Wrap, tmp_path: Path
) -> None:
    check_files_fit_both(build(wrap), build(wrap), tmp_path)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "64-true"])
def test_files_of_networks_that_fabric_has_set_up_are_the_bare_networks(precision: str, tmp_path: Path) -> None:
    check_files_fit_both(set_up(network(), precision), set_up(network(), precision), tmp_path)


def check_files_fit_both(model: nn.Module, fresh: nn.Module, folder: Path) -> None:
    plan = ss.one_shot_plan(model, target=0.3)
    assert list(plan.layers) == ["0.0", "0.2.0", "2"]
    ss.save(ss.convert_(model, plan), folder / "small.safetensors")
    bare = ss.load(folder / "small.safetensors", network()).eval()
    with torch.no_grad():
        scores = model.eval()(IMAGES)
        assert torch.equal(ss.load(folder / "small.safetensors", fresh).eval()(IMAGES), scores)
        torch.testing.assert_close(bare(IMAGES), scores.float(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(("precision", "is_taken_off"), [("32-true", True), ("bf16-true", False)])
def test_what_fabric_has_set_up_is_taken_off_unless_it_changes_the_precision(
    precision: str, is_taken_off: bool
) -> None:
    model = network().eval()
    assert (unwrapped(set_up(model, precision)) is model) == is_taken_off


def test_a_network_that_fabric_has_set_up_folds_as_the_bare_one() -> None:
    model = network().eval()
    ss.convert_(model, ss.one_shot_plan(model, target=0.3))
    folded = ss.fold(set_up(model), IMAGES)
    assert ss.fold_report(folded) == ss.fold_report(ss.fold(model, IMAGES))
