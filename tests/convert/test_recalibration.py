from collections.abc import Iterator

import pytest
import torch
from torch import nn

from strucspars.convert.compress import recalibrate_
from strucspars.data.batches import Batches
from strucspars.data.catalogue import batches_of, load_data


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


def pairs(batches: Batches) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    return ((batch.images, batch.labels) for batch in batches.epoch(1))


def features(model: nn.Sequential, until: int, images: torch.Tensor) -> torch.Tensor:
    for module in list(model)[:until]:
        images = module(images)
    return images


def test_recalibrated_statistics_are_those_of_one_epoch(batches: Batches) -> None:
    model = network()
    recalibrate_(model, pairs(batches))
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
        recalibrate_(candidate, pairs(batches))
    torch.testing.assert_close(dict(spoilt.state_dict()), dict(model.state_dict()))
    assert spoilt.get_submodule("5").momentum == 0.3
    for (name, before), after in zip(network().named_parameters(), model.parameters(), strict=True):
        assert torch.equal(before, after), name


def test_recalibration_does_not_depend_on_what_was_drawn_before(batches: Batches) -> None:
    states = []
    for seed in (1, 2):
        model = network(dropout=0.5)
        torch.manual_seed(seed)
        recalibrate_(model, pairs(batches))
        states.append(dict(model.state_dict()))
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=0)


def test_a_small_variance_beside_a_large_mean_is_not_lost() -> None:
    norm = nn.BatchNorm2d(1)
    images = torch.full((4, 1, 8, 8), 8.003)
    images[:, :, ::2] = 7.997
    recalibrate_(norm, [images])
    assert norm.get_buffer("running_mean").item() == pytest.approx(8)
    assert norm.get_buffer("running_var").item() == pytest.approx(0.003**2 * 256 / 255, rel=0.01)


def test_recalibration_forgets_the_statistics_of_a_training_that_counted_its_batches(batches: Batches) -> None:
    model, trained = network(), network()
    trained.train()
    for batch in batches.epoch(2):
        trained(100 * batch.images)
    assert int(trained.get_submodule("1").get_buffer("num_batches_tracked")) == 3
    for candidate in (model, trained):
        recalibrate_(candidate, pairs(batches))
    torch.testing.assert_close(dict(trained.state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize("training", [False, True])
def test_recalibration_restores_the_models_mode(batches: Batches, training: bool) -> None:
    model = network().train(training)
    recalibrate_(model, pairs(batches))
    assert {module.training for module in model.modules()} == {training}


def test_images_alone_do_as_well_as_pairs_with_labels(batches: Batches) -> None:
    alone, with_labels = network(), network()
    recalibrate_(alone, (batch.images for batch in batches.epoch(1)))
    recalibrate_(with_labels, pairs(batches))
    torch.testing.assert_close(dict(alone.state_dict()), dict(with_labels.state_dict()), rtol=0, atol=0)


def test_modules_in_another_mode_than_the_model_keep_it(batches: Batches) -> None:
    model = network().train()
    model[1].eval()
    recalibrate_(model, pairs(batches))
    assert [module.training for module in model] == [place != 1 for place in range(len(model))]


def test_without_batches_there_is_an_error() -> None:
    with pytest.raises(ValueError, match="batches holds no batch"):
        recalibrate_(network(), [])
