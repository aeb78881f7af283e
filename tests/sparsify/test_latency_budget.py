"""Plans for milliseconds, from tables made by hand."""

import copy
import dataclasses
import itertools
import logging

import pytest
import torch
from torch import nn

import strucspars as ss
from strucspars.bench import latency
from strucspars.core.budget import Shuffle
from strucspars.cost.latency import LatencyTable

EXAMPLE = torch.zeros(1, 8, 8, 8)
LAYERS = ("0", "2", "4")
TABLE = LatencyTable(
    machine="some processor",
    runtime="some runtime",
    network="key",
    dense_ms=10.0,
    layers={"0": (3.0, 1.5, 1.0), "2": (3.0, 1.5, 1.0), "4": (3.0, 3.5, 4.0)},
)


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> list[LatencyTable]:
    """What is measured; a test may replace it."""
    found = [TABLE]
    monkeypatch.setattr(latency, "latency_table", lambda *arguments: found[0])
    return found


def network() -> nn.Sequential:
    torch.manual_seed(0)
    convolutions = [nn.Conv2d(8, 8, 3, padding=1) for _ in LAYERS]
    return nn.Sequential(*(module for each in convolutions for module in (each, nn.ReLU())))


def planned(**options: object) -> ss.GroupingPlan:
    config = ss.SparsifyConfig(budget="latency", **options)  # type: ignore[arg-type]  # by name
    return ss.one_shot_plan(network(), config, example_inputs=EXAMPLE)


@pytest.mark.parametrize("target", [0.1, 0.2, 0.3, 0.4])
def test_a_plan_takes_no_longer_than_the_target(table: list[LatencyTable], target: float) -> None:
    plan = planned(target=target)
    assert plan.latency is not None
    levels = {name: layer.group_level for name, layer in plan.layers.items()}
    assert plan.latency.expected_ms == TABLE.expected_ms(levels) <= (1 - target) * plan.latency.dense_ms + 1e-9
    assert ss.GroupingPlan.from_json(plan.to_json()) == plan


def test_milliseconds_can_be_named_themselves(table: list[LatencyTable]) -> None:
    plan = planned(target_ms=7.0)
    assert plan.target == pytest.approx(0.3)
    assert plan.latency is not None
    assert plan.latency.expected_ms <= 7.0 + 1e-9
    assert "expects 7.00 of 10.00 ms (1.43 x) in some runtime, one core" in repr(plan)


def test_more_milliseconds_than_the_dense_network_takes_leave_it_dense_with_a_remark(
    table: list[LatencyTable], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        plan = planned(target_ms=12.0)
    assert {layer.num_groups for layer in plan.layers.values()} == {1}
    assert "the dense network takes 10 ms, which is no more than target_ms=12: nothing is removed" in caplog.text


def test_layers_that_no_level_makes_faster_stay_dense_and_the_summary_says_so(table: list[LatencyTable]) -> None:
    plan = planned(target=0.4)
    assert plan.layers["4"].num_groups == 1
    assert plan.latency is not None
    assert plan.latency.layers_without_gain == ("4",)
    notes = {row.name: row.note for row in ss.summary(network(), EXAMPLE, plan=plan).rows}
    assert notes["4"] == "stays dense: no number of groups makes it faster in some runtime here"
    assert notes["0"] == notes["2"] == ""


def test_a_copy_that_costs_more_than_a_layer_saves_is_avoided(table: list[LatencyTable]) -> None:
    layers = dict.fromkeys(LAYERS, (3.0, 1.5))
    grouped = []
    for sides in itertools.combinations(LAYERS, 2):
        table[0] = dataclasses.replace(TABLE, layers=layers, shuffles=(Shuffle(1.6, sides),))
        plan = planned(target=0.3)
        grouped.append({name for name, layer in plan.layers.items() if layer.num_groups > 1})
        assert len(grouped[-1]) == 2
        assert grouped[-1] != set(sides)


def test_a_time_out_of_reach_names_the_nearest(table: list[LatencyTable]) -> None:
    with pytest.raises(ValueError, match=r"^2 ms cannot be reached: .* some runtime is 6 of 10 ms") as told:
        planned(target=0.8)
    assert "ask for at least 6 ms, a target of at most 0.4000" in str(told.value)
    assert planned(target=0.4).latency is not None


def test_milliseconds_need_an_example(table: list[LatencyTable]) -> None:
    with pytest.raises(ValueError, match="budget='latency' needs example_inputs"):
        ss.one_shot_plan(network(), ss.SparsifyConfig(budget="latency"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"target_ms": 5.0}, "target_ms must be positive milliseconds, with budget='latency'"),
        ({"target_ms": -5.0, "budget": "latency"}, "target_ms must be positive milliseconds"),
        ({"levels": "best"}, "levels must be one of threshold, knapsack, got 'best'"),
    ],
)
def test_invalid_options_are_errors(options: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ss.SparsifyConfig(**options)  # type: ignore[arg-type]  # by name


def test_images_decide_what_milliseconds_cost(table: list[LatencyTable]) -> None:
    model = nn.Sequential(network(), nn.Flatten(), nn.Linear(8 * 64, 5))
    table[0] = dataclasses.replace(TABLE, layers={f"0.{name}": ms for name, ms in TABLE.layers.items()})
    images = torch.randn(2, 16, 8, 8, 8, generator=torch.Generator().manual_seed(0))
    plan = ss.one_shot_plan(model, ss.SparsifyConfig(target=0.3, budget="latency"), calibration=images)
    assert plan.latency is not None
    assert plan.latency.expected_ms <= 7.0 + 1e-9
    assert plan.predicted_divergence is not None


def test_sparse_training_meets_milliseconds_and_resumes_with_the_table_it_began_with(
    table: list[LatencyTable],
) -> None:
    config = ss.SparsifyConfig(budget="latency", target_ms=7.0, epochs=3, steps_per_epoch=1)
    sparsifier = ss.Sparsifier(network(), config, example_inputs=EXAMPLE)
    sparsifier.end_epoch()
    state = copy.deepcopy(sparsifier.state_dict())
    table[0] = dataclasses.replace(TABLE, dense_ms=10.5)
    resumed = ss.Sparsifier(network(), config, example_inputs=EXAMPLE)
    resumed.load_state_dict(state)
    assert resumed.plan() == sparsifier.plan()
    found = resumed.plan().latency
    assert found is not None
    assert found.expected_ms <= 7.0 + 1e-9
    assert found.dense_ms == 10.0


def test_a_knapsack_keeps_at_least_as_much_norm_as_a_threshold(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)

    def lost(levels: str) -> float:
        config = ss.SparsifyConfig(target=0.45, levels=levels)  # type: ignore[arg-type]  # by name
        model = network()
        plan = ss.one_shot_plan(model, config, example_inputs=EXAMPLE)
        assert plan.removed_param_fraction >= 0.45
        rows = ss.summary(model, EXAMPLE, plan=plan).rows
        return -float(sum(torch.tensor(row.kept_norm).log() for row in rows if row.kept_norm is not None))

    assert lost("knapsack") <= lost("threshold") + 1e-6
