from typing import Any, Self
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torchvision
from data_parallel import parallel
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.flop_counter import FlopCounterMode
from torch_warnings import EMPTY_LAYERS_WARN

from strucspars.convert.fold import fold
from strucspars.core.plan import GroupingPlan, LayerPlan
from strucspars.cost.counting import LayerCount, count_macs
from strucspars.cost.summary import summary
from strucspars.nn.layers import group_module_, mask_module_
from strucspars.sparsify.one_shot import one_shot_plan


def torch_macs(model: nn.Module, *inputs: Any) -> int:
    """What PyTorch's own counter finds in eval mode; it counts a multiplication and an addition as two."""
    model.eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(*inputs)
    return int(counter.get_total_flops()) // 2


def torchvision_model(name: str, **options: Any) -> nn.Module:
    model: nn.Module = torchvision.models.get_model(name, weights=None, **options)
    return model


def random_plan(out_channels: int, in_channels: int, *kernel: int, level: int) -> LayerPlan:
    generator = np.random.default_rng(out_channels + in_channels)
    return LayerPlan(
        group_level=level,
        out_perm=generator.permutation(out_channels),
        in_perm=generator.permutation(in_channels),
        weight_shape=(out_channels, in_channels, *kernel),
    )


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("resnet18", {}),
        ("mobilenet_v2", {}),
        ("densenet121", {}),
        ("shufflenet_v2_x0_5", {}),
        ("googlenet", {"init_weights": False}),
    ],
)
def test_macs_are_those_of_torchs_flop_counter(name: str, options: dict[str, Any]) -> None:
    model = torchvision_model(name, **options)
    images = torch.randn(2, 3, 64, 64)
    assert count_macs(model, images).macs == torch_macs(model, images)


def test_a_detector_that_takes_a_list_of_images_is_counted() -> None:
    model = torchvision.models.detection.fasterrcnn_mobilenet_v3_large_320_fpn(
        weights=None, weights_backbone=None, min_size=64, max_size=64
    )
    images = [torch.rand(3, 64, 64)]
    assert count_macs(model, (images,)).macs == torch_macs(model, images)


@pytest.mark.parametrize(
    ("layer", "inputs"),
    [
        (nn.Conv1d(6, 4, 3, stride=2, groups=2), torch.randn(2, 6, 11)),
        (nn.Conv2d(6, 4, (3, 1), dilation=2, padding="same"), torch.randn(2, 6, 9, 7)),
        (nn.Conv2d(6, 4, 3), torch.randn(6, 9, 7)),
        (nn.Conv3d(6, 4, 2), torch.randn(2, 6, 5, 4, 3)),
        (nn.ConvTranspose1d(6, 4, 3, stride=2), torch.randn(2, 6, 11)),
        (nn.ConvTranspose2d(6, 4, 3, stride=2, groups=2), torch.randn(2, 6, 5, 7)),
        (nn.ConvTranspose3d(6, 4, 2, stride=3), torch.randn(2, 6, 5, 4, 3)),
        (nn.Linear(6, 4), torch.randn(2, 5, 6)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else str(tuple(value.shape)),
)
def test_every_kind_of_layer_is_counted(layer: nn.Module, inputs: torch.Tensor) -> None:
    assert count_macs(layer, inputs).macs == torch_macs(layer, inputs) > 0


def test_a_transposed_convolution_called_by_keyword_is_counted() -> None:
    class Keyword(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.ConvTranspose2d(4, 2, 2, stride=2)

        def forward(self, features: torch.Tensor) -> torch.Tensor:
            upsampled: torch.Tensor = self.up(input=features)
            return upsampled

    assert count_macs(Keyword(), torch.zeros(1, 4, 5, 5)).macs == 4 * 2 * 2 * 2 * 25


@pytest.mark.parametrize(
    ("layer", "inputs"),
    [
        (nn.Conv1d(8, 16, 3), torch.randn(2, 8, 9)),
        (nn.Conv2d(8, 16, 3), torch.randn(2, 8, 9, 7)),
        (nn.Conv3d(8, 16, 2), torch.randn(2, 8, 5, 4, 3)),
        (nn.Linear(8, 16), torch.randn(2, 5, 8)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else str(tuple(value.shape)),
)
def test_a_shuffled_layer_costs_a_quarter_at_four_groups(layer: nn.Module, inputs: torch.Tensor) -> None:
    dense = count_macs(layer, inputs)
    weight = layer.weight
    assert isinstance(weight, nn.Parameter)
    group_module_(layer, random_plan(*weight.shape, level=3))
    grouped = count_macs(layer, inputs)
    assert grouped.macs == torch_macs(layer, inputs) == dense.macs // 4
    assert grouped.params == dense.params - weight.numel() * 3


@pytest.mark.parametrize("masked", [False, True])
def test_a_dense_or_masked_layer_counts_as_the_grouped_one_of_the_plan(masked: bool) -> None:
    model = nn.Sequential(nn.Conv2d(8, 16, 3), nn.Conv2d(16, 4, 1))
    layer = random_plan(16, 8, 3, 3, level=4)
    inputs = torch.randn(1, 8, 6, 6)
    if masked:
        mask_module_(model[0], layer)
    planned = count_macs(model, inputs, GroupingPlan({"0": layer}))
    assert count_macs(model, inputs).layers["0"] == LayerCount(params=16 * 8 * 9 + 16, macs=16 * 8 * 9 * 16)
    if not masked:
        group_module_(model[0], layer)
        assert planned == count_macs(model, inputs)
    assert planned.layers["0"] == LayerCount(params=16 * 9 + 16, macs=16 * 9 * 16)


def test_resnet50_has_its_known_parameters_and_macs() -> None:
    with torch.device("meta"):
        count = count_macs(torchvision_model("resnet50"), torch.empty(1, 3, 224, 224))
    assert (count.params, count.macs) == (25_557_032, 4_089_184_256)


class Shared(nn.Module):
    """Calls one layer three times, under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.second(self.second(self.first(features)))
        return output


def test_a_shared_module_counts_every_call_and_its_parameters_once() -> None:
    count = count_macs(Shared(), torch.zeros(1, 4, 5, 5))
    assert count.layers == {"first": LayerCount(params=4 * 4 * 9 + 4, macs=3 * 4 * 4 * 9 * 25)}
    assert count.params == 4 * 4 * 9 + 4


def test_a_weight_of_two_modules_counts_once_in_the_network_and_in_both_layers() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    count = count_macs(model, torch.zeros(1, 4))
    assert [layer.params for layer in count.layers.values()] == [16, 16]
    assert (count.params, count.macs) == (16, 32)


class Noisy(nn.Module):
    """Batch norm, noise in every mode, and perhaps an error at the end."""

    def __init__(self, *, fails: bool = False) -> None:
        super().__init__()
        self.fails = fails
        self.conv = spectral_norm(nn.Conv2d(4, 4, 1))
        self.norm = nn.BatchNorm2d(4)
        self.frozen = nn.BatchNorm2d(4).eval()

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.frozen(self.norm(self.conv(features + torch.rand_like(features))))
        if self.fails:
            raise RuntimeError("forward gave up")
        return output


def number_of_hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_hooks_with_kwargs) for module in model.modules())


def test_counting_leaves_modes_statistics_hooks_and_random_state_as_they_were() -> None:
    model = Noisy()
    graphs = []
    model.norm.register_forward_hook(lambda module, inputs, outputs: graphs.append(outputs.grad_fn))
    modes = [module.training for module in model.modules()]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    assert count_macs(model, torch.ones(2, 4, 3, 3)).batch_norm_elements == 2 * 2 * 4 * 9
    assert [module.training for module in model.modules()] == modes
    assert True in modes
    assert False in modes
    torch.testing.assert_close(dict(model.state_dict()), state, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert number_of_hooks(model) == 1
    assert graphs == [None]


def test_a_model_that_raises_keeps_its_modes_and_random_state_and_loses_our_hooks() -> None:
    model = Noisy(fails=True)
    modes = [module.training for module in model.modules()]
    random_state = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="forward gave up"):
        count_macs(model, torch.ones(2, 4, 3, 3))
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random_state)
    assert number_of_hooks(model) == 0


class Merging(nn.Sequential):
    """Changes its weights where it changes its mode, as re-parametrised and LoRA layers do."""

    def train(self, mode: bool = True) -> Self:
        self.get_parameter("0.weight").data.zero_()
        return super().train(mode)


@pytest.mark.parametrize("training", [True, False])
def test_counting_does_not_call_what_a_network_does_when_its_mode_changes(training: bool) -> None:
    model = Merging(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8))
    for module in model.modules():
        module.training = training
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert count_macs(model, torch.ones(1, 3, 4, 4)).macs == 3 * 8 * 16
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    assert {module.training for module in model.modules()} == {training}


@EMPTY_LAYERS_WARN
def test_a_classifier_without_classes_costs_nothing() -> None:
    model = torchvision_model("mobilenet_v2", num_classes=0)
    assert count_macs(model, torch.zeros(1, 3, 32, 32)).layers["classifier.1"] == LayerCount(params=0, macs=0)


def test_a_users_hook_that_changes_the_output_does_not_change_the_count() -> None:
    layer = nn.Conv2d(4, 8, 1)
    layer.register_forward_hook(lambda module, inputs, outputs: outputs[..., :1])
    assert count_macs(layer, torch.zeros(1, 4, 5, 5)).macs == 4 * 8 * 25


def test_a_users_hook_that_changes_a_batch_norms_output_does_not_change_the_count() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8))
    model[1].register_forward_hook(lambda module, inputs, outputs: outputs[..., :1])
    assert count_macs(model, torch.zeros(1, 3, 4, 4)).batch_norm_elements == 8 * 16


@pytest.mark.parametrize("inputs", [[torch.zeros(1, 4)], np.zeros((1, 4)), {"input": torch.zeros(1, 4)}, None])
def test_inputs_of_another_type_are_refused(inputs: Any) -> None:
    with pytest.raises(ValueError, match=f"must be a tensor or a tuple .* got {type(inputs).__name__}; .* tuple"):
        count_macs(nn.Linear(4, 4), inputs)


def test_a_lazy_layer_is_refused_and_stays_lazy() -> None:
    model = nn.Sequential(nn.LazyConv2d(4, 3))
    with pytest.raises(ValueError, match="layer '0': LazyConv2d has no shape yet; run the model once first"):
        count_macs(model, torch.zeros(1, 4, 8, 8))
    assert isinstance(model[0], nn.LazyConv2d)


def test_counting_calls_no_wrapper(monkeypatch: pytest.MonkeyPatch) -> None:
    # One for several processes waits for them, one for several devices calls copies without the hooks.
    monkeypatch.setattr(nn.DataParallel, "forward", Mock(side_effect=AssertionError("called")))
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8))
    images = torch.zeros(1, 3, 4, 4)
    macs, table = count_macs(model, images), summary(model, images)
    wrapper = nn.DataParallel(model)  # takes the model to a GPU, if there is one
    assert count_macs(wrapper, images) == macs
    assert summary(wrapper, images) == table


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
def test_inputs_are_moved_as_a_wrapper_would() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 1)).cuda()
    assert count_macs(nn.DataParallel(model), torch.zeros(1, 3, 4, 4)).macs == 3 * 8 * 16


def test_planning_names_a_lazy_layer_too() -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 1), nn.LazyLinear(10))
    with pytest.raises(ValueError, match="layer '1': LazyLinear has no shape yet; run the model once first"):
        one_shot_plan(model, 0.2)


@pytest.mark.parametrize("affine", [True, False])
def test_a_lazy_batch_norm_is_refused_and_stays_lazy(affine: bool) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.LazyBatchNorm2d(affine=affine))
    with pytest.raises(ValueError, match="layer '1': LazyBatchNorm2d has no shape yet; run the model once first"):
        count_macs(model, torch.zeros(1, 3, 4, 4))
    assert isinstance(model[1], nn.LazyBatchNorm2d)


def test_a_plan_for_a_layer_that_cannot_be_grouped_is_refused() -> None:
    model = nn.Sequential(nn.ConvTranspose2d(8, 8, 1))
    with pytest.raises(ValueError, match="layer '0': ConvTranspose2d cannot be grouped; leave it out of the plan"):
        count_macs(model, torch.zeros(1, 8, 2, 2), GroupingPlan({"0": random_plan(8, 8, 1, 1, level=2)}))


def test_a_plan_of_another_network_is_refused() -> None:
    model = nn.Sequential(nn.Conv2d(8, 8, 3))
    plan = GroupingPlan({"0": random_plan(8, 8, 1, 1, level=2)})
    with pytest.raises(ValueError, match=r"layer '0': its weight is \(8, 8, 3, 3\), but the plan was made for"):
        count_macs(model, torch.zeros(1, 8, 4, 4), plan)


class Transposed(nn.Module):
    """Gives its input by keyword, and last."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ConvTranspose2d(8, 8, 3, stride=2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        upsampled: torch.Tensor = self.layer(output_size=(10, 10), input=images)
        return upsampled


def test_the_input_is_found_whichever_way_it_is_given() -> None:
    assert count_macs(Transposed(), torch.zeros(1, 8, 4, 4)).layers["layer"].macs == 8 * 8 * 9 * 16


def test_a_plan_may_name_a_shared_module_by_its_second_name() -> None:
    layer = nn.Conv2d(8, 8, 1, bias=False)
    model, images = nn.Sequential(layer, layer), torch.zeros(1, 8, 2, 2)
    plan = GroupingPlan({"1": random_plan(8, 8, 1, 1, level=2)})
    assert count_macs(model, images, plan=plan).layers["0"] == LayerCount(params=32, macs=256)
    described = summary(model, images, plan=plan)
    assert [row.groups.after for row in described.rows] == [2]
    assert len(described.gathers or ()) == 4


class Writing(nn.Module):
    """Changes its inputs in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(8, 8, 1)

    def forward(self, images: torch.Tensor, batch: dict[str, list[torch.Tensor]]) -> torch.Tensor:
        images += 1
        batch["others"][0] += images
        features: torch.Tensor = self.layer(images)
        return features


def test_inputs_that_a_network_writes_into_stay_as_they_are() -> None:
    model, images, others = Writing(), torch.zeros(1, 8, 2, 2), torch.zeros(1, 8, 2, 2)
    inputs = images, {"others": [others]}
    count_macs(model, inputs)
    count_macs(parallel(model), inputs)
    summary(model, inputs)
    summary(fold(model, inputs), inputs)
    assert not images.any()
    assert not others.any()
