"""What PyTorch does to models works on a converted ResNet-50, and changes nothing."""

import copy
from pathlib import Path

import pytest
import torch
import torchvision
from torch import nn
from torch_warnings import SCRIPTING_WARNS
from torchvision.models.feature_extraction import create_feature_extractor

import strucspars as ss

IMAGES = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def shared_network() -> nn.Module:
    """A ResNet-50 with nearly every layer grouped, in learned orders, and batch norms that do something."""
    torch.manual_seed(0)
    model: nn.Module = torchvision.models.resnet50(weights=None).eval()
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith(("bias", "running_mean")):
                tensor.normal_(std=0.2)
            elif tensor.is_floating_point() and tensor.dim() < 2:
                tensor.uniform_(0.5, 1.5)
    ss.convert_(model, ss.one_shot_plan(model, target=0.8))
    assert sum(isinstance(module, ss.ShuffledGroupConv2d) for module in model.modules()) > 40
    return model


@pytest.fixture
def network(shared_network: nn.Module) -> nn.Module:
    """A copy that a test may change."""
    return copy.deepcopy(shared_network)


@pytest.fixture(scope="module")
def scores(shared_network: nn.Module) -> torch.Tensor:
    """What the network computes without any transform; different for the two images."""
    with torch.no_grad():
        computed: torch.Tensor = shared_network(IMAGES)
    assert not torch.allclose(computed[0], computed[1], rtol=1e-2)
    return computed


def assert_same(computed: torch.Tensor, scores: torch.Tensor) -> None:
    torch.testing.assert_close(computed, scores, rtol=1e-4, atol=1e-5 * scores.abs().max().item())


def test_a_compiled_network_is_one_graph_and_computes_the_same(network: nn.Module, scores: torch.Tensor) -> None:
    compiled = torch.compile(network, fullgraph=True, backend="aot_eager")
    computed = compiled(IMAGES)
    assert_same(computed, scores)
    computed.sum().backward()
    compiled_gradient = network.get_parameter("layer3.2.conv2.weight").grad
    network.zero_grad()
    network(IMAGES).sum().backward()
    gradient = network.get_parameter("layer3.2.conv2.weight").grad
    assert compiled_gradient is not None
    assert gradient is not None
    assert_same(compiled_gradient, gradient)


def test_an_exported_network_computes_the_same(network: nn.Module, scores: torch.Tensor) -> None:
    exported = torch.export.export(network, (IMAGES,))
    assert_same(exported.module()(IMAGES), scores)


def test_an_exported_network_takes_batches_of_any_size(network: nn.Module, scores: torch.Tensor) -> None:
    batches = {"x": {0: torch.export.Dim("batch")}}
    exported = torch.export.export(network, (IMAGES,), dynamic_shapes=batches)
    assert_same(exported.module()(IMAGES.repeat(2, 1, 1, 1)), scores.repeat(2, 1))


@SCRIPTING_WARNS
def test_a_scripted_network_computes_the_same_also_from_its_file(
    network: nn.Module, scores: torch.Tensor, tmp_path: Path
) -> None:
    scripted = torch.jit.script(network)
    scripted.save(tmp_path / "network.pt")  # type: ignore[no-untyped-call]  # untyped in torch
    loaded = torch.jit.load(tmp_path / "network.pt")  # type: ignore[no-untyped-call]  # untyped in torch
    with torch.no_grad():
        assert_same(scripted(IMAGES), scores)
        assert_same(loaded(IMAGES), scores)


def test_a_traced_network_computes_the_same(network: nn.Module, scores: torch.Tensor) -> None:
    assert_same(torch.fx.symbolic_trace(network)(IMAGES), scores)


def test_features_can_be_taken_out_of_the_middle(network: nn.Module, scores: torch.Tensor) -> None:
    computed = create_feature_extractor(network, {"layer3": "features", "fc": "scores"})(IMAGES)
    assert computed["features"].shape == (2, 1024, 4, 4)
    assert_same(computed["scores"], scores)


def test_a_copy_computes_the_same_and_shares_nothing(network: nn.Module, scores: torch.Tensor) -> None:
    duplicate = copy.deepcopy(network)
    with torch.no_grad():
        assert_same(duplicate(IMAGES), scores)
        for tensor in (*duplicate.parameters(), *duplicate.buffers()):
            tensor.zero_()
        assert_same(network(IMAGES), scores)


def test_channels_last_computes_the_same(network: nn.Module, scores: torch.Tensor) -> None:
    channels_last = network.to(memory_format=torch.channels_last)
    with torch.no_grad():
        assert_same(channels_last(IMAGES.to(memory_format=torch.channels_last)), scores)


def test_bfloat16_computes_nearly_the_same(network: nn.Module, scores: torch.Tensor) -> None:
    with torch.no_grad():
        computed = network.to(torch.bfloat16)(IMAGES.to(torch.bfloat16))
    assert computed.dtype == torch.bfloat16
    assert nn.functional.cosine_similarity(computed.float(), scores).min() > 0.99


def test_autocast_computes_nearly_the_same(network: nn.Module, scores: torch.Tensor) -> None:
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        computed = network(IMAGES)
    assert nn.functional.cosine_similarity(computed.float(), scores).min() > 0.99


def test_a_functional_call_computes_the_same_from_the_given_tensors(network: nn.Module, scores: torch.Tensor) -> None:
    tensors = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    with torch.no_grad():
        for tensor in (*network.parameters(), *network.buffers()):
            tensor.zero_()
        assert_same(torch.func.functional_call(network, tensors, (IMAGES,)), scores)
