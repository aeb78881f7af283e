"""What only a GPU can show. Skipped, visibly, where there is none."""

import copy

import pytest
import torch
from torch import nn

import strucspars as ss

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")

CONFIG = ss.SparsifyConfig(target=0.4, epochs=8, controller="paper", lambda_step=1e-3, lambda_warmup=1 / 8)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 16, 1)).cuda()


def penalised(model: nn.Module) -> ss.Sparsifier:
    sparsifier = ss.Sparsifier(model, CONFIG)
    for _ in range(2):
        sparsifier.end_epoch()
    return sparsifier


def test_the_gradient_added_equals_that_of_the_loss_term() -> None:
    model = network()
    sparsifier = penalised(model)
    torch.autograd.backward(sparsifier.penalty())
    by_loss = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    sparsifier.regularize_()
    assert by_loss[0] is not None
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], by_loss, rtol=1e-6, atol=1e-9)


def test_a_captured_step_follows_the_epochs_decisions() -> None:
    model = network()
    sparsifier = penalised(model)
    weight = model.get_parameter("0.weight")
    weight.grad = torch.zeros_like(weight)
    model.get_parameter("2.weight").grad = torch.zeros_like(model.get_parameter("2.weight"))
    sparsifier.regularize_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sparsifier.regularize_()
    before = sparsifier.lambda_value
    weight.grad.zero_()
    graph.replay()
    assert weight.grad.abs().max().item() == pytest.approx(before)
    sparsifier.end_epoch()
    assert sparsifier.lambda_value > before
    weight.grad.zero_()
    graph.replay()
    assert weight.grad.abs().max().item() == pytest.approx(sparsifier.lambda_value)


def test_scaled_gradients_get_the_unscaled_penalty() -> None:
    model = network()
    sparsifier = penalised(model)
    features = torch.randn(2, 16, 8, 8, device="cuda")
    torch.autograd.backward(model(features).square().mean() + sparsifier.penalty())
    expected = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.zero_grad()
    scaler = torch.amp.GradScaler("cuda", init_scale=256.0)
    scaler.scale(model(features).square().mean()).backward()
    scaler.unscale_(optimizer)
    sparsifier.regularize_()
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], expected, rtol=1e-4, atol=1e-6)


def test_the_converted_network_equals_the_masked_one() -> None:
    torch.backends.cudnn.allow_tf32 = False
    converted, masked = network(), network()
    plan = ss.one_shot_plan(converted, target=0.5)
    ss.convert_(converted, plan)
    ss.mask_(masked, plan)
    features = torch.randn(2, 16, 8, 8, device="cuda")
    torch.testing.assert_close(converted(features), masked(features), rtol=1e-4, atol=1e-5)


def test_compression_with_images_computes_on_the_gpu() -> None:
    torch.manual_seed(0)
    layers = nn.Conv2d(4, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.AdaptiveAvgPool2d(1)
    dense = nn.Sequential(*layers, nn.Flatten(), nn.Linear(16, 5)).eval()
    images = torch.randn(4, 16, 4, 9, 9)
    on_cpu, on_gpu = copy.deepcopy(dense), copy.deepcopy(dense).cuda()
    plans = [ss.compress(model, 0.3, calibration=images) for model in (on_cpu, on_gpu)]
    assert {parameter.device.type for parameter in on_gpu.parameters()} == {"cuda"}
    assert plans[1].predicted_divergence == pytest.approx(plans[0].predicted_divergence, rel=0.05)
