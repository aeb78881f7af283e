"""The state of a sparsifier: saved, restored, refused."""

import copy
import io
from dataclasses import replace
from typing import Any

import pytest
import torch
from sparse_training import CONFIG, network, sparsifier_with_penalty, train
from torch import nn

import strucspars as ss


def saved(state: dict[str, Any]) -> dict[str, Any]:
    """Through a file, as a checkpoint goes, without trusting it."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def test_a_resumed_run_continues_exactly() -> None:
    model = network()
    sparsifier = ss.Sparsifier(model, CONFIG)
    train(model, sparsifier, 3)
    resumed_model = network(seed=9)
    resumed = ss.Sparsifier(resumed_model, CONFIG)
    resumed_model.load_state_dict(copy.deepcopy(model.state_dict()))
    resumed.load_state_dict(saved(sparsifier.state_dict()))
    reports, resumed_reports = train(model, sparsifier, 3), train(resumed_model, resumed, 3)
    assert [replace(report, seconds=0) for report in reports] == [
        replace(report, seconds=0) for report in resumed_reports
    ]
    torch.testing.assert_close(resumed_model.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert resumed.plan() == sparsifier.plan()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
def test_a_state_may_be_loaded_to_a_gpu_first() -> None:
    sparsifier, other = ss.Sparsifier(network(), CONFIG), ss.Sparsifier(network(seed=9), CONFIG)
    file = io.BytesIO()
    torch.save(sparsifier.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, map_location="cuda", weights_only=True))
    torch.testing.assert_close(other.state_dict()["layers"], sparsifier.state_dict()["layers"])


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    sparsifier = sparsifier_with_penalty(network())
    state = sparsifier.state_dict()
    bad_orders = copy.deepcopy(state)
    bad_orders["layers"]["4"]["in_perm"][0] = 1
    for bad, complaint in (
        ({**state, "version": 99}, "version 99"),
        ({**state, "config": {**state["config"], "target": 0.1}}, "other options: target"),
        ({**state, "layers": {"other": {}}}, r"belongs to the layers \['other'\]"),
        (bad_orders, "layer '4': in_perm is not a permutation"),
    ):
        before = sparsifier.penalty().item()
        with pytest.raises(ValueError, match=complaint):
            sparsifier.load_state_dict(bad)
        assert sparsifier.penalty().item() == before


def test_a_state_with_an_option_that_is_not_known_here_names_it() -> None:
    sparsifier = ss.Sparsifier(network(), CONFIG)
    state = sparsifier.state_dict()
    with pytest.raises(ValueError, match="saved with other options: later_option; use the same config"):
        sparsifier.load_state_dict(state | {"config": state["config"] | {"later_option": 1}})


def test_a_state_saved_with_other_rules_is_refused() -> None:
    state = ss.Sparsifier(network(), CONFIG).state_dict()
    limited = ss.Sparsifier(network(), replace(CONFIG, largest_levels={"2": 3}))
    with pytest.raises(ValueError, match="saved with other options: largest_levels; use the same config"):
        limited.load_state_dict(state)
    with pytest.raises(ValueError, match="version -3"):
        limited.load_state_dict({"version": -3})


def test_a_state_with_an_impossible_level_changes_nothing() -> None:
    sparsifier = sparsifier_with_penalty(network())
    before = str(sparsifier.state_dict())
    further = sparsifier_with_penalty(network(seed=5))
    further.end_epoch()
    other = further.state_dict()
    bad_level = copy.deepcopy(other)
    bad_level["layers"]["4"]["group_level"] = 6
    for bad, complaint in (
        (bad_level, r"group_level must lie in 1\.\.5 for a 16 x 32 layer"),
        ({**other, "version": 0}, "version 0"),
    ):
        with pytest.raises(ValueError, match=complaint):
            sparsifier.load_state_dict(bad)
        assert str(sparsifier.state_dict()) == before


def test_a_state_of_the_same_layers_in_another_order_is_refused() -> None:
    # Of one width, so that the orders of one would fit the other.
    sparsifier = ss.Sparsifier(nn.Sequential(nn.Conv2d(16, 16, 1), nn.Conv2d(16, 16, 1)), CONFIG)
    state = sparsifier.state_dict()
    turned = dict(reversed(state["layers"].items()))
    with pytest.raises(ValueError, match=r"belongs to the layers \['1', '0'\], the model has \['0', '1'\]"):
        sparsifier.load_state_dict(state | {"layers": turned})


def test_every_number_of_the_controller_comes_back() -> None:
    # A fresh network removes nothing, so training alone leaves the fraction at its default.
    sparsifier = ss.Sparsifier(network(), CONFIG)
    controller = {"epoch": 3, "lambda_value": 2e-3, "removed_fraction": 0.3, "outside_norm": 0.2}
    controller |= {"first_outside_norm": 0.4, "reach": 2.0, "force": 0.1, "resistance": 1e-3, "is_bounded": True}
    sparsifier.load_state_dict(saved(sparsifier.state_dict() | {"controller": controller}))
    assert sparsifier.state_dict()["controller"] == controller
