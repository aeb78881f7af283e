import copy

import pytest
import torch
from torch import nn

import strucspars as ss
from strucspars.models.cifar import BasicBlock, CifarResNet

IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("depth", "params", "macs_e6"), [(20, 269_722, 40.6), (56, 853_018, 125.5), (110, 1_727_962, 252.9)]
)
def test_parameters_and_macs_are_those_of_the_literature(depth: int, params: int, macs_e6: float) -> None:
    with torch.device("meta"):
        count = ss.count_macs(CifarResNet(depth), torch.empty(1, 3, 32, 32))
    assert count.params == params
    assert round(count.macs / 1e6, 1) == macs_e6


def test_the_depth_counts_the_layers_with_weights() -> None:
    layers = [module for module in CifarResNet(32).modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    assert len(layers) == 32


def test_a_shortcut_keeps_every_second_pixel_and_pads_with_zeros() -> None:
    block = BasicBlock(16, 32, stride=2)
    features = torch.randn(2, 16, 8, 8)
    shortcut = block.shortcut(features)
    assert torch.equal(shortcut[:, :16], features[:, :, ::2, ::2])
    assert shortcut.shape == (2, 32, 4, 4)
    assert not shortcut[:, 16:].any()
    assert not list(block.shortcut.parameters())


def test_a_block_whose_convolutions_are_zero_passes_its_input_on() -> None:
    block = BasicBlock(16, 16, stride=1).eval()
    nn.init.zeros_(block.conv2.weight)
    features = torch.rand(2, 16, 8, 8)
    torch.testing.assert_close(block(features), features)


def test_gradients_reach_every_parameter() -> None:
    torch.manual_seed(0)
    model = CifarResNet(20, num_classes=100)
    scores = model(IMAGES)
    assert scores.shape == (2, 100)
    torch.autograd.backward(scores.square().sum())
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())


@pytest.mark.parametrize("depth", [0, 2, 18, 21, -4])
def test_an_impossible_depth_is_named(depth: int) -> None:
    with pytest.raises(ValueError, match=f"depth must be 6 n \\+ 2.*got {depth}"):
        CifarResNet(depth)


def test_every_convolution_but_the_first_can_be_grouped() -> None:
    selection = ss.select_layers(CifarResNet(20))
    assert [skipped.name for skipped in selection.skipped] == ["conv1", "fc"]
    assert len(selection.layers) == 18


def test_the_converted_network_equals_the_masked_one() -> None:
    torch.manual_seed(0)
    model = CifarResNet(20)
    model(torch.randn(8, 3, 32, 32))  # batch-norm statistics of their own
    plan = ss.one_shot_plan(model, target=0.5)
    masked = ss.mask_(copy.deepcopy(model), plan).eval()
    dense_scores = copy.deepcopy(model).eval()(IMAGES)
    converted = ss.convert_(model, plan).eval()
    torch.testing.assert_close(converted(IMAGES), masked(IMAGES), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(masked(IMAGES), dense_scores, rtol=1e-2, atol=1e-2)
    kept_params = sum(parameter.numel() for parameter in converted.parameters())
    assert 0.5 <= 1 - kept_params / 269_722 <= 0.51
