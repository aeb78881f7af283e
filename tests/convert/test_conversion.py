"""Converted networks compute what the masked ones do."""

import copy
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from planned_networks import IMAGES, plan_for, random_network, random_plan
from torch import nn

import strucspars as ss
from strucspars.convert.conversion import convert_, mask_
from strucspars.core.plan import GroupingPlan
from strucspars.nn.groupable import select_layers
from strucspars.nn.layers import ShuffledGroupConv2d, dense_weight


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("training", [True, False])
def test_the_converted_network_equals_the_masked_one_forward_and_backward(seed: int, training: bool) -> None:
    masked = random_network(seed).train(training)
    converted = copy.deepcopy(masked)
    plan = random_plan(masked, seed)
    mask_(masked, plan)
    convert_(converted, plan)
    outputs, expected = converted(IMAGES), masked(IMAGES)
    torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-5)
    outputs.square().sum().backward()
    expected.square().sum().backward()
    for name, layer in plan.layers.items():
        gradient = converted.get_parameter(f"{name}.weight").grad
        assert gradient is not None
        dense_gradient = masked.get_parameter(f"{name}.weight").grad
        torch.testing.assert_close(dense_weight(gradient, layer), dense_gradient, rtol=1e-3, atol=1e-4)


def test_converting_changes_the_function_where_something_is_pruned() -> None:
    model = random_network()
    before = model(IMAGES)
    convert_(model, random_plan(model))
    assert not torch.allclose(model(IMAGES), before, rtol=1e-2)


def test_a_masked_network_converts_to_the_same_function() -> None:
    masked = random_network().eval()
    plan = random_plan(masked)
    mask_(masked, plan)
    expected = masked(IMAGES)
    torch.testing.assert_close(convert_(masked, plan)(IMAGES), expected, rtol=1e-4, atol=1e-5)
    assert type(masked.expand) is ShuffledGroupConv2d


def test_the_tensors_really_shrink() -> None:
    model = random_network()
    plan = random_plan(model)
    before = {name: parameter.nbytes for name, parameter in model.named_parameters()}
    convert_(model, plan)
    for name, parameter in model.named_parameters():
        layer = plan.layers.get(name.removesuffix(".weight"))
        groups = layer.num_groups if layer and name.endswith("weight") else 1
        assert parameter.nbytes == parameter.untyped_storage().nbytes() == before[name] // groups


@pytest.mark.parametrize("level", [2, 3, 4])
def test_the_plan_of_a_model_tells_which_fraction_of_all_its_parameters_is_gone(level: int) -> None:
    model = nn.Sequential(nn.Conv2d(16, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 5, 1))
    before = sum(parameter.numel() for parameter in model.parameters())
    plan = ss.one_shot_plan(model, ss.SparsifyConfig(target=0.1, fixed_levels={"0": level}))
    convert_(model, plan)
    after = sum(parameter.numel() for parameter in model.parameters())
    assert ss.model_plan(model).removed_param_fraction == pytest.approx(1 - after / before)


def test_a_layer_that_no_plan_makes_has_none() -> None:
    model = nn.Sequential(nn.ReLU(), ShuffledGroupConv2d(12, 6, 1, groups=3))
    with pytest.raises(ValueError, match="layer '1' has 3 groups, no power of two"):
        ss.model_plan(model)


def test_what_surrounds_a_layer_stays() -> None:
    model = random_network().to(memory_format=torch.channels_last).double().eval()
    calls = []
    model.expand.register_forward_hook(lambda *_: calls.append("hook"))
    model.expand.weight.requires_grad_(False)
    names = set(dict(model.named_parameters()))
    parameters = dict(model.named_parameters())
    convert_(model, random_plan(model))
    model(IMAGES.double())
    assert calls == ["hook"]
    assert set(dict(model.named_parameters())) == names
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert not model.expand.weight.requires_grad
    assert model.project.weight.requires_grad
    assert model.expand.weight.dtype == torch.float64
    assert not model.expand.training
    assert model.project.weight.is_contiguous(memory_format=torch.channels_last)


def test_the_keys_of_a_masked_model_do_not_change() -> None:
    model = random_network()
    keys = list(model.state_dict())
    mask_(model, random_plan(model))
    assert list(model.state_dict()) == keys


def test_denormal_weights_are_flushed() -> None:
    model = random_network()
    with torch.no_grad():
        model.expand.weight.fill_(1e-40)
    convert_(model, random_plan(model))
    assert not model.expand.weight.any()


def test_converting_again_groups_only_what_is_still_dense() -> None:
    model = random_network().eval()
    plan = random_plan(model)
    first = ss.GroupingPlan({name: layer for name, layer in plan.layers.items() if name != "reduce"})
    convert_(model, first)
    weight = model.expand.weight.clone()
    convert_(model, plan)
    assert torch.equal(model.expand.weight, weight)
    assert type(model.reduce) is ShuffledGroupConv2d


def test_a_layer_of_one_group_stays_dense() -> None:
    model = random_network()
    convert_(model, random_plan(model, level=1))
    assert type(model.expand) is nn.Conv2d


def test_a_module_used_twice_is_converted_once() -> None:
    shared = nn.Conv2d(4, 4, 1)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    convert_(model, random_plan(model))
    assert type(model[0]) is ShuffledGroupConv2d
    assert model[0] is model[2]
    assert model(torch.randn(1, 4, 3, 3)).shape == (1, 4, 3, 3)


def test_layers_that_cannot_be_grouped_do_not_disturb_those_that_can() -> None:
    normed = nn.utils.parametrizations.weight_norm(nn.Conv2d(8, 8, 1))
    model = nn.Sequential(normed, nn.Conv2d(8, 8, 1), nn.Flatten(), nn.LazyLinear(4))
    convert_(model, random_plan(model))
    assert type(model[1]) is ShuffledGroupConv2d
    layer = ss.LayerPlan(group_level=2, out_perm=np.arange(8), in_perm=np.arange(8), weight_shape=(8, 8, 1, 1))
    with pytest.raises(ValueError, match="layer '0' has no plain weight"):
        convert_(model, ss.GroupingPlan({"0": layer}))


def test_a_forward_of_its_own_is_left_alone() -> None:
    model = nn.Sequential(nn.Conv2d(8, 8, 1))
    plan = random_plan(model)
    model[0].forward = model[0].forward  # as hooks of other libraries do
    assert not select_layers(model).layers
    with pytest.raises(ValueError, match="layer '0': its forward is replaced"):
        convert_(model, plan)


def test_a_new_plan_replaces_an_old_mask() -> None:
    model = random_network()
    mask_(model, random_plan(model, seed=1))
    mask_(model, random_plan(model, seed=2, level=1))
    assert type(model.expand) is nn.Conv2d


def test_small_half_precision_weights_survive() -> None:
    model = random_network().half()
    with torch.no_grad():
        model.expand.weight.fill_(5e-5)
    convert_(model, random_plan(model))
    assert model.expand.weight.all()


@pytest.mark.parametrize("change_", [mask_, convert_])
def test_changed_models_can_be_copied_and_cast(change_: Callable[..., nn.Module]) -> None:
    model = random_network().eval()
    change_(model, random_plan(model))
    twin = copy.deepcopy(model)
    torch.testing.assert_close(twin(IMAGES), model(IMAGES))
    torch.testing.assert_close(twin.double()(IMAGES.double()).float(), model(IMAGES), rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        twin.get_parameter("expand.weight").zero_()
    assert model.get_parameter("expand.weight").any()


class Sentences(nn.Module):
    """Linear layers and a convolution around PyTorch's encoder, whose layers read their weights themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(12, 16)
        self.mix = nn.Conv1d(16, 16, 3, padding=1)
        layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 6)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        features = self.mix(self.embed(words).transpose(1, 2)).transpose(1, 2)
        scores: torch.Tensor = self.head(self.encoder(features))
        return scores


WORDS = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(2))


SENTENCE_RULES = ss.SparsifyConfig(layer_types=("Linear", "Conv1d"))


def sentence_plan(model: nn.Module, *names: str) -> ss.GroupingPlan:
    generator = np.random.default_rng(0)
    layers = {}
    for name in names:
        shape = tuple(model.get_parameter(f"{name}.weight").shape)
        layers[name] = ss.LayerPlan(
            group_level=2,
            out_perm=generator.permutation(shape[0]),
            in_perm=generator.permutation(shape[1]),
            weight_shape=shape,
        )
    return ss.GroupingPlan(layers)


def test_around_a_transformer_encoder_everything_that_is_selected_converts_to_the_masked_function() -> None:
    torch.manual_seed(0)
    masked = Sentences().eval()
    names = [layer.name for layer in select_layers(masked, SENTENCE_RULES).layers]
    assert names == ["embed", "mix", "head"]
    plan = sentence_plan(masked, *names)
    converted = convert_(copy.deepcopy(masked), plan)
    mask_(masked, plan)
    with torch.no_grad():
        torch.testing.assert_close(converted(WORDS), masked(WORDS), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("change", [convert_, mask_])
def test_a_weight_that_its_parent_reads_is_refused(change: Callable[[nn.Module, GroupingPlan], nn.Module]) -> None:
    model = Sentences()
    plan = sentence_plan(model, "head", "encoder.layers.0.linear1", "encoder.layers.1.linear2")
    # A smaller weight would not fit, and a mask would not be seen.
    with pytest.raises(
        ValueError, match=r"'encoder\.layers\.0\.linear1': TransformerEncoderLayer computes with its weight itself"
    ):
        change(model, plan)
    assert type(model.head) is nn.Linear
    assert model.head.weight.all()


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.float8_e4m3fn, torch.complex64])
@pytest.mark.parametrize("change", [convert_, mask_])
def test_weights_that_are_no_real_numbers_to_compute_with_are_refused_before_anything_changes(
    change: Callable[[nn.Module, GroupingPlan], nn.Module], dtype: torch.dtype
) -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 1), nn.Conv2d(8, 8, 1))
    plan = ss.one_shot_plan(model, 0.5)
    model[1].weight = nn.Parameter(model.get_parameter("1.weight").detach().to(dtype), requires_grad=False)
    reason = f"its weight is {dtype}, not a floating-point type of 16 bits or more"
    with pytest.raises(ValueError, match=f"layer '1': {reason}"):
        change(model, plan)
    assert type(model[0]) is nn.Conv2d
    assert model.get_parameter("0.weight").all()
    assert reason_to_skip(model, "1") == reason


def reason_to_skip(model: nn.Module, name: str) -> str:
    return next(layer.reason for layer in ss.select_layers(model).skipped if layer.name == name)


def test_a_masked_model_may_be_masked_again() -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 1), nn.Conv2d(8, 8, 1))
    plan = ss.one_shot_plan(model, 0.5)
    before = copy.deepcopy(mask_(model, plan).state_dict())
    torch.testing.assert_close(mask_(model, plan).state_dict(), before, rtol=0, atol=0)


def test_the_orders_of_a_converted_model_come_back_from_its_state_after_to_empty() -> None:
    model = random_network().eval()
    plan = random_plan(model)
    convert_(model, plan)
    state = copy.deepcopy(model.state_dict())
    expected = model(IMAGES)
    model.to("meta").to_empty(device="cpu").load_state_dict(state)
    torch.testing.assert_close(model(IMAGES), expected)


def test_a_converted_model_without_values_takes_its_plan_again_and_no_other_number_of_groups() -> None:
    model = random_network()
    plan = random_plan(model, level=2)
    convert_(model, plan).to("meta")
    assert convert_(model, plan) is model
    with pytest.raises(ValueError, match="layer 'expand' is grouped already, and not as the plan has it"):
        convert_(model, random_plan(random_network(), level=3))


class ByKeyword(nn.Module):
    """Calls its layers as their signatures have it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(8, 16, 1), nn.Linear(16, 8)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.second(input=self.first(input=images).mean((2, 3)))
        return scores


def test_layers_may_be_called_by_keyword_as_before() -> None:
    model, images = ByKeyword(), torch.randn(2, 8, 3, 3)
    plan = plan_for(model, "first", "second")
    masked, converted = mask_(copy.deepcopy(model), plan), convert_(copy.deepcopy(model), plan)
    assert torch.allclose(masked(images), converted(images), atol=1e-6)


def test_a_converted_layer_takes_the_same_plan_again_and_no_other() -> None:
    model, images = ByKeyword(), torch.randn(2, 8, 3, 3)
    plan = plan_for(model, "first")
    outputs = convert_(model, plan)(images)
    assert torch.equal(convert_(model, plan)(images), outputs)
    layer = plan.layers["first"]
    for other in (
        replace(layer, group_level=3),
        replace(layer, group_level=1),
        replace(layer, in_perm=np.roll(layer.in_perm, 1)),
    ):
        with pytest.raises(ValueError, match="layer 'first' is grouped already, and not as the plan has it"):
            convert_(model, ss.GroupingPlan({"first": other}))
    assert torch.equal(model(images), outputs)


@pytest.mark.parametrize("change_", [convert_, mask_])
def test_a_network_that_is_changed_in_inference_mode_can_be_trained(change_: Callable[..., nn.Module]) -> None:
    model = random_network()
    plan, images = random_plan(model), torch.randn(2, 3, 8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    for _ in range(2):
        model(images).sum().backward()
        optimizer.step()
        with torch.inference_mode():
            change_(model, plan, optimizer)
    assert model.get_parameter("expand.weight").grad is not None


@pytest.mark.parametrize("is_inference", [True, False])
@pytest.mark.parametrize("change_", [convert_, mask_])
def test_a_network_that_was_made_in_inference_mode_can_be_changed(
    change_: Callable[..., nn.Module], is_inference: bool
) -> None:
    with torch.inference_mode():
        model = random_network().eval()
        plan, images = random_plan(model), torch.randn(2, 3, 8, 8)
    with torch.inference_mode(is_inference):
        change_(model, plan)
    with torch.inference_mode():
        assert model(images).isfinite().all()


def test_a_network_that_is_converted_inside_of_autocast_computes_with_its_new_weights() -> None:
    model, images = random_network().eval(), torch.randn(2, 3, 8, 8)
    plan = random_plan(model)
    masked = mask_(copy.deepcopy(model), plan)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(images)
        scores = convert_(model, plan)(images)
        torch.testing.assert_close(scores, masked(images), rtol=0.05, atol=0.05 * scores.abs().max().item())
