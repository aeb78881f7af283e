"""An importance, a budget, an order policy and an exporter from outside the package, from planning to a file."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import strucspars as ss
from strucspars.channels import NetworkChannels, OrderSharing
from strucspars.core.checks import FloatArray
from strucspars.export.checked import EXPORTERS
from strucspars.export.program import Exporter, Inference, InferenceProgram
from strucspars.nn.groupable import SelectedLayer
from strucspars.sparsify.extensions import (
    BUDGETS,
    IMPORTANCES,
    ORDERS,
    CountedLayer,
)
from strucspars.train.recipe_reading import read_recipe

IMAGES = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def largest_weight(layer: SelectedLayer) -> FloatArray:
    assert isinstance(layer.module, nn.Conv2d)
    return layer.weight.detach().double().abs().amax((2, 3)).numpy()


def bytes_and_calls(layer: CountedLayer, neighbours: Sequence[CountedLayer]) -> list[float]:
    """Four bytes per weight, and a price for every neighbour, whatever the level."""
    halvings = range(layer.num_levels)
    return [4 * layer.weight_params / 2**halving + 10 * len(neighbours) for halving in halvings]


def one_order(channels: NetworkChannels) -> OrderSharing:
    """One order for everyone who sees the same channels."""
    return OrderSharing(frozenset(channels.classes))


class Exported(Exporter):
    suffix = ".program"

    def runtime(self) -> str:
        return "PyTorch"

    def write(self, program: InferenceProgram, path: Path) -> None:
        torch.export.save(program.exported, path)

    def load(self, path: Path) -> Inference:
        run = torch.export.load(path).module()
        return lambda arguments: [run(*arguments)]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()
    return nn.Sequential(*layers, nn.Conv2d(32, 16, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    for registry in (IMPORTANCES, BUDGETS, ORDERS, EXPORTERS):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))  # for these tests only
    ss.register_importance("largest-weight", largest_weight)
    ss.register_budget("bytes", bytes_and_calls)
    ss.register_orders("one-order", one_order)
    ss.register_exporter("program", Exported())


CONFIG = ss.SparsifyConfig(target=0.4, epochs=3)
EXTENDED = [{"importance": "largest-weight"}, {"budget": "bytes"}, {"orders": "one-order"}]
EXTENDED.append({name: value for options in EXTENDED for name, value in options.items()})


@pytest.mark.parametrize("options", EXTENDED, ids=lambda options: "-".join(options))
def test_registered_objects_go_from_planning_to_an_exported_file(options: dict[str, Any], tmp_path: Path) -> None:
    model = network()
    sparsifier = ss.Sparsifier(model, replace(CONFIG, **options), example_inputs=IMAGES)
    torch.autograd.backward(model(IMAGES).sum() + sparsifier.penalty())
    assert sparsifier.end_epoch().epoch == 1
    plan = sparsifier.plan()
    assert plan == ss.GroupingPlan.from_json(plan.to_json())
    masked = ss.mask_(network(), plan)(IMAGES)
    torch.testing.assert_close(ss.convert_(model, plan)(IMAGES), masked)
    ss.export(model, tmp_path / "model.program", example_inputs=IMAGES, format="program")
    (scores,) = Exported().load(tmp_path / "model.program")((IMAGES,))
    torch.testing.assert_close(scores, masked)


def test_an_importance_decides_the_orders() -> None:
    plan = ss.one_shot_plan(network(), replace(CONFIG, importance="largest-weight"))
    assert plan.layers["2"] != ss.one_shot_plan(network(), CONFIG).layers["2"]
    importance = largest_weight(ss.select_layers(network()).layers[0])
    learned = ss.core.learn_permutations(importance)
    (state, _) = ss.Sparsifier(network(), replace(CONFIG, importance="largest-weight")).state_dict()["layers"].values()
    assert state["out_perm"].tolist() == learned.out_perm.tolist()


def test_a_budget_decides_what_the_target_counts() -> None:
    seen: dict[str, list[str]] = {}

    def calls(layer: CountedLayer, neighbours: Sequence[CountedLayer]) -> list[float]:
        seen[layer.name] = [neighbour.name for neighbour in neighbours]
        # Groups of the last layer alone save something.
        return [100.0 if layer.name != "4" else 100 / 2**level for level in range(layer.num_levels)]

    ss.register_budget("last", calls)
    plan = ss.one_shot_plan(network(), replace(CONFIG, budget="last", target=0.15))
    assert [layer.num_groups for layer in plan.layers.values()] == [1, 2]
    assert seen == {"0": [], "2": ["4"], "4": ["2"]}
    with pytest.raises(ValueError, match=r"the most that can be removed is 0\.3125 of all last"):
        ss.one_shot_plan(network(), replace(CONFIG, budget="last", target=0.5))


def test_an_order_policy_decides_which_layers_share_an_order() -> None:
    plan = ss.one_shot_plan(network(), replace(CONFIG, orders="one-order"), example_inputs=IMAGES)
    assert (plan.layers["2"].out_perm == plan.layers["4"].in_perm).all()
    free = ss.one_shot_plan(network(), CONFIG)
    assert (free.layers["2"].out_perm != free.layers["4"].in_perm).any()


@pytest.mark.parametrize("format_name", ["program", "onnx"])
def test_a_network_of_extensions_exports_to_registered_and_built_in_formats(tmp_path: Path, format_name: str) -> None:
    model = network()
    ss.compress(model, replace(CONFIG, importance="largest-weight", orders="one-order"), example_inputs=IMAGES)
    report = ss.export(model, tmp_path / f"model.{format_name}", example_inputs=IMAGES, format=format_name)
    assert (report.format, report.agreement.num_outputs) == (format_name, 1)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"importance": "negative"}, r"layer '2': importance 'negative' must not be negative"),
        (
            {"importance": "transposed"},
            r"layer '2': importance 'transposed' must have shape \(32, 16\), got",
        ),
        ({"budget": "rising"}, r"layer '2': cost_by_level must have 5 costs"),
        ({"orders": "elsewhere"}, r"orders 'elsewhere': the network has no class of channels 'conv9'"),
        ({"budget": "byte"}, r"budget must be one of params, macs.* did you mean 'bytes'"),
        ({"importance": "nowhere.at_all:function"}, r"importance 'nowhere.at_all:function': No module named 'nowhere'"),
    ],
)
def test_what_an_extension_gets_wrong_is_named(options: dict[str, Any], complaint: str) -> None:
    ss.register_importance("negative", lambda layer: -largest_weight(layer))
    ss.register_importance("transposed", lambda layer: largest_weight(layer).T)
    ss.register_budget("rising", lambda layer, neighbours: list(range(layer.num_levels)))
    ss.register_orders("elsewhere", lambda channels: OrderSharing(frozenset({"conv9"})))
    with pytest.raises(ValueError, match=complaint):
        ss.one_shot_plan(network(), replace(CONFIG, **options), example_inputs=IMAGES)


def test_built_in_names_stay() -> None:
    with pytest.raises(ValueError, match="importance 'l1' cannot be registered"):
        ss.register_importance("l1", largest_weight)


SQUARES = """
def squares(layer):
    return layer.weight.detach().square().sum((2, 3)).double().numpy()
"""


def test_recipes_name_functions_of_any_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_extension.py").write_text(SQUARES)
    monkeypatch.syspath_prepend(tmp_path)
    recipe = read_recipe("demo", ["sparsify.importance=my_extension:squares", "sparsify.orders=one-order"])
    # Reading a recipe runs no code that it names.
    assert "my_extension" not in sys.modules
    config = replace(recipe.sparsify_config(steps_per_epoch=1), target=0.3)
    plan = ss.compress(network(), config, example_inputs=IMAGES)
    assert "my_extension" in sys.modules
    assert plan.removed_param_fraction >= 0.3
