import pytest
import torch

import strucspars as ss
from strucspars.models.cifar import PreactivationResNet


@pytest.mark.parametrize(
    ("depth", "params", "paper_flops_e7"), [(20, 219_482, 3.53), (56, 590_426, 9.16), (110, 1_146_842, 17.59)]
)
def test_parameters_and_flops_are_those_of_table_1(depth: int, params: int, paper_flops_e7: float) -> None:
    count = ss.count_macs(PreactivationResNet(depth), torch.zeros(1, 3, 32, 32))
    assert count.params == params
    assert round(count.paper_flops / 1e7, 2) == paper_flops_e7


def test_every_convolution_but_the_first_can_be_grouped() -> None:
    selection = ss.select_layers(PreactivationResNet(20))
    assert [skipped.name for skipped in selection.skipped] == ["conv1", "fc"]
    assert len(selection.layers) == 18 + 3  # three per block, and the shortcuts


def test_gradients_reach_every_parameter() -> None:
    model = PreactivationResNet(20, num_classes=100)
    scores = model(torch.randn(2, 3, 32, 32))
    assert scores.shape == (2, 100)
    torch.autograd.backward(scores.square().sum())
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())


@pytest.mark.parametrize("depth", [0, 2, 18, 50])
def test_an_impossible_depth_is_named(depth: int) -> None:
    with pytest.raises(ValueError, match=f"depth must be 9 n \\+ 2.*got {depth}"):
        PreactivationResNet(depth)


@pytest.mark.parametrize(
    "depth_and_target", [(20, 0.2), (20, 0.4), (56, 0.3), (56, 0.5), (56, 0.6), (56, 0.7), (110, 0.6)]
)
def test_the_papers_rates_are_met_within_a_point(depth_and_target: tuple[int, float]) -> None:
    depth, target = depth_and_target
    torch.manual_seed(0)
    plan = ss.one_shot_plan(PreactivationResNet(depth), target=target)
    assert target <= plan.removed_param_fraction <= target + 0.01
