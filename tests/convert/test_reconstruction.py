import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import strucspars as ss


class Block(nn.Module):
    def __init__(self, width: int, *, readable: bool = True) -> None:
        super().__init__()
        self.one = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm_one = nn.BatchNorm2d(width)
        self.two = nn.Conv2d(width, width, 1, bias=False)
        self.norm_two = nn.BatchNorm2d(width)
        self.readable = readable

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if not self.readable and inputs.sum() > 1e9:
            return inputs
        hidden: torch.Tensor = self.norm_one(self.one(inputs)).relu_()
        hidden = self.norm_two(self.two(hidden))
        hidden += inputs
        return hidden.relu_()


def network(*, readable: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Conv2d(4, 16, 3, padding=1), nn.ReLU(), Block(16, readable=readable), Block(16, readable=readable)
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5))
    ss.recalibrate_(model, batches())
    return model.eval()


def batches() -> list[torch.Tensor]:
    """Images whose channels are correlated, so that the kept ones can stand in for the others."""
    generator = torch.Generator().manual_seed(1)
    mixing = torch.randn(2, 4, generator=generator)
    return [torch.einsum("nchw,cd->ndhw", torch.randn(16, 2, 6, 6, generator=generator), mixing) for _ in range(6)]


def error(model: nn.Module, dense: nn.Module) -> float:
    with torch.no_grad():
        return sum(float((model(images) - dense(images)).square().sum()) for images in batches())


def grouped(dense: nn.Module, target: float = 0.4) -> nn.Module:
    return ss.convert_(copy.deepcopy(dense), ss.one_shot_plan(dense, target))


@pytest.mark.parametrize("readable", [True, False])
def test_a_network_that_is_not_compressed_computes_the_same_afterwards(readable: bool) -> None:
    dense = network(readable=readable)
    model = copy.deepcopy(dense)
    ss.reconstruct_(model, dense, batches())
    tolerance = 0 if readable else 0.01
    torch.testing.assert_close(model(batches()[0]), dense(batches()[0]), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("readable", [True, False])
def test_reconstruction_comes_nearer_than_recalibration(readable: bool, caplog: pytest.LogCaptureFixture) -> None:
    dense = network(readable=readable)
    model, recalibrated = grouped(dense), grouped(dense)
    before = copy.deepcopy(dense.state_dict())
    ss.reconstruct_(model, dense, batches())
    ss.recalibrate_(model, batches())
    ss.recalibrate_(recalibrated, batches())
    assert error(model, dense) < (0.5 if readable else 0.8) * error(recalibrated, dense)
    torch.testing.assert_close(dict(dense.state_dict()), dict(before), rtol=0, atol=0)
    assert ("could not be traced" in caplog.text) is not readable


class NormsFirst(nn.Module):
    """A pre-activation block, whose norms see sums and what other norms gave."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_one, self.norm_two = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.one, self.two = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.Conv2d(width, width, 1, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.one(self.norm_one(inputs).relu())
        outputs: torch.Tensor = self.two(self.norm_two(hidden).relu()) + inputs
        return outputs


def norms_first() -> nn.Sequential:
    torch.manual_seed(0)
    last = nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5)
    model = nn.Sequential(nn.Conv2d(4, 16, 3, padding=1), NormsFirst(16), NormsFirst(16), *last)
    for norm in (module for module in model.modules() if isinstance(module, nn.BatchNorm2d)):
        nn.init.uniform_(norm.weight, 0.5, 1.5)
        nn.init.normal_(norm.bias)
    ss.recalibrate_(model, batches())
    return model.eval()


@pytest.mark.parametrize("build", [network, norms_first])
def test_recalibration_after_reconstruction_changes_little(build: Callable[[], nn.Module]) -> None:
    dense = build()
    model = grouped(dense)
    ss.reconstruct_(model, dense, batches())
    again = copy.deepcopy(model)
    ss.recalibrate_(again, [torch.cat(batches())])
    for images in batches():
        torch.testing.assert_close(again(images), model(images), rtol=0.02, atol=0.02)


def test_types_modes_orders_and_the_identity_of_parameters_stay() -> None:
    dense = network()
    model = grouped(dense).train()
    parameters, plan = list(model.parameters()), ss.model_plan(model)
    ss.reconstruct_(model, dense, batches())
    assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
    assert ss.model_plan(model) == plan
    assert all(module.training for module in model.modules())
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())


def test_weights_that_several_calls_share_are_left_alone() -> None:
    shared = nn.Conv2d(4, 4, 1)
    dense = nn.Sequential(shared, nn.ReLU(), shared, nn.Conv2d(4, 8, 1))
    model = copy.deepcopy(dense)
    with torch.no_grad():
        model.get_parameter("3.weight").zero_()
    ss.reconstruct_(model, dense, batches(), ridge=1e-4)
    assert torch.equal(model.get_parameter("0.weight"), dense.get_parameter("0.weight"))
    torch.testing.assert_close(model(batches()[0]), dense(batches()[0]), rtol=0.02, atol=0.02)


def test_a_generator_of_pairs_and_batches_of_one_image_will_do() -> None:
    def pairs() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for images in torch.split(torch.cat(batches()), 1):
            yield images, torch.zeros(1)

    dense = network()
    model = grouped(dense)
    ss.reconstruct_(model, dense, pairs())
    assert error(model, dense) < 0.5 * error(grouped(dense), dense)


def test_no_batches_and_another_network_are_refused() -> None:
    dense = network()
    with pytest.raises(ValueError, match="batches holds no batch"):
        ss.reconstruct_(grouped(dense), dense, [])
    with pytest.raises(ValueError, match="is not in the dense network; give the network that was compressed"):
        ss.reconstruct_(grouped(dense), nn.Sequential(nn.Conv2d(4, 4, 1), nn.Flatten()), batches())


def test_progress_ends_with_all_of_the_work_done() -> None:
    dense, seen = network(), list[tuple[str, int, int]]()
    ss.reconstruct_(grouped(dense), dense, batches(), on_progress=lambda *told: seen.append(told))
    what, done, total = seen[-1]
    assert what == "reconstruction"
    assert done == total
