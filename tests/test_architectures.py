"""Networks that others wrote, from selection to a loaded file: never is the function other than the masked one."""

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import nn
from torchvision.models.densenet import DenseNet
from torchvision.models.resnet import Bottleneck, ResNet

import strucspars as ss
from strucspars.convert.ablation import reordered_plan
from strucspars.nn.groupable import SelectedLayer
from strucspars.nn.layers import dense_weight

TARGET = 0.3
# Double precision leaves no room for errors that hide behind rounding.
RELATIVE_TOLERANCE = 1e-7


def from_torchvision(name: str, **options: object) -> Callable[[], nn.Module]:
    return lambda: torchvision.models.get_model(name, weights=None, **options)


def from_timm(name: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: timm.create_model(name, pretrained=False, **options)


# In eval mode the auxiliary heads are not called; without an explicit init_weights both warn of a changing default.
WITHOUT_AUXILIARY_HEADS = {"aux_logits": False, "init_weights": False}
# Untrained scores are all alike: with the usual threshold nothing would be detected, and nothing proved.
SMALL_DETECTOR = {"weights_backbone": None, "num_classes": 5, "min_size": 96, "max_size": 96, "box_score_thresh": 0.0}
FEW_PROPOSALS = {"rpn_pre_nms_top_n_test": 100, "rpn_post_nms_top_n_test": 50}
# Two blocks where the first one and the others differ, and one of each further stage.
FEW_BLOCKS = [2, 1, 1, 1]


def shallow_resnet(**options: int) -> Callable[[], nn.Module]:
    return lambda: ResNet(Bottleneck, FEW_BLOCKS, **options)


CLASSIFIERS: dict[str, Callable[[], nn.Module]] = {
    "densenet": lambda: DenseNet(block_config=(4, 4, 4, 4)),
    "efficientnet_b0": from_torchvision("efficientnet_b0"),
    "googlenet": from_torchvision("googlenet", **WITHOUT_AUXILIARY_HEADS),
    "inception_v3": from_torchvision("inception_v3", **WITHOUT_AUXILIARY_HEADS),
    "mobilenet_v2": from_torchvision("mobilenet_v2"),
    "regnet_y_400mf": from_torchvision("regnet_y_400mf"),
    "resnet": shallow_resnet(),
    "resnext": shallow_resnet(groups=32, width_per_group=4),
    "shufflenet_v2_x1_0": from_torchvision("shufflenet_v2_x1_0"),
    "squeezenet1_1": from_torchvision("squeezenet1_1"),
    "timm-convnext_atto": from_timm("convnext_atto"),
    "timm-cspresnet50": from_timm("cspresnet50"),
    "timm-dla46_c": from_timm("dla46_c"),
    "timm-ghostnet_050": from_timm("ghostnet_050"),
    "timm-hrnet_w18_small": from_timm("hrnet_w18_small"),
    "timm-mobilenetv3_small_050": from_timm("mobilenetv3_small_050"),
    "timm-repvgg_a0": from_timm("repvgg_a0"),
    "timm-res2net50_14w_8s": from_timm("res2net50_14w_8s", layers=FEW_BLOCKS),
}
SEGMENTATION = from_torchvision("deeplabv3_mobilenet_v3_large", weights_backbone=None, num_classes=5)
DETECTION = from_torchvision("fasterrcnn_mobilenet_v3_large_320_fpn", **SMALL_DETECTOR, **FEW_PROPOSALS)

# Inception's strides leave nothing of smaller images; HRNet and DLA need multiples of 32.
LARGE_IMAGES = torch.randn(2, 3, 80, 80, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
IMAGES = LARGE_IMAGES[:, :, :64, :64]
NEED_LARGE_IMAGES = {"inception_v3"}


def random_network(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """Random biases, scales and batch-norm statistics: with zeros and ones, wrong orders go unnoticed."""
    torch.manual_seed(seed)
    model = build().double().eval()
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith(("bias", "running_mean")):
                tensor.normal_(std=0.2)
            elif tensor.is_floating_point() and tensor.dim() < 2:
                tensor.uniform_(0.5, 1.5)
    return model


def one_shot_plan(model: nn.Module) -> ss.GroupingPlan:
    """The plan at 30 %, or at the most that the network allows."""
    layers = ss.select_layers(model).layers
    return ss.one_shot_plan(model, min(TARGET, largest_removed_fraction(model, layers)))


def largest_removed_fraction(model: nn.Module, layers: Sequence[SelectedLayer]) -> float:
    removed = sum(layer.weight.numel() * (1 - 1 / ss.core.num_groups(layer.largest_level)) for layer in layers)
    return removed / sum(parameter.numel() for parameter in model.parameters())


def all_grouped_at_random(plan: ss.GroupingPlan) -> ss.GroupingPlan:
    """No layer dense, no order learned or left alone."""
    lifted = {
        name: ss.LayerPlan(
            group_level=max(2, layer.group_level),
            out_perm=layer.out_perm,
            in_perm=layer.in_perm,
            weight_shape=layer.weight_shape,
        )
        for name, layer in plan.layers.items()
    }
    return reordered_plan(ss.GroupingPlan(lifted), "random")


def tensors_in(outputs: object) -> list[torch.Tensor]:
    """The floating-point tensors of a tensor, or of lists and dictionaries of them."""
    if isinstance(outputs, torch.Tensor):
        return [outputs] if outputs.is_floating_point() else []
    parts = outputs.values() if isinstance(outputs, Mapping) else outputs
    assert isinstance(parts, (Sequence, type({}.values())))
    return [tensor for part in parts for tensor in tensors_in(part)]


def assert_equal(tensors: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    """Equal up to rounding, measured against the largest entry: small ones may be differences of large ones."""
    for tensor, expected_tensor in zip(tensors, expected, strict=True):
        assert expected_tensor.isfinite().all()
        largest = expected_tensor.abs().max().item() if expected_tensor.numel() else 0.0
        torch.testing.assert_close(tensor, expected_tensor, rtol=0, atol=RELATIVE_TOLERANCE * largest)


def dense_gradients(model: nn.Module, plan: ss.GroupingPlan) -> dict[str, torch.Tensor]:
    """Gradients by parameter, those of grouped layers in the order and shape of the dense layer."""
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    for name, layer in plan.layers.items():
        if isinstance(model.get_submodule(name), ss.ShuffledGroupConv2d) and f"{name}.weight" in gradients:
            gradients[f"{name}.weight"] = dense_weight(gradients[f"{name}.weight"], layer)
    return gradients


def assert_conversion_keeps_the_function(model: nn.Module, plan: ss.GroupingPlan, inputs: object) -> nn.Module:
    """Outputs and gradients of the converted network are those of the masked one; returns the converted network."""
    masked, converted = ss.mask_(copy.deepcopy(model), plan), ss.convert_(copy.deepcopy(model), plan)
    expected, outputs = tensors_in(masked(inputs)), tensors_in(converted(inputs))
    assert_equal(outputs, expected)
    for tensors in (outputs, expected):
        torch.autograd.backward([tensor.sum() for tensor in tensors])
    gradients, expected_gradients = dense_gradients(converted, plan), dense_gradients(masked, plan)
    assert gradients.keys() == expected_gradients.keys()
    assert_equal(list(gradients.values()), list(expected_gradients.values()))
    weights = [gradients[f"{name}.weight"] for name in plan.layers if f"{name}.weight" in gradients]
    assert sum(bool(gradient.any()) for gradient in weights) > 0.9 * len(weights) > 0, "the proof needs gradients"
    return converted


def assert_file_keeps_the_function(
    converted: nn.Module, build: Callable[[], nn.Module], inputs: object, path: Path
) -> None:
    """A network that is built anew, with other weights, becomes the saved one."""
    ss.save(converted, path)
    loaded = ss.load(path, random_network(build, seed=1))
    with torch.no_grad():
        assert_equal(tensors_in(loaded(inputs)), tensors_in(converted(inputs)))


def assert_all_steps_keep_the_function(build: Callable[[], nn.Module], inputs: object, folder: Path) -> None:
    model = random_network(build)
    plan = one_shot_plan(model)
    params = sum(parameter.numel() for parameter in model.parameters())
    converted = assert_conversion_keeps_the_function(model, plan, inputs)
    kept = sum(parameter.numel() for parameter in converted.parameters())
    assert kept == pytest.approx((1 - plan.removed_param_fraction) * params)

    converted = assert_conversion_keeps_the_function(model, all_grouped_at_random(plan), inputs)
    assert not ss.select_layers(converted).layers
    assert_file_keeps_the_function(converted, build, inputs, folder / "random.safetensors")
    with torch.no_grad():
        before, after = tensors_in(model(inputs))[0], tensors_in(converted(inputs))[0]
    assert before.shape != after.shape or not torch.allclose(before, after, rtol=1e-2), "pruning must be noticed"


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_a_classifier_computes_the_same_masked_converted_and_loaded(name: str, tmp_path: Path) -> None:
    images = LARGE_IMAGES if name in NEED_LARGE_IMAGES else IMAGES
    assert_all_steps_keep_the_function(CLASSIFIERS[name], images, tmp_path)


def test_a_segmentation_network_computes_the_same_masked_converted_and_loaded(tmp_path: Path) -> None:
    assert_all_steps_keep_the_function(SEGMENTATION, IMAGES, tmp_path)


def test_a_detector_computes_the_same_masked_converted_and_loaded(tmp_path: Path) -> None:
    images = list(LARGE_IMAGES)
    assert all(len(found["boxes"]) > 0 for found in random_network(DETECTION)(images))
    assert_all_steps_keep_the_function(DETECTION, images, tmp_path)
