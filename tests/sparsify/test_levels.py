import itertools

import numpy as np
import pytest
import torch
from torch import nn

import strucspars as ss
from strucspars.nn.refit import PatchMoments
from strucspars.sparsify.calibration import Calibration, Coherence, divergence, hooked, ignore_progress, logits_of
from strucspars.sparsify.levels import changed_divergence, measured_losses, with_statistics


def network() -> nn.Sequential:
    torch.manual_seed(0)
    convolutions = nn.Conv2d(4, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 1)
    return nn.Sequential(*convolutions, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5)).eval()


def images(count: int = 64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return list(torch.split(torch.randn(count, 4, 6, 6, generator=generator) * 2, 16))


@pytest.mark.parametrize("name", ["0", "2", "4", "8"])
def test_the_measured_loss_of_a_small_change_is_the_divergence_that_it_causes(name: str) -> None:
    model, changed = network(), network()
    module = model.get_submodule(name)
    change = 0.003 * torch.randn(module.get_parameter("weight").shape, generator=torch.Generator().manual_seed(2))
    data = Calibration.of(images(512))
    means = {module: torch.zeros(change.flatten(1).shape[1])}
    predicted = measured_losses(model, {module: [change.flatten(1)]}, means, data, ignore_progress)[module][0]
    changed.get_parameter(f"{name}.weight").data += change
    # A mean over 512 random numbers.
    assert predicted == pytest.approx(divergence(model, changed, data.images), rel=0.2)


@pytest.mark.parametrize("name", ["0", "8"])
def test_a_change_that_a_bias_makes_up_for_is_measured_without_what_the_bias_takes(name: str) -> None:
    model, changed = network(), network()
    module, data = model.get_submodule(name), Calibration.of(images(64))
    change = 0.3 * torch.randn(module.get_parameter("weight").shape, generator=torch.Generator().manual_seed(2))
    moments = PatchMoments(module)
    read: list[torch.Tensor] = []
    with hooked([module], lambda _, inputs, __: read.append(inputs[0])), torch.no_grad():
        model(torch.cat(data.images))
    moments.add(read[0])
    changed.get_parameter(f"{name}.weight").data += change
    changed.get_parameter(f"{name}.bias").data -= moments.output_mean(change).float()
    measured = changed_divergence(model, module, change.flatten(1), moments.mean_input[0].float(), data)
    assert measured == pytest.approx(divergence(model, changed, data.images), rel=1e-4)
    assert torch.equal(module.get_parameter("weight"), network().get_parameter(f"{name}.weight"))


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
    levels = {name: layer.group_level for name, layer in plan.layers.items()}
    removed = plan.removed_mac_fraction if config.budget == "macs" else plan.removed_param_fraction
    assert removed is not None
    assert removed >= 0.3
    assert levels["2"] == 3 or "fixed_levels" not in rules
    assert levels["2"] <= 2 or "largest_levels" not in rules
    assert max(levels.values()) <= 2 or "min_channels_per_group" not in rules
    assert "4" not in levels or "exclude" not in rules


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


def test_coherence_is_one_where_all_positions_pull_alike_and_none_where_they_differ() -> None:
    module, random = nn.Conv2d(4, 4, 1), torch.randn(50, 20, 4, generator=torch.Generator().manual_seed(0))
    for gradients, expected in ((random, 0.0), (random[:, :1].expand(50, 20, 4), 1.0)):
        coherence = Coherence()
        coherence.visit(module, gradients)
        assert coherence.of(module) == pytest.approx(expected, abs=0.02)


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
