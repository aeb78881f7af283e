import copy
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import strucspars as ss
from strucspars.data.batches import Batch, Batches
from strucspars.data.catalogue import batches_of, load_data
from strucspars.train.compression import ablation_plan, form_milliseconds, recalibrate_
from strucspars.train.engine import Engine
from strucspars.train.recipe import EngineRecipe, StageRecipe

ENGINE = Engine(EngineRecipe(device="cpu"))


def network(*, dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, bias=False),
        nn.BatchNorm2d(16),
        nn.Dropout(dropout),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, bias=False),
        nn.BatchNorm2d(16, momentum=0.3),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 10),
    )


@pytest.fixture(scope="module")
def batches() -> Batches:
    return batches_of(load_data("digits", None), training=True, batch_size=449, device=torch.device("cpu"), seed=5)


def features(model: nn.Sequential, until: int, images: torch.Tensor) -> torch.Tensor:
    for module in list(model)[:until]:
        images = module(images)
    return images


def test_recalibrated_statistics_are_those_of_one_epoch(batches: Batches) -> None:
    model = network()
    recalibrate_(model, batches, ENGINE)
    reference = network().train()
    means, variances = [], []
    with torch.no_grad():
        for batch in batches.epoch(1):
            incoming = features(reference, 4, batch.images)
            outgoing = reference[4](incoming)
            means.append(outgoing.mean(dim=(0, 2, 3)))
            variances.append(outgoing.var(dim=(0, 2, 3)))
    norm = model.get_submodule("5")
    torch.testing.assert_close(norm.get_buffer("running_mean"), torch.stack(means).mean(dim=0), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(norm.get_buffer("running_var"), torch.stack(variances).mean(dim=0), rtol=1e-4, atol=1e-6)


def test_recalibration_changes_nothing_but_statistics_and_forgets_the_former_ones(batches: Batches) -> None:
    model, spoilt = network(), network()
    norm = spoilt.get_submodule("1")
    norm.get_buffer("running_mean").fill_(1e6)
    for candidate in (model, spoilt):
        recalibrate_(candidate, batches, ENGINE)
    torch.testing.assert_close(dict(spoilt.state_dict()), dict(model.state_dict()))
    assert spoilt.get_submodule("5").momentum == 0.3
    for (name, before), after in zip(network().named_parameters(), model.parameters(), strict=True):
        assert torch.equal(before, after), name


def test_recalibration_does_not_depend_on_what_was_drawn_before(batches: Batches) -> None:
    states = []
    for seed in (1, 2):
        model = network(dropout=0.5)
        torch.manual_seed(seed)
        recalibrate_(model, batches, ENGINE)
        states.append(dict(model.state_dict()))
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=0)


class SmallDeviation:
    """One batch whose deviation is small beside its mean."""

    steps, batch_size = 1, 4

    def epoch(self, epoch: int, *, start_step: int = 0) -> Iterator[Batch]:
        images = torch.full((4, 1, 8, 8), 8.003)
        images[:, :, ::2] = 7.997
        yield Batch(images, torch.zeros(4, dtype=torch.int64), torch.ones(4, dtype=torch.bool))


def test_a_small_variance_beside_a_large_mean_is_not_lost() -> None:
    norm = nn.BatchNorm2d(1)
    recalibrate_(norm, SmallDeviation(), ENGINE)
    assert norm.get_buffer("running_mean").item() == pytest.approx(8)
    assert norm.get_buffer("running_var").item() == pytest.approx(0.003**2 * 256 / 255, rel=0.01)


def test_both_forms_are_timed_on_copies(batches: Batches) -> None:
    model = network()
    before = copy.deepcopy(dict(model.state_dict()))
    plan = ss.one_shot_plan(model, target=0.4)
    times = form_milliseconds(ENGINE, model, plan, StageRecipe(epochs=1, ema=0.9), batches)
    assert sorted(times) == ["grouped", "masked"]
    assert all(0 < value < 60_000 for value in times.values())
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    assert type(model[4]) is nn.Conv2d


class FewSteps:
    """A data set of one batch."""

    steps, batch_size = 1, 4

    def epoch(self, epoch: int, *, start_step: int = 0) -> Iterator[Batch]:
        yield Batch(torch.randn(4, 3, 16, 16), torch.zeros(4, dtype=torch.int64), torch.ones(4, dtype=torch.bool))


def test_an_epoch_of_one_step_can_be_timed_too() -> None:
    model = network()
    plan = ss.one_shot_plan(model, target=0.4)
    times = form_milliseconds(ENGINE, model, plan, StageRecipe(epochs=1), FewSteps())
    assert all(value > 0 for value in times.values())


def test_recalibration_forgets_the_statistics_of_a_training_that_counted_its_batches(batches: Batches) -> None:
    model, trained = network(), network()
    trained.train()
    for batch in batches.epoch(2):
        trained(100 * batch.images)
    assert int(trained.get_submodule("1").get_buffer("num_batches_tracked")) == 3
    for candidate in (model, trained):
        recalibrate_(candidate, batches, ENGINE)
    torch.testing.assert_close(dict(trained.state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize("training", [False, True])
def test_recalibration_restores_the_models_mode(batches: Batches, training: bool) -> None:
    model = network().train(training)
    recalibrate_(model, batches, ENGINE)
    assert {module.training for module in model.modules()} == {training}


def test_timing_leaves_the_scale_of_the_gradients_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(EngineRecipe(device="cpu"))
    scale = {"scale": 65536.0}
    loaded: list[dict[str, float]] = []
    monkeypatch.setattr(engine, "precision_state", lambda: dict(scale))
    monkeypatch.setattr(engine, "load_precision_state", loaded.append)
    model = network()
    form_milliseconds(engine, model, ss.one_shot_plan(model, target=0.4), StageRecipe(epochs=1), FewSteps())
    assert loaded == [scale]


def test_the_random_orders_of_an_ablation_depend_on_the_seed_of_the_run() -> None:
    plan = ss.one_shot_plan(network(), target=0.4)
    orders = [ablation_plan(plan, "random", seed=seed).layers["4"].out_perm.tolist() for seed in (3, 3, 4)]
    assert orders[0] == orders[1] != orders[2]
