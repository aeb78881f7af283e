"""The paper's compression rates: what a one-shot plan removes lies at most one point above its target."""

import re
from functools import cache

import pytest
import torch
import torchvision

from strucspars.core.plan import GroupingPlan
from strucspars.nn.groupable import Selection, select_layers
from strucspars.sparsify.config import SparsifyConfig
from strucspars.sparsify.extensions import WholeNetwork
from strucspars.sparsify.planning import LayerState, learned_states, network_size, plan_for_target


def one_shot(target: float) -> SparsifyConfig:
    return SparsifyConfig(target=target, epochs=1, lambda_warmup=0)


@cache
def learned(name: str) -> tuple[Selection, list[LayerState], WholeNetwork]:
    """What all targets of a network share, and what takes the time: the learned orders."""
    torch.manual_seed(0)
    model = torchvision.models.get_model(name, weights=None)
    selection = select_layers(model)
    return selection, learned_states(selection.layers, one_shot(0.5), None), network_size(model, None)


def plan_of(name: str, target: float) -> GroupingPlan:
    selection, states, size = learned(name)
    return plan_for_target(selection, states, size, one_shot(target))


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("resnet50", 0.35),
        ("resnet50", 0.65),
        ("resnet50", 0.85),
        ("resnet101", 0.40),
        ("resnet101", 0.65),
        ("resnet101", 0.80),
        ("densenet201", 0.38),
        ("densenet201", 0.60),
    ],
)
def test_the_paper_rates_are_met_within_one_point(name: str, target: float) -> None:
    assert target <= plan_of(name, target).removed_param_fraction <= target + 0.01


def test_a_rate_out_of_reach_names_the_largest_which_is_in_reach() -> None:
    with pytest.raises(ValueError, match=r"target 0\.95 cannot be reached") as refusal:
        plan_of("resnet50", 0.95)
    named = re.search(r"(0\.\d{4}) of all params", str(refusal.value))
    assert named is not None
    reachable = float(named[1])
    assert plan_of("resnet50", reachable).removed_param_fraction == pytest.approx(reachable, abs=1e-4)
