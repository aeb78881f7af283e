"""Modules of PyTorch around grouped layers: what is inside is folded, or counted as left."""

import copy
from collections.abc import Callable, Iterator
from typing import cast

import pytest
import torch
import torchvision
from data_parallel import parallel
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torchvision.models.feature_extraction import create_feature_extractor

import strucspars as ss
from strucspars.nn.names import unwrap_children_, unwrapped

IMAGES = torch.randn(2, 8, 8, 8, generator=torch.Generator().manual_seed(1))


def network() -> nn.Sequential:
    layers = [nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.BatchNorm2d(32)]
    model = nn.Sequential(nn.Sequential(*layers), nn.ReLU(), nn.Conv2d(32, 5, 1))
    ss.convert_(model, ss.one_shot_plan(model, target=0.3)).eval()
    return model


def compiled(model: nn.Module) -> nn.Module:
    wrapper = cast(nn.Module, torch.compile(model, backend="eager"))
    with torch.no_grad():
        wrapper(IMAGES)
    return wrapper


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    torch.manual_seed(0)
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def check_folds_alike(wrapper: nn.Module, model: nn.Module) -> None:
    folded = ss.fold(wrapper, IMAGES)
    assert ss.fold_report(folded) == ss.fold_report(ss.fold(model, IMAGES))
    assert not any(isinstance(module, ss.ShuffledGroupConv2d) for module in folded.modules())
    with torch.no_grad():
        torch.testing.assert_close(folded(IMAGES), model(IMAGES), rtol=1e-4, atol=1e-5)


WRAPPERS: list[Callable[[nn.Module], nn.Module]] = [
    compiled,
    parallel,
    lambda model: parallel(compiled(model)),
    lambda model: cast(nn.Module, torch.compile(parallel(model), backend="eager")),
]


@pytest.mark.parametrize("wrap", WRAPPERS, ids=["compiled", "parallel", "parallel-compiled", "compiled-parallel"])
def test_a_wrapped_network_folds_as_the_bare_one(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model = network()
    check_folds_alike(wrap(model), model)


@pytest.mark.usefixtures("_one_process")
def test_a_distributed_network_folds_as_the_bare_one() -> None:
    model = network()
    check_folds_alike(nn.parallel.DistributedDataParallel(model), model)


@pytest.mark.parametrize(
    "wrap",
    [parallel, lambda part: torch.compile(part, backend="eager"), checkpoint_wrapper],
    ids=["parallel", "compiled", "recomputed"],
)
def test_a_network_with_a_wrapped_part_folds_as_the_bare_one(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model = network()
    partly = copy.deepcopy(model)
    partly[0] = wrap(partly[0])
    check_folds_alike(partly, model)
    assert type(partly[0]) is not nn.Sequential


def test_a_compiled_graph_that_is_folded_comes_back_as_it_was() -> None:
    folded = ss.fold(network(), IMAGES)
    assert ss.fold_report(ss.fold(compiled(folded), IMAGES)) == ss.fold_report(folded)


def test_a_wrapper_with_a_hook_keeps_what_the_hook_does() -> None:
    model = network()
    wrapper = checkpoint_wrapper(model)
    wrapper.register_forward_hook(lambda module, args, output: output + 1)
    assert unwrapped(wrapper) is wrapper
    with torch.no_grad():
        torch.testing.assert_close(ss.fold(wrapper, IMAGES)(IMAGES), model(IMAGES) + 1)


def test_a_wrapper_with_a_hook_before_its_call_keeps_what_that_does() -> None:
    model = network()
    wrapper = checkpoint_wrapper(model)
    wrapper.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    assert unwrapped(wrapper) is wrapper
    with torch.no_grad():
        torch.testing.assert_close(ss.fold(wrapper, IMAGES)(IMAGES), model(IMAGES + 1))


def test_a_shared_wrapper_is_taken_off_under_all_its_names() -> None:
    layer = nn.Conv2d(8, 8, 1)
    wrapper = parallel(layer)
    model = nn.Sequential(wrapper, nn.ReLU(), wrapper)
    unwrap_children_(model)
    assert model[0] is layer
    assert model[2] is layer


def test_grouped_layers_inside_a_module_of_pytorch_are_folded() -> None:
    model = nn.TransformerDecoderLayer(32, 4, 64, batch_first=True).eval()
    rules = ss.SparsifyConfig(target=0.1, layer_types=("Linear",))
    ss.convert_(model, ss.one_shot_plan(model, rules))
    inputs = torch.randn(2, 5, 32), torch.randn(2, 7, 32)
    folded = ss.fold(model, inputs)
    report = ss.fold_report(folded)
    assert report.untraced_reason == ""
    assert report.gathers
    selects = [node for node in folded.graph.nodes if node.target is torch.index_select]
    assert len(selects) == len(report.gathers)
    assert not any(isinstance(module, nn.TransformerDecoderLayer) for module in folded.modules())
    with torch.no_grad():
        torch.testing.assert_close(folded(*inputs), model(*inputs), rtol=1e-4, atol=1e-5)


def test_a_feature_extractor_of_torchvision_is_summarised_and_folded() -> None:
    images = torch.randn(1, 3, 32, 32)
    nodes = {"layer2": "middle", "layer4": "last"}
    model = create_feature_extractor(torchvision.models.resnet18(weights=None), nodes).eval()
    assert ss.summary(model, images).gathers == ()
    ss.convert_(model, ss.one_shot_plan(model, 0.3))
    folded = ss.fold(model, images)
    assert ss.fold_report(folded).untraced_reason == ""
    assert ss.fold_report(folded).num_kept_batch_norms == 0
    with torch.no_grad():
        torch.testing.assert_close(folded(images), model(images), rtol=1e-3, atol=1e-4)


def test_a_graph_of_another_library_carries_no_report() -> None:
    model = create_feature_extractor(torchvision.models.resnet18(weights=None), ["layer1"])
    with pytest.raises(ValueError, match="carries no report of fold"):
        ss.fold_report(model)
