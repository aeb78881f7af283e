"""What print() and a notebook show: a few lines, no tuples and no permutations."""

import torch
from torch import nn

import strucspars as ss


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.Conv2d(32, 3, 1))


def test_plans_print_what_they_remove_and_how_many_groups() -> None:
    plan = ss.one_shot_plan(network(), ss.SparsifyConfig(target=0.4), example_inputs=torch.zeros(1, 16, 8, 8))
    removed = f"removes {plan.removed_param_fraction:.1%} of all params and {plan.removed_mac_fraction:.1%} of all macs"
    groups = [layer.num_groups for layer in plan.layers.values()]
    assert str(plan).splitlines() == [
        f"GroupingPlan of 2 layers: {removed} (asked for: 40.0% of all params)",
        "groups per layer: 2 (2 layers)" if groups == [2, 2] else str(groups),
    ]
    assert repr(plan) == str(plan)
    assert str(plan.layers["0"]) == "LayerPlan of a 32 x 16 x 3 x 3 weight: 2 groups (level 2)"
    assert str(ss.GroupingPlan({})).splitlines() == [
        "GroupingPlan of 0 layers: removes 0.0% of all params",
        "groups per layer: no layers",
    ]


def test_a_sparsifier_and_its_epochs_print_where_they_are() -> None:
    sparsifier = ss.Sparsifier(
        network(), ss.SparsifyConfig(target=0.4, epochs=4, controller="paper", lambda_step=0.1, lambda_warmup=0)
    )
    report = sparsifier.end_epoch()
    assert str(report).splitlines() == [
        f"epoch 1: 0.0% removed, 52.6% kept at target, lambda 0.1, {report.seconds:.1f} s",
        "groups per layer: 1 (2 layers)",
    ]
    assert repr(report) == str(report)
    assert (
        str(sparsifier).splitlines()
        == repr(sparsifier).splitlines()
        == [
            "Sparsifier of 2 layers (1 left out), to remove 40.0% of all params",
            "epoch 1 of 4: 0.0% removed, lambda 0.1",
            "groups per layer: 1 (2 layers)",
        ]
    )
