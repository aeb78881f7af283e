import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from data_parallel import parallel
from torch import nn
from torch.func import functional_call, stack_module_state
from torch.nn.utils import parametrizations, prune
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_conv_bn_weights
from torch_warnings import EMPTY_LAYERS_WARN, SCRIPTING_WARNS

import strucspars as ss
from strucspars.nn.layers import (
    ShuffledGroupConv2d,
    ShuffledGroupConv3d,
    ShuffledGroupLinear,
    channel_orders,
    check_plain_weights,
    dense_shape,
    dense_weight,
    gather_channels,
    group_module_,
    grouped_weight,
    groups_of_weight,
    kept_connections,
    like_memory_format,
    mask_module_,
    unmask_module_,
)

LAYERS_AND_INPUTS = [
    (nn.Conv2d(8, 16, 3), (2, 8, 7, 7)),
    (nn.Conv2d(8, 16, (3, 1), stride=(2, 1), padding=(1, 0), dilation=(2, 1)), (2, 8, 7, 7)),
    (nn.Conv2d(8, 16, 3, padding="same"), (2, 8, 7, 7)),
    (nn.Conv2d(8, 16, 3, padding=1, padding_mode="reflect", bias=False), (2, 8, 7, 7)),
    (nn.Conv2d(8, 16, 3, padding=1, padding_mode="replicate"), (8, 7, 7)),
    (nn.Conv2d(24, 8, 1), (2, 24, 3, 3)),
    (nn.Conv1d(8, 16, 3, padding=1, padding_mode="circular"), (2, 8, 9)),
    (nn.Conv3d(8, 16, 3, stride=2), (2, 8, 5, 5, 5)),
    (nn.Linear(8, 16), (2, 5, 8)),
    (nn.Linear(8, 16, bias=False), (8,)),
]


def random_layer_plan(module: nn.Module, level: int, seed: int = 0) -> ss.LayerPlan:
    generator = np.random.default_rng(seed)
    shape = dense_shape(module)
    return ss.LayerPlan(
        group_level=level,
        out_perm=generator.permutation(shape[0]),
        in_perm=generator.permutation(shape[1]),
        weight_shape=shape,
    )


@pytest.mark.parametrize("level", [1, 2, 4])
@pytest.mark.parametrize(("module", "shape"), LAYERS_AND_INPUTS, ids=lambda value: str(value)[:60])
def test_the_grouped_layer_equals_the_masked_one_forward_and_backward(
    module: nn.Module, shape: tuple[int, ...], level: int
) -> None:
    torch.manual_seed(0)
    layer = random_layer_plan(module, level)
    grouped, masked = copy.deepcopy(module), copy.deepcopy(module)
    group_module_(grouped, layer)
    mask_module_(masked, layer)
    grouped_input = torch.randn(shape, requires_grad=True)
    masked_input = grouped_input.detach().clone().requires_grad_()
    outputs, expected = grouped(grouped_input), masked(masked_input)
    torch.testing.assert_close(outputs, expected)
    outputs.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(grouped_input.grad, masked_input.grad)
    gradient, dense_gradient = grouped.get_parameter("weight").grad, masked.get_parameter("weight").grad
    assert gradient is not None
    torch.testing.assert_close(dense_weight(gradient, layer), dense_gradient)


@SCRIPTING_WARNS
@pytest.mark.parametrize("change_", [group_module_, mask_module_])
@pytest.mark.parametrize(("module", "shape"), LAYERS_AND_INPUTS, ids=lambda value: str(value)[:60])
def test_a_scripted_layer_computes_the_same(
    module: nn.Module, shape: tuple[int, ...], change_: Callable[[nn.Module, ss.LayerPlan], None]
) -> None:
    changed = copy.deepcopy(module)
    change_(changed, random_layer_plan(module, 3))
    scripted: nn.Module = torch.jit.script(changed)
    features = torch.randn(shape)
    torch.testing.assert_close(scripted(features), changed(features))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("level", [1, 2, 3])
def test_grouping_and_back_gives_the_masked_weight(level: int, dtype: torch.dtype) -> None:
    weight = torch.randn(16, 8, 3, 3, dtype=dtype)
    layer = random_layer_plan(nn.Conv2d(8, 16, 3), level)
    grouped = grouped_weight(weight, layer)
    assert grouped.shape == (16, 8 // layer.num_groups, 3, 3)
    assert torch.equal(dense_weight(grouped, layer), weight * kept_connections(layer)[:, :, None, None])


def test_unmasking_gives_the_dense_class_back() -> None:
    module = nn.Conv2d(8, 16, 3)
    mask_module_(module, random_layer_plan(module, 3))
    masked_weight = module.weight.detach().clone()
    unmask_module_(module)
    assert type(module) is nn.Conv2d
    assert torch.equal(module.weight, masked_weight)
    assert "mask" not in dict(module.named_buffers())


def test_unmasking_zeroes_pruned_weights_that_something_has_moved() -> None:
    module = nn.Conv2d(8, 16, 3)
    layer = random_layer_plan(module, 3)
    mask_module_(module, layer)
    nn.init.ones_(module.weight)
    unmask_module_(module)
    assert torch.equal(module.weight, kept_connections(layer)[:, :, None, None].expand(16, 8, 3, 3).float())


def test_a_layer_built_by_hand_is_a_plain_group_convolution() -> None:
    torch.manual_seed(0)
    shuffled = ShuffledGroupConv2d(8, 16, 3, groups=4)
    plain = nn.Conv2d(8, 16, 3, groups=4)
    plain.load_state_dict({"weight": shuffled.weight, "bias": shuffled.bias})
    features = torch.randn(1, 8, 5, 5)
    assert torch.equal(shuffled(features), plain(features))


def test_a_layer_built_on_a_device_has_its_orders_there() -> None:
    layer = ShuffledGroupConv2d(8, 16, 3, groups=4, device="meta")
    assert all(order.is_meta for order in channel_orders(layer).values())


def test_a_grouped_linear_layer_shows_its_groups() -> None:
    assert "in_features=8, out_features=16, bias=True, groups=4" in repr(ShuffledGroupLinear(8, 16, groups=4))


def test_a_gradient_at_hand_follows_the_weight() -> None:
    module = nn.Conv2d(8, 16, 3)
    module(torch.randn(1, 8, 5, 5)).sum().backward()
    assert module.weight.grad is not None
    layer = random_layer_plan(module, 2)
    expected = grouped_weight(module.weight.grad.clone(), layer)
    group_module_(module, layer)
    assert module.weight.grad is not None
    assert torch.equal(module.weight.grad, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_grouped_layers_train_in_any_precision_while_an_older_loss_is_still_alive(dtype: torch.dtype) -> None:
    model, images = nn.Sequential(nn.Conv2d(8, 8, 3)).to(dtype), torch.randn(1, 8, 5, 5, dtype=dtype)
    plan = ss.one_shot_plan(model, target=0.4)
    older_loss = model(images).sum()
    ss.convert_(model, plan)
    model(images).sum().backward()
    weight = model.get_parameter("0.weight")
    assert weight.grad is not None
    assert weight.grad.shape == weight.shape
    assert older_loss.requires_grad


def test_a_grouped_linear_layer_takes_an_empty_batch_and_autocast() -> None:
    module = nn.Linear(8, 16)
    group_module_(module, random_layer_plan(module, 3))
    assert module(torch.zeros(0, 8)).shape == (0, 16)
    with torch.autocast("cpu", torch.bfloat16):
        assert module(torch.randn(2, 8)).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("layer", "shape", "layout"),
    [
        (ss.ShuffledGroupConv2d(8, 16, 3, groups=2), (2, 8, 7, 7), torch.channels_last),
        (ShuffledGroupConv3d(8, 16, 3, groups=2), (2, 8, 5, 5, 5), torch.channels_last_3d),
    ],
)
def test_shuffles_keep_channels_last(layer: nn.Module, shape: tuple[int, ...], layout: torch.memory_format) -> None:
    channel_orders(layer)["in_perm"].copy_(torch.randperm(8))
    channel_orders(layer)["out_inverse"].copy_(torch.randperm(16))
    images = torch.randn(shape)
    plain = layer(images)
    assert plain.is_contiguous()
    last = layer.to(memory_format=layout)(images.contiguous(memory_format=layout))
    assert last.is_contiguous(memory_format=layout)
    assert torch.allclose(last, plain, atol=1e-5)


def test_plain_features_of_one_pixel_stay_plain() -> None:
    # These are channels last too, by their values in memory: were they marked so, layers after them would go on in it.
    features = torch.randn(2, 4, 1, 1)
    shuffled = gather_channels(features, -3, torch.tensor([2, 0, 3, 1]))
    assert shuffled.stride() == features.stride()


def test_a_wider_weight_made_from_one_of_single_inputs_is_laid_out_plainly() -> None:
    # Where narrow groups are merged: with one input per group a plain weight is channels last too.
    weight = like_memory_format(torch.randn(8, 4, 3, 3), torch.randn(8, 1, 3, 3))
    assert weight.is_contiguous()


def test_a_grouped_volume_convolution_keeps_channels_last() -> None:
    layout = torch.channels_last_3d
    model = nn.Sequential(nn.Conv3d(8, 8, 3)).to(memory_format=layout)
    ss.convert_(model, ss.one_shot_plan(model, ss.SparsifyConfig(target=0.4, layer_types=("Conv3d",))))
    weight = model.get_parameter("0.weight")
    assert weight.is_contiguous(memory_format=layout)
    assert not weight.is_contiguous()


def test_a_weight_that_is_recomputed_has_no_shape_to_read_off_and_the_layer_is_named() -> None:
    normed = parametrizations.weight_norm(ShuffledGroupConv2d(8, 8, 1, groups=2))
    pruned = ShuffledGroupConv2d(8, 8, 1, groups=2)
    prune.l1_unstructured(pruned, "weight", amount=2)  # type: ignore[no-untyped-call]  # untyped in torch
    for layer in (normed, pruned):
        with pytest.raises(ValueError, match=r"layer 'body\.0' has no plain weight: .*, or remove the parametrisation"):
            dense_shape(layer, "body.0")
        with pytest.raises(ValueError, match=r"layer '\w*ShuffledGroupConv2d' has no plain weight"):
            dense_shape(layer)
        with pytest.raises(ValueError, match=r"layer '1\.0' has no plain weight"):
            check_plain_weights(nn.Sequential(nn.ReLU(), parallel(nn.Sequential(layer))))
    check_plain_weights(nn.Sequential(ShuffledGroupConv2d(8, 8, 1), parametrizations.weight_norm(nn.Conv2d(8, 8, 1))))


@EMPTY_LAYERS_WARN
def test_a_linear_layer_without_inputs_is_one_group() -> None:
    assert groups_of_weight(nn.Linear(0, 4)) == 1


def test_fusing_a_batch_norm_with_pytorchs_own_tool_is_right() -> None:
    torch.manual_seed(0)
    layer, norm = nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16)
    for tensor in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
        nn.init.uniform_(tensor, 0.5, 1.5)  # type: ignore[arg-type]  # a norm with statistics has all four
    group_module_(layer, random_layer_plan(layer, 3))
    model, images = nn.Sequential(layer, norm).eval(), torch.randn(2, 8, 7, 7)
    fused = fuse_conv_bn_eval(layer, norm)
    torch.testing.assert_close(fused(images), model(images), rtol=1e-4, atol=1e-5)


class FusesByHand(nn.Module):
    """A block that folds its batch norm into its convolution for inference, as detectors do."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(8, 16, 3, bias=False), nn.BatchNorm2d(16)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.norm(self.conv(features)) if hasattr(self, "norm") else self.conv(features)
        return outputs.relu()

    def fuse(self) -> None:
        conv, norm = self.conv, self.norm
        mean, variance = norm.get_buffer("running_mean"), norm.get_buffer("running_var")
        fused = fuse_conv_bn_weights(conv.weight, conv.bias, mean, variance, norm.eps, norm.weight, norm.bias)
        conv.weight, conv.bias = fused
        del self.norm


def test_a_block_that_fuses_its_batch_norm_by_hand_is_right() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(FusesByHand(), nn.Conv2d(16, 8, 1)).eval()
    block, images = model[0], torch.randn(2, 8, 7, 7)
    assert isinstance(block, FusesByHand)
    for tensor in (block.norm.weight, block.norm.bias, block.norm.running_mean, block.norm.running_var):
        nn.init.uniform_(tensor, 0.5, 1.5)  # type: ignore[arg-type]  # a norm with statistics has all four
    ss.convert_(model, ss.one_shot_plan(model, target=0.4))
    assert isinstance(block.conv, ShuffledGroupConv2d)
    with torch.no_grad():
        expected = model(images)
        block.fuse()
        torch.testing.assert_close(model(images), expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(ss.fold(model, images)(images), expected, rtol=1e-4, atol=1e-5)


def networks_of_different_orders() -> list[nn.Sequential]:
    models = [nn.Sequential(nn.Conv2d(8, 16, 3), nn.Conv2d(16, 8, 1)) for _ in range(2)]
    for seed, model in enumerate(models):
        for layer in model:
            group_module_(layer, random_layer_plan(layer, 3, seed))
    return models


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # vmap has no rule for index_copy_
@pytest.mark.parametrize("with_gradient", [False, True])
def test_stacked_weights_of_several_networks_need_their_orders_stacked_too(with_gradient: bool) -> None:
    models, images = networks_of_different_orders(), torch.randn(2, 8, 5, 5)
    parameters, buffers = stack_module_state(models)

    def scores(parameters: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> torch.Tensor:
        outputs: torch.Tensor = functional_call(models[0], (parameters, others), (images,))
        return outputs.square().sum() if with_gradient else outputs

    function = torch.func.grad(scores) if with_gradient else scores
    with pytest.raises(ValueError, match="stack every 'in_perm' and 'out_inverse'"):
        torch.func.vmap(function)(parameters, buffers)
    states = [model.state_dict() for model in models]
    orders = {key: torch.stack([state[key] for state in states]) for key in states[0] if key not in parameters}
    stacked = torch.func.vmap(function)(parameters, orders)
    for place, model in enumerate(models):
        if with_gradient:
            model(images).square().sum().backward()
            torch.testing.assert_close(stacked["0.weight"][place], model[0].weight.grad, rtol=1e-4, atol=1e-3)
        else:
            torch.testing.assert_close(stacked[place], model(images))
