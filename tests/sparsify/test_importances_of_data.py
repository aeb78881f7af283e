"""Sparse training by an importance that reads calibration images."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from sparse_training import CONFIG, labelled_images, network, train
from torch import nn
from torch.nn.utils import parameters_to_vector

import strucspars as ss

BY_ACTIVATION = replace(CONFIG, importance="activation")


def half_dead_images() -> torch.Tensor:
    """Of eight channels, the last four hold nothing."""
    images = torch.randn(16, 8, 6, 6, generator=torch.Generator().manual_seed(0))
    images[:, 4:] = 0
    return images


def equal_layer() -> nn.Module:
    """A layer whose weights all are alike, so that only the images tell its connections apart."""
    layer = nn.Conv2d(8, 8, 1, bias=False)
    nn.init.ones_(layer.weight)
    return nn.Sequential(layer)


def penalty_gradient(sparsifier: ss.Sparsifier, model: nn.Module) -> torch.Tensor:
    """The force of the penalty on each connection of the only layer, in the learned orders."""
    state = sparsifier.state_dict()
    state["controller"]["lambda_value"] = 1.0
    sparsifier.load_state_dict(state)
    model.zero_grad()
    sparsifier.penalty().backward()  # type: ignore[no-untyped-call]  # in torch
    (order,) = state["layers"].values()
    gradient = model.get_parameter("0.weight").grad
    assert gradient is not None
    return gradient[order["out_perm"]][:, order["in_perm"], 0, 0]


@pytest.mark.parametrize("name", ["activation", "fisher"])
def test_channels_that_hold_nothing_do_not_matter_and_are_penalised_most(name: str) -> None:
    model = equal_layer()
    config = ss.SparsifyConfig(target=0.4, epochs=5, importance=name)
    sparsifier = ss.Sparsifier(model, config, calibration=[half_dead_images()])
    importance = sparsifier.importances()["0"]
    assert not importance[:, 4:].any()
    assert importance[:, :4].all()
    forces = penalty_gradient(sparsifier, model)
    in_perm = sparsifier.state_dict()["layers"]["0"]["in_perm"]
    # Level 1 penalises the two off-diagonal quarters.
    off_diagonal = torch.cat([forces[:4, 4:].flatten(), forces[4:, :4].flatten()])
    dead = torch.cat([(in_perm[4:] >= 4).repeat(4), (in_perm[:4] >= 4).repeat(4)])
    assert off_diagonal[dead].min() > off_diagonal[~dead].max() > 0


def test_images_are_read_anew_after_every_epoch() -> None:
    model = network()
    sparsifier = ss.Sparsifier(model, BY_ACTIVATION, calibration=[labelled_images()])
    before = sparsifier.importances()
    train(model, sparsifier, 1)
    assert not all((sparsifier.importances()[name] == before[name]).all() for name in before)


def test_a_training_resumed_with_the_same_images_continues_exactly() -> None:
    model = network()
    sparsifier = ss.Sparsifier(model, BY_ACTIVATION, calibration=[labelled_images()])
    train(model, sparsifier, 3)
    resumed_model = network(seed=9)
    resumed = ss.Sparsifier(resumed_model, BY_ACTIVATION, calibration=[labelled_images()])
    resumed_model.load_state_dict(copy.deepcopy(model.state_dict()))
    resumed.load_state_dict(copy.deepcopy(sparsifier.state_dict()))
    train(model, sparsifier, 2)
    train(resumed_model, resumed, 2)
    torch.testing.assert_close(
        parameters_to_vector(resumed_model.parameters()), parameters_to_vector(model.parameters()), rtol=0, atol=0
    )
    assert resumed.plan() == sparsifier.plan()


def test_states_saved_before_penalties_were_scaled_are_read() -> None:
    sparsifier = ss.Sparsifier(network(), CONFIG)
    state: dict[str, Any] = copy.deepcopy(sparsifier.state_dict())
    for layer in state["layers"].values():
        del layer["penalty_scale"]
    sparsifier.load_state_dict(state)
    assert sparsifier.state_dict()["layers"].keys() == state["layers"].keys()


def test_an_importance_that_reads_images_needs_some() -> None:
    with pytest.raises(ValueError, match="layer '2': importance 'activation' needs calibration images"):
        ss.Sparsifier(network(), BY_ACTIVATION)


def test_images_that_nothing_reads_are_refused() -> None:
    with pytest.raises(ValueError, match="importance 'l1' reads no calibration images; set importance='activation'"):
        ss.Sparsifier(network(), CONFIG, calibration=[torch.randn(2, 4, 8, 8)])
