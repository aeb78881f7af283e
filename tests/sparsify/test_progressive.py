"""A progressive schedule: decided early, annealed to exact zero by any optimizer, converted without a change."""

import copy
import io
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Literal, get_args

import pytest
import torch
from sparse_training import labelled_images, network
from torch import nn
from torch.nn import functional

import strucspars as ss
from strucspars.nn.layers import kept_connections
from strucspars.sparsify.progressive import SETTLED_EPOCHS
from strucspars.sparsify.reports import EpochReport

CONFIG = ss.SparsifyConfig(
    target=0.4, epochs=8, steps_per_epoch=5, lr=0.05, schedule="progressive", decide_by=0.25, anneal=0.375
)
DECISION, ANNEALED = 2, 5
Way = Literal["regularize_", "penalty", "attach"]
OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda weights: torch.optim.SGD(weights, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adamw": lambda weights: torch.optim.AdamW(weights, lr=3e-3, weight_decay=0.1),
    "rmsprop": lambda weights: torch.optim.RMSprop(weights, lr=1e-3, momentum=0.9),
}


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, sparsifier: ss.Sparsifier, way: Way = "regularize_"
) -> None:
    images, labels = labelled_images()
    optimizer.zero_grad()
    loss = functional.cross_entropy(model(images), labels)
    torch.autograd.backward(loss + sparsifier.penalty() if way == "penalty" else loss)
    if way == "regularize_":
        sparsifier.regularize_()
    optimizer.step()


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    sparsifier: ss.Sparsifier,
    epochs: int,
    way: Way = "regularize_",
) -> list[EpochReport]:
    reports = []
    for _ in range(epochs):
        for _ in range(5):
            step(model, optimizer, sparsifier, way)
        reports.append(sparsifier.end_epoch())
    return reports


def removed_weights(model: nn.Module, plan: ss.GroupingPlan) -> torch.Tensor:
    """Everything that the plan removes, in a row."""
    pieces = []
    for name, layer in plan.layers.items():
        pieces.append(model.get_parameter(f"{name}.weight").detach()[~kept_connections(layer)].flatten())
    return torch.cat(pieces)


@pytest.mark.parametrize("way", get_args(Way))
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_removed_connections_are_zero_after_every_step_whatever_the_optimizer(name: str, way: Way) -> None:
    model = network()
    optimizer, sparsifier = OPTIMIZERS[name](model.parameters()), ss.Sparsifier(model, CONFIG)
    if way == "attach":
        sparsifier.attach(optimizer)
    reports = train(model, optimizer, sparsifier, ANNEALED, way)
    assert [report.annealed for report in reports[: DECISION + 1]] == [None, 0, pytest.approx(1 - (2 / 3) ** 3)]
    assert reports[-1].annealed == 1
    plan, kept = sparsifier.plan(), copy.deepcopy(model.state_dict())
    for _ in range(7):
        step(model, optimizer, sparsifier, way)
        assert removed_weights(model, plan).count_nonzero() == 0
    assert not torch.equal(model.get_parameter("2.weight"), kept["2.weight"]), "the rest goes on learning"


def test_the_network_is_converted_without_a_change_and_goes_on_training() -> None:
    model = network()
    optimizer, sparsifier = OPTIMIZERS["sgd"](model.parameters()), ss.Sparsifier(model, CONFIG)
    train(model, optimizer, sparsifier, CONFIG.epochs)
    images, labels = labelled_images()
    before, plan = model(images), sparsifier.plan()
    assert plan.removed_param_fraction >= CONFIG.target
    ss.convert_(model, plan, optimizer)
    torch.testing.assert_close(model(images), before)
    grouped = {name: layer for name, layer in plan.layers.items() if layer.group_level > 1}
    assert ss.model_plan(model).layers == grouped
    loss = functional.cross_entropy(model(images), labels)
    torch.autograd.backward(loss)
    optimizer.step()
    assert functional.cross_entropy(model(images), labels) < loss


def test_the_decided_plan_stays_while_the_weights_change() -> None:
    model = network()
    optimizer, sparsifier = OPTIMIZERS["adamw"](model.parameters()), ss.Sparsifier(model, CONFIG)
    assert (sparsifier.decided_plan, sparsifier.present_plan) == (None, None)
    train(model, optimizer, sparsifier, DECISION - 1)
    assert sparsifier.decided_plan is None
    assert sparsifier.present_plan is not None
    train(model, optimizer, sparsifier, 1)
    plan = sparsifier.decided_plan
    assert plan is not None
    reports = train(model, optimizer, sparsifier, 3)
    assert sparsifier.plan() == sparsifier.present_plan == plan
    assert [report.removed_fraction for report in reports] == pytest.approx([plan.removed_param_fraction] * 3)
    assert {report.lambda_value for report in reports} == {0}
    levels = [layer.group_level for layer in plan.layers.values()]
    assert [layer.group_level for layer in reports[-1].layers] == levels
    assert [layer.kept_norm[layer.group_level - 1] for layer in reports[-1].layers] == [1] * len(levels)


def frozen(sparsifier: ss.Sparsifier, model: nn.Module, steps: int) -> None:
    """Optimizer steps that change nothing by themselves."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for _ in range(steps):
        optimizer.step()


def test_each_step_leaves_the_cube_of_the_share_that_is_to_go() -> None:
    model = network()
    before = copy.deepcopy(model)
    sparsifier = ss.Sparsifier(model, replace(CONFIG, decide_by=0, anneal=0.25))
    plan, total = sparsifier.plan(), 2 * 5
    started = removed_weights(before, plan)
    for done in range(1, total + 1):
        frozen(sparsifier, model, 1)
        torch.testing.assert_close(removed_weights(model, plan), started * (1 - done / total) ** 3)
        if done % 5 == 0:
            sparsifier.end_epoch()
    for name, layer in plan.layers.items():
        kept, now, then = (
            kept_connections(layer),
            model.get_parameter(f"{name}.weight"),
            before.get_parameter(f"{name}.weight"),
        )
        assert torch.equal(now[kept], then[kept])


def test_the_loss_does_not_win_back_what_is_annealed() -> None:
    model = network()
    before, sparsifier = copy.deepcopy(model), ss.Sparsifier(model, replace(CONFIG, decide_by=0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    plan = sparsifier.plan()
    for done in range(1, 5):
        step(model, optimizer, sparsifier)
        expected = removed_weights(before, plan) * (1 - done / 15) ** 3
        torch.testing.assert_close(removed_weights(model, plan), expected)
    assert not torch.equal(model.get_parameter("2.weight"), before.get_parameter("2.weight"))


@pytest.mark.parametrize("steps", [0, 2, 5, 9])
def test_an_epoch_of_any_length_comes_to_the_same_share(steps: int) -> None:
    """Also one whose steps do not come from an optimizer of PyTorch."""
    model = network()
    before, sparsifier = copy.deepcopy(model), ss.Sparsifier(model, replace(CONFIG, decide_by=0, anneal=0.25))
    frozen(sparsifier, model, steps)
    assert sparsifier.end_epoch().annealed == pytest.approx(1 - 0.5**3)
    plan = sparsifier.plan()
    torch.testing.assert_close(removed_weights(model, plan), removed_weights(before, plan) * 0.5**3)
    frozen(sparsifier, model, steps)
    assert sparsifier.end_epoch().annealed == 1
    assert removed_weights(model, plan).count_nonzero() == 0


def test_without_an_annealing_the_connections_go_at_once() -> None:
    model = network()
    sparsifier = ss.Sparsifier(model, replace(CONFIG, decide_by=0, anneal=0))
    assert removed_weights(model, sparsifier.plan()).count_nonzero() == 0


def test_the_steps_of_another_networks_optimizer_do_not_count() -> None:
    model, other = network(), network(seed=1)
    before, sparsifier = copy.deepcopy(model), ss.Sparsifier(model, replace(CONFIG, decide_by=0))
    frozen(sparsifier, other, 3)
    torch.testing.assert_close(model.state_dict(), before.state_dict(), rtol=0, atol=0)


def test_weights_that_are_replaced_are_annealed_too() -> None:
    model = network()
    sparsifier = ss.Sparsifier(model, replace(CONFIG, decide_by=0, anneal=0.125))
    model.load_state_dict(network(seed=1).state_dict(), assign=True)
    frozen(sparsifier, model, 5)
    assert removed_weights(model, sparsifier.plan()).count_nonzero() == 0


@pytest.mark.parametrize(("epochs", "steps"), [(1, 0), (2, 3), (3, 4), (6, 2)])
def test_a_run_resumes_exactly_before_and_in_and_after_the_annealing(epochs: int, steps: int) -> None:
    model = network()
    optimizer, sparsifier = OPTIMIZERS["sgd"](model.parameters()), ss.Sparsifier(model, CONFIG)
    train(model, optimizer, sparsifier, epochs)
    for _ in range(steps):
        step(model, optimizer, sparsifier)
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict(), sparsifier.state_dict()], file)
    file.seek(0)
    states = torch.load(file, weights_only=True)
    twin = network(seed=9)
    other_optimizer, other = OPTIMIZERS["sgd"](twin.parameters()), ss.Sparsifier(twin, CONFIG)
    twin.load_state_dict(states[0])
    other_optimizer.load_state_dict(states[1])
    other.load_state_dict(states[2])
    for candidate, its_optimizer, its_sparsifier in ((model, optimizer, sparsifier), (twin, other_optimizer, other)):
        for _ in range(5 - steps):
            step(candidate, its_optimizer, its_sparsifier)
        its_sparsifier.end_epoch()
        train(candidate, its_optimizer, its_sparsifier, 2)
    torch.testing.assert_close(twin.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert other.plan() == sparsifier.plan()


@pytest.mark.parametrize(("min_kept_norm", "decided_after"), [(0.1, SETTLED_EPOCHS + 1), (0.99, 20)])
def test_a_plan_that_has_settled_at_the_target_is_decided_before_its_time(
    min_kept_norm: float, decided_after: int
) -> None:
    model = network()
    config = replace(CONFIG, epochs=40, decide_by=0.5, min_kept_norm=min_kept_norm)
    sparsifier, epochs = ss.Sparsifier(model, config), 0
    # Weights that stand still, so the plan never changes.
    while sparsifier.decided_plan is None:
        sparsifier.end_epoch()
        epochs += 1
    assert epochs == decided_after


def test_a_plan_that_changes_is_decided_when_it_is_time() -> None:
    model = network()
    sparsifier = ss.Sparsifier(model, replace(CONFIG, epochs=12, decide_by=0.5, min_kept_norm=0.1))
    reports = []
    for seed in range(1, 7):
        model.load_state_dict(network(seed=seed).state_dict())
        reports.append(sparsifier.end_epoch())
    assert [report.annealed for report in reports] == [None] * 5 + [0]


def test_a_plan_made_elsewhere_may_be_given() -> None:
    model = network()
    plan = ss.one_shot_plan(model, replace(CONFIG, target=0.3))
    sparsifier = ss.Sparsifier(model, CONFIG)
    assert sparsifier.decide(plan) == plan == sparsifier.plan()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    train(model, optimizer, sparsifier, 3)
    assert removed_weights(model, plan).count_nonzero() == 0


def test_a_decision_before_the_first_epoch_is_that_of_the_calibration_images() -> None:
    model, images = network(), [labelled_images()[0]]
    config = replace(CONFIG, decide_by=0.0)
    sparsifier = ss.Sparsifier(model, config, calibration=images)
    assert sparsifier.decided_plan == ss.one_shot_plan(model, config, calibration=images)
    assert sparsifier.decided_plan != ss.Sparsifier(model, config).decided_plan
    with pytest.raises(ValueError, match="reads no calibration images"):
        ss.Sparsifier(model, CONFIG, calibration=images)


def test_a_decision_that_cannot_be_is_refused() -> None:
    model = network()
    plan = ss.one_shot_plan(model, 0.3)
    with pytest.raises(ValueError, match="only a progressive schedule decides early"):
        ss.Sparsifier(model, replace(CONFIG, schedule="two-stage")).decide(plan)
    of_one_layer = replace(CONFIG, include=("4",), target=0.05)
    with pytest.raises(ValueError, match="layer '2' of the plan is not in the network"):
        ss.Sparsifier(model, of_one_layer).decide(plan)
    sparsifier = ss.Sparsifier(model, CONFIG)
    with pytest.raises(ValueError, match="the plan lacks layer '2'; make it with the options of this Sparsifier"):
        sparsifier.decide(ss.one_shot_plan(model, of_one_layer))
    sparsifier.decide()
    with pytest.raises(ValueError, match="was decided after epoch 0; make a new Sparsifier for another"):
        sparsifier.decide()


@pytest.mark.parametrize(
    ("epochs", "decide_by", "anneal", "expected"),
    [(160, 0.25, 0.25, (40, 40)), (160, 0, 0, (0, 0)), (3, 0.25, 0.25, (1, 1)), (1, 0.25, 0.25, (0, 1))],
)
def test_decision_and_annealing_are_whole_epochs(
    epochs: int, decide_by: float, anneal: float, expected: tuple[int, int]
) -> None:
    config = replace(CONFIG, epochs=epochs, decide_by=decide_by, anneal=anneal)
    assert (config.decision_epoch, config.annealing_epochs) == expected


@pytest.mark.parametrize("epochs", [1, 2, 3, 5])
def test_the_shortest_training_ends_with_exact_zeros(epochs: int) -> None:
    model = network()
    config = replace(CONFIG, epochs=epochs, decide_by=0.5, anneal=0.5)
    optimizer, sparsifier = OPTIMIZERS["sgd"](model.parameters()), ss.Sparsifier(model, config)
    assert train(model, optimizer, sparsifier, epochs)[-1].annealed == 1
    assert removed_weights(model, sparsifier.plan()).count_nonzero() == 0


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"schedule": "gradual"}, "schedule must be one of two-stage, progressive, got 'gradual'"),
        ({"decide_by": 1.5}, "decide_by"),
        ({"decide_by": 0.7, "anneal": 0.4}, r"decide_by 0\.7 and anneal 0\.4 are more than the whole training"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(options: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        replace(CONFIG, **options)  # type: ignore[arg-type]  # on purpose
