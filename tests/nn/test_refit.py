import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import strucspars as ss
from strucspars.nn.layers import ShuffledGroupConv2d, group_module_
from strucspars.nn.refit import PatchMoments, can_be_refitted, ridge_solution

LAYERS = [
    (nn.Conv2d(4, 6, 3, stride=2, padding=1), (5, 4, 9, 8)),
    (nn.Conv2d(4, 6, (1, 3), padding="same", dilation=2, padding_mode="reflect"), (5, 4, 6, 7)),
    (nn.Conv2d(4, 8, 3, groups=2, bias=False), (5, 4, 6, 6)),
    (nn.Conv2d(6, 6, 3, groups=6, padding=1), (5, 6, 6, 6)),
    (nn.Conv1d(4, 6, 3, padding=1), (5, 4, 12)),
    (nn.Conv3d(2, 4, 2), (5, 2, 5, 4, 4)),
    (nn.Linear(4, 6), (50, 4)),
    (nn.Linear(4, 6), (5, 7, 4)),
]


def images(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def shuffled() -> ShuffledGroupConv2d:
    torch.manual_seed(0)
    layer = nn.Conv2d(8, 8, 3, padding=1)
    out_perm, in_perm = torch.randperm(8).numpy(), torch.randperm(8).numpy()
    group_module_(layer, ss.LayerPlan(group_level=2, weight_shape=(8, 8, 3, 3), out_perm=out_perm, in_perm=in_perm))
    assert isinstance(layer, ShuffledGroupConv2d)
    return layer


@pytest.mark.parametrize(("layer", "shape"), [*LAYERS, (shuffled(), (5, 8, 6, 6))], ids=str)
def test_fit_recovers_the_weight_that_made_the_outputs(layer: nn.Module, shape: tuple[int, ...]) -> None:
    inputs = images(40, *shape[1:])
    moments = PatchMoments(layer)
    for batch in torch.split(inputs, 16):
        moments.add(batch, layer(batch))
    weight = layer.get_parameter("weight").detach()
    has_bias = layer._parameters["bias"] is not None
    fitted = moments.fitted(torch.zeros_like(weight), ridge=1e-7, has_bias=has_bias)
    torch.testing.assert_close(fitted.float(), weight, rtol=1e-3, atol=1e-3)
    expected = layer(inputs).movedim(-1 if isinstance(layer, nn.Linear) else 1, -1).reshape(-1, len(weight))
    mean = moments.output_mean(weight) + (layer.get_parameter("bias") if has_bias else 0)
    torch.testing.assert_close(mean.float(), expected.mean(0), rtol=1e-4, atol=1e-5)


def test_fit_equals_ridge_regression_on_all_samples() -> None:
    layer = nn.Conv2d(3, 4, 1)
    inputs, wanted = images(6, 3, 4, 4) + 2, images(6, 4, 4, 4, seed=1)
    moments = PatchMoments(layer)
    moments.add(inputs, wanted)
    start = layer.weight.detach().flatten(1).double()
    x, t = (each.double().movedim(1, -1).flatten(0, 2) for each in (inputs, wanted))
    x, t = x - x.mean(0), t - t.mean(0)
    strength = 0.1 * x.square().mean()
    # Least squares with a row per weight that asks it to stay what it is.
    rows = torch.cat([x, (strength * len(x)).sqrt() * torch.eye(3)])
    asked = torch.cat([t, (strength * len(x)).sqrt() * start.T])
    expected = torch.linalg.lstsq(rows, asked).solution.T
    found = moments.fitted(layer.weight.detach(), ridge=0.1).flatten(1)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@settings(max_examples=20)
@given(st.integers(0, 1000), st.floats(1e-4, 1))
def test_fit_never_increases_the_error_that_it_minimises(seed: int, ridge: float) -> None:
    layer = nn.Conv2d(4, 4, 1, bias=False)
    moments = PatchMoments(layer)
    inputs, wanted = images(3, 4, 3, 3, seed=seed), images(3, 4, 3, 3, seed=seed + 1)
    moments.add(inputs, wanted)
    start = images(4, 4, 1, 1, seed=seed + 2)

    def error(weight: torch.Tensor) -> float:
        left = wanted - torch.nn.functional.conv2d(inputs, weight.float())
        return float((left - left.mean((0, 2, 3), keepdim=True)).square().mean())

    assert error(moments.fitted(start, ridge=ridge)) <= error(start) * (1 + 1e-5)


def test_what_is_held_out_keeps_a_fit_from_following_noise() -> None:
    layer, errors = nn.Conv2d(30, 4, 1), []
    inputs, noise = images(60, 30, 1, 1), 3 * images(60, 4, 1, 1, seed=1)
    for held_out in (False, True):
        moments = PatchMoments(layer)
        for place, batch in enumerate(torch.split(inputs, 15)):
            moments.add(
                batch, layer(batch).detach() + noise[15 * place : 15 * place + 15], held_out=held_out and place == 3
            )
        errors.append(float((moments.fitted(layer.weight.detach()) - layer.weight.detach()).square().sum()))
    assert errors[1] < 0.9 * errors[0]


def test_solution_without_data_is_the_present_weight() -> None:
    weight = torch.ones(2, 3).double()
    nothing = torch.zeros(3, 3).double(), torch.zeros(2, 3).double()
    torch.testing.assert_close(ridge_solution(*nothing, weight, ridge=0.01), weight)


def test_a_group_whose_inputs_are_constant_keeps_its_weight() -> None:
    layer = nn.Conv2d(4, 4, 1, groups=2)
    inputs = images(50, 4, 3, 3)
    inputs[:, 2:] = 0.1
    moments = PatchMoments(layer)
    for batch in torch.split(inputs, 10):
        moments.add(batch, images(len(batch), 4, 3, 3, seed=1))
    fitted = moments.fitted(layer.weight.detach(), ridge=1e-3)
    torch.testing.assert_close(fitted[2:].float(), layer.weight.detach()[2:])
    assert not torch.allclose(fitted[:2].float(), layer.weight.detach()[:2])


def test_few_positions_of_every_image_give_about_the_same_fit() -> None:
    layer, inputs = nn.Conv2d(4, 4, 3), images(64, 4, 12, 12)
    weights = []
    for limit in (None, 20):
        moments = PatchMoments(layer, max_positions=limit)
        moments.add(inputs, layer(inputs) + 0.1 * images(64, 4, 10, 10, seed=1))
        weights.append(moments.fitted(layer.weight.detach()))
    assert not torch.equal(*weights)
    torch.testing.assert_close(*weights, rtol=0, atol=0.03)


def test_layers_of_other_types_or_with_a_forward_of_their_own_are_left_alone() -> None:
    class Subclass(nn.Conv2d):
        pass

    replaced = nn.Linear(2, 2)
    replaced.forward = copy.copy(replaced.forward)  # type: ignore[method-assign]  # what users do
    assert not any(map(can_be_refitted, (Subclass(2, 2, 1), nn.ConvTranspose2d(2, 2, 1), nn.ReLU(), replaced)))
    assert can_be_refitted(nn.Linear(2, 2))
