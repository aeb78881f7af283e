"""What only a GPU can show. Skipped, visibly, where there is none."""

import pytest
import torch

from strucspars.models.cifar import PreactivationResNet
from strucspars.train.slimming import SlimmingPenalty, select_channels, slim_

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")


def test_the_penalty_can_be_captured() -> None:
    model = PreactivationResNet(20).cuda()
    penalty = SlimmingPenalty(model, 0.5)
    penalty.add_gradient_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        penalty.add_gradient_()
    with torch.no_grad():
        model.bn.weight.neg_()
    assert model.bn.weight.grad is not None
    model.bn.weight.grad.zero_()
    graph.replay()
    assert torch.equal(model.bn.weight.grad, torch.full_like(model.bn.weight, -0.5))


def test_a_network_is_slimmed_on_the_device() -> None:
    model = PreactivationResNet(20).cuda()
    slim_(model, select_channels(model, target=0.5))
    assert all(tensor.is_cuda for tensor in model.state_dict().values())
    torch.autograd.backward(model(torch.randn(4, 3, 32, 32, device="cuda")).square().mean())
    assert all(parameter.grad is not None for parameter in model.parameters())
