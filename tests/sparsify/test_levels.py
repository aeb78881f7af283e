import itertools

import numpy as np
import pytest
import torch
from torch import nn

import strucspars as ss
from strucspars.nn.refit import PatchMoments
from strucspars.sparsify import levels
from strucspars.sparsify.calibration import Calibration, divergence, hooked, ignore_progress, logits_of
from strucspars.sparsify.levels import (
    DivergenceMeter,
    expected_loss,
    layer_data,
    losses_by_level,
    refit_change,
    with_statistics,
)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    convolutions = nn.Conv2d(4, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 1)
    return nn.Sequential(*convolutions, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5)).eval()


def images(count: int = 64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return list(torch.split(torch.randn(count, 4, 6, 6, generator=generator) * 2, 16))


@pytest.mark.parametrize("name", ["0", "2", "4", "8"])
def test_a_change_is_measured_without_what_a_bias_makes_up_for(name: str) -> None:
    model, changed = network(), network()
    module, data = model.get_submodule(name), Calibration.of(images(64))
    change = 0.3 * torch.randn(module.get_parameter("weight").shape, generator=torch.Generator().manual_seed(2))
    moments = PatchMoments(module)
    with hooked([module], lambda _, inputs, __: moments.add(inputs[0])), torch.no_grad():
        model(torch.cat(data.images))
    changed.get_parameter(f"{name}.weight").data += change
    changed.get_parameter(f"{name}.bias").data -= moments.output_mean(change).float()
    measured = DivergenceMeter(model, data).after(module, change.flatten(1), moments.mean_input[0].float())
    assert measured == pytest.approx(divergence(model, changed, data.images), rel=1e-4)
    assert torch.equal(module.get_parameter("weight"), network().get_parameter(f"{name}.weight"))


def test_the_error_that_a_change_makes_is_weighed_by_the_gradients() -> None:
    """At one position per image the sum over channels misses only that their errors are correlated."""
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3)).eval()
    data = Calibration.of([torch.randn(64, 6, generator=torch.Generator().manual_seed(3)) for _ in range(16)])
    layers = ss.select_layers(model, ss.SparsifyConfig(target=0.1, layer_types=("Linear",))).layers
    known = layer_data(model, layers, data, ignore_progress)[0]
    inputs = torch.cat(data.images)
    torch.testing.assert_close(known.covariance, torch.cov(inputs.T, correction=0), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(known.mean_input, inputs.mean(0), rtol=1e-4, atol=1e-5)
    for channel in range(4):
        change = torch.zeros(4, 6)
        change[channel] = 0.02 * torch.randn(6, generator=torch.Generator().manual_seed(channel))
        measured = DivergenceMeter(model, data).after(layers[0].module, change, known.mean_input)
        # The gradients are drawn at random, of the first images.
        assert expected_loss(known, change) == pytest.approx(measured, rel=0.5)


def test_losses_are_what_is_measured_at_the_measured_levels_and_never_fall() -> None:
    model, data = network(), Calibration.of(images(64))
    layers = ss.select_layers(model).layers
    known = layer_data(model, layers, data, ignore_progress)
    natural = {
        level: [(np.arange(layer.weight_shape[0]), np.arange(layer.weight_shape[1])) for layer in layers]
        for level in range(2, 6)
    }
    losses = losses_by_level(model, layers, known, natural.__getitem__, data, ignore_progress)
    meter = DivergenceMeter(model, data.first(levels.IMAGES_FOR_DIVERGENCE))
    for place, (layer, own) in enumerate(zip(layers, known, strict=True)):
        found = losses[layer.name]
        assert len(found) == layer.largest_level
        assert found[0] == 0
        assert found == sorted(found)
        change = refit_change(layer, own, natural[2][place], 2)
        assert found[1] == pytest.approx(meter.after(layer.module, change, own.mean_input), rel=1e-5)


def test_the_plan_of_least_measured_loss_keeps_what_the_predictions_need() -> None:
    model = network()
    with torch.no_grad():  # nothing reaches the predictions through the second half of these channels
        model.get_parameter("4.weight")[:, 8:] = 0
    plan = ss.one_shot_plan(model, 0.2, calibration=images())
    larger = ss.one_shot_plan(model, 0.5, calibration=images())
    assert plan.predicted_divergence is not None
    assert larger.predicted_divergence is not None
    assert plan.predicted_divergence < larger.predicted_divergence


@pytest.mark.parametrize(
    "rules",
    [
        {"fixed_levels": {"2": 3}},
        {"largest_levels": {"2": 2}},
        {"min_channels_per_group": 8},
        {"exclude": ("4",)},
        {"budget": "macs"},
        {"importance": "activation"},
        {"importance": "fisher"},
    ],
    ids=str,
)
def test_levels_respect_the_options_and_meet_the_target(rules: dict[str, object]) -> None:
    config = ss.SparsifyConfig(target=0.3, **rules)  # type: ignore[arg-type]  # values of several types
    plan = ss.one_shot_plan(network(), config, calibration=images())
    found = {name: layer.group_level for name, layer in plan.layers.items()}
    removed = plan.removed_mac_fraction if config.budget == "macs" else plan.removed_param_fraction
    assert removed is not None
    assert removed >= 0.3
    assert found["2"] == 3 or "fixed_levels" not in rules
    assert found["2"] <= 2 or "largest_levels" not in rules
    assert max(found.values()) <= 2 or "min_channels_per_group" not in rules
    assert "4" not in found or "exclude" not in rules


def test_a_target_out_of_reach_is_refused_with_images_too() -> None:
    with pytest.raises(ValueError, match=r"target 0\.99 cannot be reached"):
        ss.one_shot_plan(network(), 0.99, calibration=images())


@pytest.mark.parametrize("importance", ["activation", "fisher"])
def test_an_importance_that_needs_images_says_so(importance: str) -> None:
    with pytest.raises(ValueError, match="needs calibration images; give calibration=batches"):
        ss.one_shot_plan(network(), ss.SparsifyConfig(target=0.3, importance=importance))


def test_statistics_are_those_of_the_inputs_and_of_the_gradients_of_the_labels() -> None:
    model, photos = network(), images(8)
    labels = torch.arange(8) % 5
    layers = ss.select_layers(model).layers
    data = Calibration.of(zip(photos, [labels], strict=True))
    found = with_statistics(model, layers, ("inputs", "gradients"), data)[1]
    module = model[2]
    with torch.no_grad():
        read = model[:2](photos[0])
    assert found.input_second_moment is not None
    np.testing.assert_allclose(found.input_second_moment, read.square().mean((0, 2, 3)).numpy(), rtol=1e-5)
    gradients = []
    for photo, label in zip(photos[0], labels, strict=True):
        loss = -nn.functional.cross_entropy(model(photo[None]), label[None])
        gradients.append(torch.autograd.grad(loss, module.get_parameter("weight"))[0])
    stacked = torch.stack(gradients)
    assert found.gradient is not None
    assert found.squared_gradient is not None
    np.testing.assert_allclose(found.gradient, stacked.mean(0).numpy(), atol=1e-5)
    np.testing.assert_allclose(found.squared_gradient, stacked.square().mean(0).numpy(), atol=1e-5)


def test_a_single_logit_is_read_as_that_of_a_yes() -> None:
    assert logits_of(torch.tensor([[2.0]])).softmax(1)[0, 0, 0].item() == pytest.approx(
        torch.tensor(2.0).sigmoid().item()
    )
    with pytest.raises(ValueError, match="returns no floating-point tensor; wrap it"):
        logits_of({"labels": torch.tensor([1])})


def test_images_are_split_into_those_that_fit_and_those_that_measure() -> None:
    data = Calibration.of(images(80))
    fit, held = data.split()
    assert (len(fit), len(held)) == (64, 16)
    assert {id(each) for each in itertools.chain(fit.images, held.images)} == set(map(id, data.images))
    assert len(data.first(20)) == 32
