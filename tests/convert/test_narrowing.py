"""Networks that lose channels compute what they do with these channels held at zero."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torchvision
from hypothesis import given, settings
from hypothesis import strategies as st
from narrow_plans import narrow_plan
from random_networks import RandomNetwork, random_scales_
from torch import nn

import strucspars as ss
from strucspars.convert.conversion import convert_, mask_
from strucspars.core.narrowing import KeptChannels
from strucspars.models.cifar import CifarResNet, PreactivationResNet
from strucspars.nn.groupable import select_layers
from strucspars.nn.layers import is_grouped


def torchvision_model(name: str) -> Callable[[], nn.Module]:
    return lambda: torchvision.models.get_model(name, weights=None)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "resnet18": (torchvision_model("resnet18"), 64),
    "resnet50": (torchvision_model("resnet50"), 64),
    "mobilenet_v2": (torchvision_model("mobilenet_v2"), 64),
    "densenet121": (torchvision_model("densenet121"), 64),
    "regnet_y_400mf": (torchvision_model("regnet_y_400mf"), 64),
    "efficientnet_b0": (torchvision_model("efficientnet_b0"), 64),
    "vgg11_bn": (torchvision_model("vgg11_bn"), 64),
    "timm-mobilenetv3_small_050": (lambda: timm.create_model("mobilenetv3_small_050"), 64),
    "cifar-resnet20": (lambda: CifarResNet(20), 32),
    "preactivation-resnet20": (lambda: PreactivationResNet(20), 32),
}


def built(name: str) -> tuple[nn.Module, torch.Tensor]:
    """The network in double precision with random scales and statistics, and images."""
    torch.manual_seed(0)
    build, size = NETWORKS[name]
    model = build().double().eval()
    with torch.no_grad():
        for key, tensor in (*model.named_parameters(), *model.named_buffers()):
            if key.endswith(("bias", "running_mean")):
                tensor.normal_(std=0.2)
            elif tensor.is_floating_point() and tensor.dim() < 2:
                tensor.uniform_(0.5, 1.5)
    return model, torch.randn(2, 3, size, size, dtype=torch.float64)


def grouped_plan(model: nn.Module, seed: int = 0) -> ss.GroupingPlan:
    """Random groups in about half of the layers."""
    generator, layers = np.random.default_rng(seed), {}
    for layer in select_layers(model).layers:
        out_channels, in_channels = layer.weight_shape[:2]
        if generator.integers(2):
            layers[layer.name] = ss.LayerPlan(
                group_level=int(generator.integers(2, min(layer.largest_level, 3) + 1)),
                out_perm=generator.permutation(out_channels),
                in_perm=generator.permutation(in_channels),
                weight_shape=layer.weight_shape,
            )
    return ss.GroupingPlan(layers)


def outputs_of(model: nn.Module, images: torch.Tensor) -> Any:
    with torch.no_grad():
        return model(images)


@pytest.mark.parametrize("with_groups", [False, True])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_narrower_network_computes_what_the_masked_one_does(name: str, with_groups: bool) -> None:
    model, images = built(name)
    plan = narrow_plan(model, images, grouped_plan(model) if with_groups else None)
    narrower = [each for each in plan.kept_channels.values() if each.is_narrower]
    assert len(narrower) > 5
    masked = outputs_of(mask_(copy.deepcopy(model), plan), images)
    small = convert_(copy.deepcopy(model), plan, example_inputs=images)
    torch.testing.assert_close(outputs_of(small, images), masked, rtol=1e-9, atol=1e-9 * masked.abs().max().item())
    assert (outputs_of(model, images) - masked).abs().max() > 1e-3 * masked.abs().max()
    assert any(map(is_grouped, small.modules())) == with_groups
    assert sum(map(torch.numel, small.parameters())) < 0.8 * sum(map(torch.numel, model.parameters()))


@settings(max_examples=25)
@given(st.integers(0, 1_000_000))
def test_any_network_can_lose_what_the_graph_says(seed: int) -> None:
    torch.manual_seed(seed)
    model = RandomNetwork(seed, converted=False)
    random_scales_(model.double().eval())
    images = torch.randn(2, model.in_channels, 4, 4, dtype=torch.float64)
    plan = narrow_plan(model, images, grouped_plan(model, seed), seed=seed)
    masked = outputs_of(mask_(copy.deepcopy(model), plan), images)
    small = convert_(copy.deepcopy(model), plan, example_inputs=images)
    torch.testing.assert_close(outputs_of(small, images), masked)
    folded = ss.fold(small, images)
    assert not ss.fold_report(folded).untraced_reason
    torch.testing.assert_close(outputs_of(folded, images), masked)


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2", "preactivation-resnet20"])
def test_masked_networks_train_as_narrower_ones_do(name: str) -> None:
    model, images = built(name)
    plan = narrow_plan(model, images, grouped_plan(model))
    optimizers = {}
    networks = {"masked": mask_, "small": convert_}
    trained = {}
    for form, change in networks.items():
        network = copy.deepcopy(model).train()
        optimizers[form] = torch.optim.SGD(network.parameters(), lr=1e-3, momentum=0.9, weight_decay=1e-2)
        for step in range(3):
            if step == 1:
                change(network, plan, optimizers[form])
            for dropout in (module for module in network.modules() if isinstance(module, nn.Dropout)):
                dropout.p = 0.0
            optimizers[form].zero_grad()
            network(images).square().mean().backward()
            optimizers[form].step()
        trained[form] = network.eval()
    converted = convert_(trained["masked"], plan)
    expected = outputs_of(trained["small"], images)
    torch.testing.assert_close(outputs_of(converted, images), expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", ["resnet18", "regnet_y_400mf", "efficientnet_b0"])
@pytest.mark.parametrize("with_groups", [False, True])
def test_a_narrower_network_is_saved_loaded_and_read_back(name: str, with_groups: bool, tmp_path: Path) -> None:
    model, images = built(name)
    plan = narrow_plan(model, images, grouped_plan(model) if with_groups else None)
    small = convert_(copy.deepcopy(model), plan)
    # A model knows what it lost: with its plan, or without.
    for known in (plan, None):
        ss.save(small, tmp_path / "small.safetensors", plan=known)
        loaded = ss.load(tmp_path / "small.safetensors", NETWORKS[name][0]().double().eval())
        torch.testing.assert_close(outputs_of(loaded, images), outputs_of(small, images), rtol=0, atol=0)
    read = ss.model_plan(small)
    assert read.narrowed == plan.narrowed
    assert read.kept_channels == plan.kept_channels
    parameters = [sum(map(torch.numel, each.parameters())) for each in (small, model)]
    assert read.removed_param_fraction == pytest.approx(1 - parameters[0] / parameters[1])
    again = convert_(copy.deepcopy(model), read)
    torch.testing.assert_close(outputs_of(again, images), outputs_of(small, images), rtol=0, atol=0)
    # A plan that is there already changes nothing.
    convert_(small, plan)
    torch.testing.assert_close(outputs_of(again, images), outputs_of(small, images), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["resnet18", "regnet_y_400mf", "mobilenet_v2", "densenet121"])
def test_counts_by_the_plan_are_those_of_the_narrower_network(name: str) -> None:
    model, images = built(name)
    plan = narrow_plan(model, images, grouped_plan(model))
    small = convert_(copy.deepcopy(model), plan)
    planned, found, dense = (
        ss.count_macs(model, images, plan),
        ss.count_macs(small, images),
        ss.count_macs(model, images),
    )
    assert planned == found
    assert planned.params == sum(map(torch.numel, small.parameters()))
    before, after = ss.summary(model, images, plan), ss.summary(small, images)
    for total in (before, after):
        assert total.params.before == dense.params
        assert total.params.after == found.params
        assert total.macs is not None
        assert total.macs.before == dense.macs
        assert total.macs.after == found.macs
        assert total.paper_flops is not None
        assert total.paper_flops.before == dense.paper_flops
        assert total.paper_flops.after == found.paper_flops


def test_a_narrower_network_is_exported(tmp_path: Path) -> None:
    for name in ("resnet18", "efficientnet_b0"):
        model, images = built(name)
        plan = narrow_plan(model, images, grouped_plan(model))
        small = convert_(model.float(), plan)
        ss.export(small, tmp_path / f"{name}.onnx", example_inputs=images.float())
        (found,) = ss.OnnxRunner(tmp_path / f"{name}.onnx")(images.float().numpy())
        expected = outputs_of(small, images.float()).numpy()
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())


def small_network() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1))


SMALL_IMAGES = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))


def test_a_plan_for_another_width_is_refused_before_anything_changes() -> None:
    plan = narrow_plan(small_network(), SMALL_IMAGES)
    other = nn.Sequential(nn.Conv2d(3, 12, 1), nn.BatchNorm2d(12), nn.ReLU(), nn.Conv2d(12, 4, 1))
    with pytest.raises(ValueError, match="module '0': it has 12 outputs and 3 inputs, but the plan was made for 8"):
        convert_(other, plan)
    assert other.get_parameter("0.weight").shape[0] == 12
    with pytest.raises(ValueError, match="module '3' of the plan is not in the network"):
        mask_(nn.Sequential(*list(small_network())[:3]), plan)


def test_channels_that_are_gone_already_are_not_lost_twice() -> None:
    model = small_network()
    plan = narrow_plan(model, SMALL_IMAGES)
    small = convert_(model, plan)
    kept = {"0": KeptChannels(8, (7,))}
    other = ss.GroupingPlan({}, kept_channels=kept, narrowed=plan.narrowed)
    with pytest.raises(ValueError, match="module '0' has lost channels already, and not those of the plan"):
        convert_(small, other)


def test_an_optimizer_that_missed_the_loss_of_channels_is_refused() -> None:
    model = small_network()
    plan, optimizer = narrow_plan(model, SMALL_IMAGES), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(SMALL_IMAGES).sum().backward()
    optimizer.step()
    convert_(model, plan)
    with pytest.raises(ValueError, match="module '0' has lost channels already, but the optimizer remembers 8"):
        convert_(model, plan, optimizer)


def test_groups_that_the_network_has_lose_evenly() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1, groups=2), nn.Conv2d(8, 4, 1))
    plan = narrow_plan(model, SMALL_IMAGES)
    uneven = ss.GroupingPlan(
        {}, kept_channels=dict(plan.kept_channels) | {"0": KeptChannels(8, (0, 1, 2, 4))}, narrowed=plan.narrowed
    )
    with pytest.raises(ValueError, match=r"module '1': its 2 groups must keep the same number .* \[3, 1\]"):
        convert_(model, uneven)


class FixedWidth(nn.Module):
    """Code that needs eight channels, which the plan does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = small_network()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor = self.layers[3](self.layers[0](images) + torch.ones(8, 1, 1))
        return features


def test_code_that_needs_all_channels_is_found_by_running() -> None:
    plan = narrow_plan(small_network(), SMALL_IMAGES)
    narrowed = {f"layers.{name}": sides for name, sides in plan.narrowed.items()}
    plan = ss.GroupingPlan({}, kept_channels=plan.kept_channels, narrowed=narrowed)
    model = FixedWidth().eval()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"without the channels that go: .* RuntimeError"):
        convert_(model, plan, example_inputs=SMALL_IMAGES)
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
