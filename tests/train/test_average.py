import copy

import torch
from torch import nn

from strucspars.train.steps import AveragedModel


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5))


def test_the_average_equals_a_slow_reference_over_several_steps() -> None:
    model = network()
    average = AveragedModel(model, 0.7)
    expected = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        torch.autograd.backward(model(torch.randn(8, 3, 6, 6)).square().mean())
        optimizer.step()
        average.update_()
        average.copy_counters_()
        for name, value in model.state_dict().items():
            expected[name] = 0.7 * expected[name] + 0.3 * value if value.is_floating_point() else value.clone()
    torch.testing.assert_close(average.model.state_dict(), expected)
    assert average.model.get_buffer("1.num_batches_tracked").item() == 5
    moved = average.model.get_parameter("0.weight") - model.get_parameter("0.weight")
    assert moved.abs().max() > 1e-4


def test_the_average_follows_weights_that_are_loaded() -> None:
    model = network()
    average = AveragedModel(model, 0.5)
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
    before = average.model.get_parameter("0.weight").clone()
    average.update_()
    torch.testing.assert_close(average.model.get_parameter("0.weight"), before + 0.5)


def test_the_average_is_not_trained_and_stays_in_evaluation_mode() -> None:
    average = AveragedModel(network(), 0.9)
    assert not average.model.training
    assert not any(parameter.requires_grad for parameter in average.model.parameters())


def test_what_has_two_names_follows_as_slowly_as_the_rest() -> None:
    model = network()
    model.add_module("norm_again", model[1])
    model.add_module("tied", nn.Conv2d(3, 4, 3, bias=False))
    model.get_submodule("tied").weight = model[0].weight
    average = AveragedModel(model, 0.7)
    expected = {name: 0.7 * value + 0.3 * (value + 1) for name, value in model.state_dict().items()}
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.add_(1)
    average.update_()
    floating = {name: value for name, value in average.model.state_dict().items() if value.is_floating_point()}
    torch.testing.assert_close(floating, {name: expected[name] for name in floating})
