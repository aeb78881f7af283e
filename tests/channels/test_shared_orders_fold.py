"""Networks grouped with one order for each shared class: no gather is left on any of those."""

import copy
import math
from collections.abc import Callable

import pytest
import timm
import torch
import torchvision
from hypothesis import given, settings
from hypothesis import strategies as st
from random_networks import RandomNetwork, random_scales_
from shared_orders import Policy, shared_plan, shared_sides
from torch import nn
from torchvision.models.detection import backbone_utils

import strucspars as ss
from strucspars.channels.sharing import NetworkChannels, network_channels, one_shuffle, share_streams
from strucspars.cost.gathers import FoldReport
from strucspars.models.cifar import CifarResNet, PreactivationResNet

Build = Callable[[], nn.Module]


def from_torchvision(name: str, **options: object) -> Build:
    return lambda: torchvision.models.get_model(name, weights=None, **options)


def from_timm(name: str) -> Build:
    return lambda: timm.create_model(name, pretrained=False)


def vgg() -> nn.Module:
    """With a small classifier: that of the original has 120 million weights."""
    model: nn.Module = torchvision.models.vgg16_bn(weights=None, init_weights=False)
    model.classifier = nn.Linear(512 * 7 * 7, 10)
    return model


def pyramid_of_resnet() -> nn.Module:
    model: nn.Module = backbone_utils.resnet_fpn_backbone(backbone_name="resnet50", weights=None)
    return model


def pyramid_of_mobilenet() -> nn.Module:
    model: nn.Module = backbone_utils.mobilenet_backbone(backbone_name="mobilenet_v3_large", weights=None, fpn=True)
    return model


WITHOUT_AUXILIARY_HEADS = {"aux_logits": False, "init_weights": False}
# With the gathers that shared streams leave, and those of one shuffle between two streams, where they are easy to tell:
# one inside a basic block or a dense layer, two inside a bottleneck, or one.
NETWORKS: dict[str, tuple[Build, tuple[int, int] | None]] = {
    "resnet18": (from_torchvision("resnet18"), (8, 8)),
    "resnet50": (from_torchvision("resnet50"), (2 * 16, 16)),
    "wide_resnet50_2": (from_torchvision("wide_resnet50_2"), (2 * 16, 16)),
    # Its own groups fix both tensors inside a bottleneck.
    "resnext50_32x4d": (from_torchvision("resnext50_32x4d"), (2 * 16, 2 * 16)),
    "densenet121": (from_torchvision("densenet121"), (58, 58)),
    "densenet201": (from_torchvision("densenet201"), (98, 98)),
    "googlenet": (from_torchvision("googlenet", **WITHOUT_AUXILIARY_HEADS), None),
    "inception_v3": (from_torchvision("inception_v3", **WITHOUT_AUXILIARY_HEADS), None),
    "mobilenet_v2": (from_torchvision("mobilenet_v2"), None),
    "mobilenet_v3_small": (from_torchvision("mobilenet_v3_small"), None),
    "efficientnet_b0": (from_torchvision("efficientnet_b0"), None),
    "regnet_y_400mf": (from_torchvision("regnet_y_400mf"), None),
    "shufflenet_v2_x0_5": (from_torchvision("shufflenet_v2_x0_5"), None),
    "mnasnet0_5": (from_torchvision("mnasnet0_5"), None),
    "squeezenet1_1": (from_torchvision("squeezenet1_1"), None),
    # A row of layers from the images to the scores has no stream: nothing is shared.
    "vgg16_bn": (vgg, (11, 11)),
    "deeplabv3_resnet50": (from_torchvision("deeplabv3_resnet50", weights_backbone=None), None),
    "fcn_resnet50": (from_torchvision("fcn_resnet50", weights_backbone=None), (2 * 16, 16)),
    "pyramid of resnet50": (pyramid_of_resnet, None),
    "pyramid of mobilenet_v3_large": (pyramid_of_mobilenet, None),
    "timm-resnest14d": (from_timm("resnest14d"), None),
    # All channels are parts.
    "timm-res2net50_14w_8s": (from_timm("res2net50_14w_8s"), (0, 0)),
    "timm-dla34": (from_timm("dla34"), None),
    "timm-hrnet_w18_small": (from_timm("hrnet_w18_small"), None),
    "timm-cspdarknet53": (from_timm("cspdarknet53"), None),
    "timm-ese_vovnet19b_slim": (from_timm("ese_vovnet19b_slim"), None),
    # It takes slices of the channels.
    "timm-ghostnet_050": (from_timm("ghostnet_050"), None),
    "cifar_resnet": (lambda: CifarResNet(20), (9, 9)),
    "preactivation_resnet": (lambda: PreactivationResNet(20), (2 * 6, 6)),
}
LEAST_REMOVED = 0.4
SMALLEST_IMAGES = {"inception_v3": 75, "cifar_resnet": 32, "preactivation_resnet": 32}


def removed_fraction(model: nn.Module, plan: ss.GroupingPlan) -> float:
    """Of the weights of all convolutions."""
    present = sum(each.weight.numel() for each in model.modules() if isinstance(each, nn.modules.conv._ConvNd))
    return sum(math.prod(layer.weight_shape) * (1 - 1 / layer.num_groups) for layer in plan.layers.values()) / present


def folded_with(policy: Policy, model: nn.Module, channels: NetworkChannels, images: torch.Tensor) -> FoldReport:
    """The report on a network that is grouped with shared orders; no gather is on any of these."""
    sharing = policy(channels)
    plan = shared_plan(model, channels, sharing)
    assert removed_fraction(model, plan) >= LEAST_REMOVED
    report = ss.fold_report(ss.fold(ss.convert_(copy.deepcopy(model), plan), images))
    # Folding compares the graph with the network.
    assert report.untraced_reason == ""
    assert {gather.layer for gather in report.gathers} <= channels.sides.keys()
    left = {(gather.layer, gather.side) for gather in report.gathers}
    assert left.isdisjoint(shared_sides(channels, sharing))
    return report


@pytest.mark.parametrize("name", NETWORKS)
def test_no_gather_is_left_on_channels_that_share_an_order(name: str) -> None:
    build, expected = NETWORKS[name]
    torch.manual_seed(0)
    model = build().eval()
    random_scales_(model)
    size = SMALLEST_IMAGES.get(name, 64)
    images = torch.randn(1, 3, size, size)
    channels = network_channels(model, images)
    reports = [folded_with(policy, model, channels, images) for policy in (share_streams, one_shuffle)]
    assert reports[1].gathered_bytes <= reports[0].gathered_bytes
    if expected is not None:
        assert tuple(len(report.gathers) for report in reports) == expected


def dense_random_network(seed: int) -> RandomNetwork:
    """Some groups of its own, but no orders yet."""
    torch.manual_seed(seed)
    model = RandomNetwork(seed)
    for place, layer in enumerate(model.layers):
        if isinstance(layer, ss.ShuffledGroupConv2d):
            model.layers[place] = nn.Conv2d(layer.in_channels, layer.out_channels, 1)
    random_scales_(model)
    return model.eval()


@settings(max_examples=60)
@given(st.integers(0, 1_000_000), st.sampled_from([share_streams, one_shuffle]))
def test_layers_of_random_networks_between_shared_channels_keep_no_gather(seed: int, policy: Policy) -> None:
    model = dense_random_network(seed)
    images = torch.randn(2, model.in_channels, 4, 4)
    channels = network_channels(model, images)
    sharing = policy(channels)
    plan = shared_plan(model, channels, sharing, seed=seed)
    report = ss.fold_report(ss.fold(ss.convert_(model, plan), images))
    assert report.untraced_reason == ""
    shared = set(shared_sides(channels, sharing))
    for name in plan.layers:
        gathered = [gather.side for gather in report.gathers if gather.layer == name]
        num_shared = len({(name, "input"), (name, "output")} & shared)
        # Groups of single channels can be read in any order, but not written in another one: either side is gathered.
        assert len(gathered) <= 2 - num_shared, (gathered, channels.sides[name])
