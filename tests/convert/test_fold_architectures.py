"""Networks that others wrote, every layer grouped in random orders: folding keeps their function."""

from collections.abc import Callable

import numpy as np
import pytest
import timm
import torch
import torchvision
from torch import nn

import strucspars as ss
from strucspars.cost.gathers import FoldReport
from strucspars.models.cifar import CifarResNet, PreactivationResNet

MAX_LEVEL = 4


def from_torchvision(name: str, **options: object) -> Callable[[], nn.Module]:
    return lambda: torchvision.models.get_model(name, weights=None, **options)


# Gathers that remain with independent random orders. Two grouped layers in a row need one; of all sides that meet one
# residual stream, one finds its order.
# Per stage of n bottlenecks: 2 n inside the blocks, and on the stream n + 1 writers, n - 1 readers, 2 readers of the
# next stage, less 1; the stem's output has 2 readers, less 1.
RESNET_50 = 2 * 16 + (4 + 2 + 2 - 1) + (5 + 3 + 2 - 1) + (7 + 5 + 2 - 1) + (4 + 2 - 1) + 1
# Per dense layer, one inside and one to read the concatenation; the very first reads the stem, which suits it. One to
# read for each transition.
DENSENET_121 = 2 * 58 - 1 + 3
NETWORKS: dict[str, tuple[Callable[[], nn.Module], int | None]] = {
    "resnet18": (from_torchvision("resnet18"), None),
    "resnet50": (from_torchvision("resnet50"), RESNET_50),
    "densenet121": (from_torchvision("densenet121"), DENSENET_121),
    "mobilenet_v2": (from_torchvision("mobilenet_v2"), None),
    "efficientnet_b0": (from_torchvision("efficientnet_b0"), None),
    "regnet_y_400mf": (from_torchvision("regnet_y_400mf"), None),
    "shufflenet_v2_x0_5": (from_torchvision("shufflenet_v2_x0_5"), None),
    "googlenet": (from_torchvision("googlenet", aux_logits=False, init_weights=False), None),
    "resnext50_32x4d": (from_torchvision("resnext50_32x4d"), RESNET_50),
    "preactivation_resnet": (lambda: PreactivationResNet(20), None),
    "timm-cspresnet50": (lambda: timm.create_model("cspresnet50", pretrained=False), None),
    "timm-repvgg_a0": (lambda: timm.create_model("repvgg_a0", pretrained=False), None),
    "cifar_resnet": (lambda: CifarResNet(20), None),
}


def randomised(model: nn.Module) -> nn.Module:
    """Random biases, scales and statistics: with zeros and ones, wrong orders go unnoticed."""
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith(("bias", "running_mean")):
                tensor.normal_(std=0.2)
            elif tensor.is_floating_point() and tensor.dim() < 2:
                tensor.uniform_(0.5, 1.5)
    return model


def random_plan(model: nn.Module, filter_fn: Callable[[nn.Module, str], bool] | None = None) -> ss.GroupingPlan:
    """Every layer at the largest level up to 8 groups, in random orders."""
    generator = np.random.default_rng(0)
    layers = {}
    for selected in ss.select_layers(model, filter_fn=filter_fn).layers:
        out_channels, in_channels = selected.weight_shape[:2]
        layers[selected.name] = ss.LayerPlan(
            group_level=min(MAX_LEVEL, ss.core.max_group_level(out_channels, in_channels)),
            out_perm=generator.permutation(out_channels),
            in_perm=generator.permutation(in_channels),
            weight_shape=selected.weight_shape,
        )
    return ss.GroupingPlan(layers)


def assert_folds(model: nn.Module, *, size: int = 64) -> FoldReport:
    """The graph is traced and puts out what the model does, for another batch than the example."""
    folded = ss.fold(model, torch.randn(1, 3, size, size))
    report = ss.fold_report(folded)
    assert report.untraced_reason == ""
    images = torch.randn(2, 3, size, size)
    with torch.no_grad():
        outputs, expected = folded(images), model.eval()(images)
    torch.testing.assert_close(outputs, expected, rtol=0, atol=1e-4 * expected.abs().max().item())
    torch.testing.assert_close(outputs.argmax(1), expected.argmax(1))
    return report


@pytest.mark.parametrize("name", NETWORKS)
def test_folding_keeps_the_function_of_a_network_grouped_throughout(name: str) -> None:
    torch.manual_seed(0)
    build, gathers = NETWORKS[name]
    model = randomised(build())
    plan = random_plan(model)
    report = assert_folds(ss.convert_(model, plan), size=32 if "resnet" in name else 64)
    assert len(report.gathers) < 2 * len(plan.layers)
    if gathers is not None:
        assert len(report.gathers) == gathers


def test_a_resnet_with_grouped_3x3_and_dense_1x1_convolutions_keeps_no_gather_and_no_norm() -> None:
    torch.manual_seed(0)
    model = randomised(torchvision.models.resnet50(weights=None))
    plan = random_plan(model, lambda module, name: name.endswith("conv2"))
    assert len(plan.layers) == 16
    report = assert_folds(ss.convert_(model, plan))
    assert report.gathers == ()
    assert report.num_kept_batch_norms == 0
    assert str(report) == "no gathers remain"


def test_norms_before_convolutions_stay_where_no_layer_precedes_them() -> None:
    torch.manual_seed(0)
    report = assert_folds(randomised(PreactivationResNet(20)), size=32)
    # One per residual block and the last: the other two of a block follow a convolution.
    assert report.num_kept_batch_norms == 6 + 1
    assert report.gathers == ()
