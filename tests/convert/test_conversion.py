import copy
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import strucspars as ss
from strucspars.convert.conversion import convert_, mask_
from strucspars.core.hierarchy import max_group_level
from strucspars.nn.grouped_weights import dense_weight
from strucspars.nn.selection import select_layers
from strucspars.nn.shuffled import ShuffledGroupConv2d


class Net(nn.Module):
    """Unequal widths, a residual, a bias, batch norms, strides, a grouped layer and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.expand = nn.Conv2d(16, 48, 1, bias=True)
        self.norm = nn.BatchNorm2d(48)
        self.depthwise = nn.Conv2d(48, 48, 3, padding=1, groups=48)
        self.project = nn.Conv2d(48, 16, 3, padding=1, padding_mode="circular", bias=False)
        self.reduce = nn.Conv2d(16, 32, 3, stride=2, padding=2, dilation=2)
        self.head = nn.Linear(32, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = self.stem(images).relu()
        block: torch.Tensor = self.project(self.depthwise(self.norm(self.expand(features)).relu()))
        scores: torch.Tensor = self.head(self.reduce(features + block).mean(dim=(-2, -1)))
        return scores


def random_network(seed: int = 0) -> Net:
    """Random weights, biases and batch-norm statistics: defaults would hide mistakes in order."""
    torch.manual_seed(seed)
    model = Net()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.copy_(torch.rand_like(tensor) + 0.5 if tensor.dim() == 1 else torch.randn_like(tensor) * 0.2)
    return model


def random_plan(model: nn.Module, seed: int = 0, level: int | None = None) -> ss.GroupingPlan:
    """Every groupable layer, in random orders, at a random level above 1."""
    generator = np.random.default_rng(seed)
    layers = {}
    for selected in select_layers(model).layers:
        out_channels, in_channels = selected.weight_shape[:2]
        top = max_group_level(out_channels, in_channels)
        layers[selected.name] = ss.LayerPlan(
            group_level=min(level, top) if level else int(generator.integers(2, top + 1)),
            out_perm=generator.permutation(out_channels),
            in_perm=generator.permutation(in_channels),
            weight_shape=selected.weight_shape,
        )
    assert layers
    return ss.GroupingPlan(layers)


IMAGES = torch.randn(4, 3, 9, 9, generator=torch.Generator().manual_seed(1))


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
    plan = ss.one_shot_plan(model, target=0.1, rules=ss.LayerRules(fixed_levels={"0": level}))
    convert_(model, plan)
    after = sum(parameter.numel() for parameter in model.parameters())
    assert ss.model_plan(model).removed_param_fraction == pytest.approx(1 - after / before)


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


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-4, momentum=0.9, weight_decay=1e-2, nesterov=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1, amsgrad=True),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3, momentum=0.5),
}


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(IMAGES.to(next(model.parameters()).dtype)).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_pruned_weights_stay_at_zero_through_training(kind: str) -> None:
    model = random_network()
    optimizer = OPTIMIZERS[kind](model.parameters())
    train_step(model, optimizer)
    plan = random_plan(model)
    mask_(model, plan, optimizer)
    for _ in range(3):
        train_step(model, optimizer)
    for name in plan.layers:
        weight, mask = model.get_parameter(f"{name}.weight"), model.get_buffer(f"{name}.mask")
        assert not weight[(mask == 0).expand_as(weight)].any()
        assert weight[(mask == 1).expand_as(weight)].all()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_goes_on_the_same_whether_masked_or_converted_with_the_optimizers_memory(kind: str) -> None:
    masked = random_network().double().eval()
    masked_optimizer = OPTIMIZERS[kind](masked.parameters())
    train_step(masked, masked_optimizer)
    converted = copy.deepcopy(masked)
    converted_optimizer = OPTIMIZERS[kind](converted.parameters())
    converted_optimizer.load_state_dict(copy.deepcopy(masked_optimizer.state_dict()))
    plan = random_plan(masked)
    mask_(masked, plan, masked_optimizer)
    convert_(converted, plan, converted_optimizer)
    for _ in range(3):
        train_step(masked, masked_optimizer)
        train_step(converted, converted_optimizer)
    images = IMAGES.double()
    torch.testing.assert_close(converted(images), masked(images), rtol=1e-8, atol=1e-8)


def test_memory_that_cannot_follow_is_cleared_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    model = random_network()
    optimizer: torch.optim.Optimizer = torch.optim.Adafactor(model.parameters())
    train_step(model, optimizer)
    with caplog.at_level(logging.WARNING):
        convert_(model, random_plan(model), optimizer)
    assert "Adafactor cannot carry 'row_var'" in caplog.text
    train_step(model, optimizer)


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


def bad_plan(model: nn.Module, name: str, shape: tuple[int, ...]) -> ss.GroupingPlan:
    good = random_plan(model)
    bad = ss.LayerPlan(group_level=2, out_perm=np.arange(shape[0]), in_perm=np.arange(shape[1]), weight_shape=shape)
    return ss.GroupingPlan(dict(good.layers) | {name: bad})


@pytest.mark.parametrize(
    ("name", "shape", "complaint"),
    [
        ("expnad", (48, 16, 1, 1), "'expnad' of the plan is not in the network; did you mean 'expand'"),
        ("expand", (48, 16, 3, 3), r"layer 'expand': its weight is \(48, 16, 1, 1\), but the plan"),
        ("depthwise", (48, 48, 3, 3), "layer 'depthwise' has 48 groups already"),
    ],
)
def test_a_plan_that_does_not_fit_changes_nothing(name: str, shape: tuple[int, ...], complaint: str) -> None:
    model = random_network()
    before = copy.deepcopy(model.state_dict())
    for change_ in (convert_, mask_):
        with pytest.raises(ValueError, match=complaint):
            change_(model, bad_plan(model, name, shape))
    assert type(model.expand) is nn.Conv2d
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_a_weight_that_two_layers_share_is_refused() -> None:
    first, second = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)
    second.weight = first.weight
    model = nn.Sequential(first, second)
    layer = ss.LayerPlan(group_level=2, out_perm=np.arange(4), in_perm=np.arange(4), weight_shape=(4, 4, 1, 1))
    with pytest.raises(ValueError, match="layer '0' shares its weight"):
        convert_(model, ss.GroupingPlan({"0": layer}))


@pytest.mark.parametrize("change_", [convert_, mask_])
def test_a_plan_that_names_a_shared_module_twice_is_refused_before_anything_changes(
    change_: Callable[..., nn.Module],
) -> None:
    layer = nn.Conv2d(8, 8, 3)
    model = nn.Sequential(layer, layer)
    (planned,) = random_plan(model, level=2).layers.values()
    with pytest.raises(ValueError, match="layer '1' shares its weight with another layer; take it off the plan"):
        change_(model, ss.GroupingPlan({"0": planned, "1": planned}))
    assert type(layer) is nn.Conv2d
    assert layer.weight.all()


def test_a_module_used_twice_is_converted_once() -> None:
    shared = nn.Conv2d(4, 4, 1)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    convert_(model, random_plan(model))
    assert type(model[0]) is ShuffledGroupConv2d
    assert model[0] is model[2]
    assert model(torch.randn(1, 4, 3, 3)).shape == (1, 4, 3, 3)


def test_training_goes_on_while_an_older_loss_is_still_alive() -> None:
    model = random_network()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    loss = model(IMAGES).square().mean()
    torch.autograd.backward(loss, retain_graph=True)
    convert_(model, random_plan(model), optimizer)
    train_step(model, optimizer)
    assert loss.requires_grad


@pytest.mark.parametrize("fused", [True, False])
def test_momenta_follow_the_layout_of_their_weights(fused: bool) -> None:
    model = random_network().to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=fused)
    train_step(model, optimizer)
    convert_(model, random_plan(model), optimizer)
    weight = model.project.weight
    assert optimizer.state[weight]["exp_avg"].stride() == weight.stride()
    reference = copy.deepcopy(model)
    plain = torch.optim.Adam(reference.parameters(), lr=1e-3, fused=False, foreach=False)
    plain.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    plain.param_groups[0] |= {"fused": False, "foreach": False}
    train_step(model, optimizer)
    train_step(reference, plain)
    torch.testing.assert_close(model.project.weight, reference.project.weight, rtol=1e-4, atol=1e-6)


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
    with pytest.raises(ValueError, match="layer '0' has a forward of its own"):
        convert_(model, plan)


def test_a_pending_gradient_does_not_move_pruned_weights() -> None:
    model = random_network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.autograd.backward(model(IMAGES).square().mean())
    mask_(model, random_plan(model), optimizer)
    optimizer.step()
    mask = model.get_buffer("expand.mask")
    assert not model.expand.weight[(mask == 0).expand_as(model.expand.weight)].any()


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


@pytest.mark.parametrize("change_", [convert_, mask_])
def test_the_optimizer_of_a_copy_is_refused_before_anything_changes(change_: Callable[..., nn.Module]) -> None:
    convolution = nn.Conv2d(4, 8, 3)
    model = nn.Sequential(convolution)
    optimizer = torch.optim.SGD(copy.deepcopy(model).parameters(), lr=0.1)
    with pytest.raises(ValueError, match="the optimizer holds no parameter of this model"):
        change_(model, random_plan(model), optimizer)
    assert convolution.weight.shape == (8, 4, 3, 3)
    assert convolution.weight.count_nonzero() == 288


def test_an_optimizer_of_some_of_the_parameters_is_enough() -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Conv2d(8, 8, 3))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    convert_(model, random_plan(model), optimizer)
    assert optimizer.param_groups[0]["params"][0] is model[1].weight


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("change_", [convert_, mask_])
def test_an_optimizer_that_comes_after_the_layers_were_grouped_is_refused(
    change_: Callable[..., nn.Module], kind: str
) -> None:
    model = random_network()
    optimizer = OPTIMIZERS[kind](model.parameters())
    train_step(model, optimizer)
    plan = random_plan(model)
    convert_(model, plan)
    complaint = (
        r"layer 'expand' is grouped already, .* dense shape \(48, 16, 1, 1\), .* with the first call, or make a new"
    )
    with pytest.raises(ValueError, match=complaint):
        change_(model, plan, optimizer)


def test_the_second_of_two_optimizers_is_refused_and_a_new_one_trains_on() -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 1), nn.Conv2d(8, 8, 1))
    first, second = (torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9) for layer in model)
    model(torch.randn(1, 4, 3, 3)).sum().backward()
    first.step()
    second.step()
    plan = random_plan(model)
    convert_(model, plan, first)
    with pytest.raises(ValueError, match="layer '1' is grouped already, but the optimizer remembers"):
        convert_(model, plan, second)
    second = torch.optim.SGD(model[1].parameters(), lr=0.1, momentum=0.9)
    convert_(model, plan, second)
    for _ in range(2):
        model(torch.randn(1, 4, 3, 3)).sum().backward()
        first.step()
        second.step()
        convert_(model, plan, first)


def test_an_optimizer_with_one_memory_for_all_is_refused() -> None:
    model = random_network()
    with pytest.raises(ValueError, match="LBFGS remembers all parameters as one vector"):
        convert_(model, random_plan(model), torch.optim.LBFGS(model.parameters()))
    assert type(model.expand) is nn.Conv2d


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
SENTENCE_RULES = ss.LayerRules(layer_types=(nn.Linear, nn.Conv1d))


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


def test_a_weight_that_its_parent_reads_can_be_masked_but_not_converted() -> None:
    torch.manual_seed(0)
    model = Sentences().eval()
    plan = sentence_plan(model, "encoder.layers.0.linear1", "encoder.layers.1.linear2", "head")
    complaint = "layer 'encoder.layers.0.linear1': TransformerEncoderLayer reads its weight itself.*mask_"
    with pytest.raises(ValueError, match=complaint):
        convert_(model, plan)
    assert type(model.head) is nn.Linear
    with torch.no_grad():
        before = model(WORDS)
        mask_(model, plan)
        fast_path = model(WORDS)
    assert not torch.allclose(fast_path, before, rtol=1e-2)
    torch.testing.assert_close(model(WORDS), fast_path, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=complaint):
        convert_(model, plan)


@pytest.mark.parametrize("change_", [convert_, mask_])
def test_a_model_on_the_meta_device_is_refused_with_the_remedy(change_: Callable[..., nn.Module]) -> None:
    with torch.device("meta"):
        model = Net()
    plan = random_plan(model)
    with pytest.raises(ValueError, match=r"layer 'expand' is on the meta device, .* call model\.to_empty\(device="):
        change_(model, plan)
    assert type(model.expand) is nn.Conv2d


def test_the_orders_of_a_converted_model_come_back_from_its_state_after_to_empty() -> None:
    model = random_network().eval()
    plan = random_plan(model)
    convert_(model, plan)
    state = copy.deepcopy(model.state_dict())
    expected = model(IMAGES)
    model.to("meta").to_empty(device="cpu").load_state_dict(state)
    torch.testing.assert_close(model(IMAGES), expected)


class OtherTensor(torch.Tensor):
    """Stands for the weights of quantisation libraries, which are tensors of their own classes."""


@pytest.mark.parametrize("change_", [convert_, mask_])
def test_a_weight_that_is_no_plain_tensor_is_refused(change_: Callable[..., nn.Module]) -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 1))
    plan = random_plan(model)
    model[0].weight = nn.Parameter(torch.randn(8, 4, 1, 1).as_subclass(OtherTensor))
    with pytest.raises(ValueError, match="layer '0': its weight is a OtherTensor, not a plain tensor; take it off"):
        change_(model, plan)


def test_a_planned_layer_of_another_kind_is_named_with_its_type() -> None:
    plan = random_plan(nn.Sequential(nn.Conv2d(4, 8, 1)))
    with pytest.raises(ValueError, match="layer '0' is a BatchNorm2d, only Conv1d, Conv2d, Conv3d, Linear can be"):
        convert_(nn.Sequential(nn.BatchNorm2d(8)), plan)


def plan_for(model: nn.Module, *layers: str) -> ss.GroupingPlan:
    """Two groups in random orders for each of these layers."""
    generator = np.random.default_rng(3)
    shapes = {name: tuple(model.get_submodule(name).get_parameter("weight").shape) for name in layers}
    return ss.GroupingPlan(
        {
            name: ss.LayerPlan(
                group_level=2,
                out_perm=generator.permutation(shape[0]),
                in_perm=generator.permutation(shape[1]),
                weight_shape=shape,
            )
            for name, shape in shapes.items()
        }
    )


def biases_shared(model: nn.Sequential) -> None:
    model[1].bias = model[0].bias


def bias_pruned(model: nn.Sequential) -> None:
    prune.l1_unstructured(model[1], "bias", amount=2)  # type: ignore[no-untyped-call]  # untyped in torch


def bias_as_buffer(model: nn.Sequential) -> None:
    bias = model[1].get_parameter("bias").detach()
    del model[1].bias
    model[1].register_buffer("bias", bias)


@pytest.mark.parametrize("change", [biases_shared, bias_pruned, bias_as_buffer])
def test_a_bias_that_cannot_change_its_order_is_refused_before_anything_changes(
    change: Callable[[nn.Sequential], None],
) -> None:
    model = nn.Sequential(nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1))
    change(model)
    plan, images = plan_for(model, "0", "1"), torch.randn(1, 8, 3, 3)
    before = model(images)
    with pytest.raises(ValueError, match=r"layer '[01]': its bias is .*; take it off the plan, or keep it dense"):
        convert_(model, plan)
    assert torch.equal(model(images), before)
    # A masked layer keeps the order of its outputs, and with it its bias.
    assert mask_(model, plan)(images).shape == before.shape


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
        with pytest.raises(ValueError, match="layer 'first' is grouped already, and otherwise than the plan has it"):
            convert_(model, ss.GroupingPlan({"first": other}))
    assert torch.equal(model(images), outputs)
