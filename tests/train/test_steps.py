import copy
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.testing import assert_close

from strucspars.models.cifar import PreactivationResNet
from strucspars.train.recipe import Schedule, StageRecipe
from strucspars.train.steps import AveragedModel, CastAtOnce, StageLoss, learning_rates


class Fixed(nn.Module):
    """A teacher that answers the same whatever it sees."""

    def __init__(self, scores: torch.Tensor) -> None:
        super().__init__()
        self.scores = nn.Parameter(scores)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.scores[: len(images)]


@pytest.fixture
def scores() -> torch.Tensor:
    return torch.randn(6, 10, generator=torch.Generator().manual_seed(0))


LABELS = torch.tensor([0, 3, 9, 9, 1, 5])
IMAGES = torch.zeros(6, 3, 2, 2)


def distilled(
    teacher_scores: torch.Tensor, *, weight: float = 1.0, temperature: float = 4.0
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The loss of scores and labels, as far as a teacher with these scores has a say in it."""
    loss = StageLoss(teacher=Fixed(teacher_scores), weight=weight, temperature=temperature)
    return lambda scores, labels: loss(scores, labels, loss.targets(IMAGES))


def test_without_options_the_loss_is_cross_entropy(scores: torch.Tensor) -> None:
    expected = -functional.log_softmax(scores, dim=1)[torch.arange(6), LABELS].mean()
    torch.testing.assert_close(StageLoss()(scores, LABELS, None), expected)


def test_label_smoothing_shares_some_of_the_labels_weight_among_all_classes(scores: torch.Tensor) -> None:
    targets = 0.8 * functional.one_hot(LABELS, 10) + 0.2 / 10
    expected = -(targets * functional.log_softmax(scores, dim=1)).sum(dim=1).mean()
    torch.testing.assert_close(StageLoss(label_smoothing=0.2)(scores, LABELS, None), expected)


@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_the_distance_from_a_teacher_of_equal_scores_is_zero(scores: torch.Tensor, temperature: float) -> None:
    # A shift of all scores is no difference.
    loss = distilled(scores + 3.0, temperature=temperature)(scores, LABELS)
    torch.testing.assert_close(loss, torch.tensor(0.0), atol=1e-5, rtol=0)


def test_weight_1_ignores_the_labels_and_weight_0_the_teacher(scores: torch.Tensor) -> None:
    other = LABELS.flip(0)
    teacher = scores.flip(0)
    only_teacher, only_labels = distilled(teacher, weight=1.0), distilled(teacher, weight=0.0)
    assert torch.equal(only_teacher(scores, LABELS), only_teacher(scores, other))
    torch.testing.assert_close(only_labels(scores, LABELS), StageLoss()(scores, LABELS, None))


def test_the_loss_between_is_the_weighted_mean(scores: torch.Tensor) -> None:
    teacher = scores.flip(0)
    parts = [distilled(teacher, weight=weight)(scores, LABELS) for weight in (0.0, 0.3, 1.0)]
    torch.testing.assert_close(parts[1], 0.7 * parts[0] + 0.3 * parts[2])


def test_the_gradient_hardly_depends_on_a_high_temperature(scores: torch.Tensor) -> None:
    gradients = []
    for temperature in (20.0, 40.0):
        trained = scores.clone().requires_grad_()
        torch.autograd.backward(distilled(scores.flip(0), temperature=temperature)(trained, LABELS))
        assert trained.grad is not None
        gradients.append(trained.grad)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0.1, atol=0.002)
    # Hinton et al.: in the limit it is that of half the squared distance of the centred scores, per class and image.
    centred = scores - scores.mean(dim=1, keepdim=True)
    torch.testing.assert_close(gradients[1], (centred - centred.flip(0)) / 10 / 6, rtol=0.1, atol=0.002)


def test_the_teacher_gets_no_gradient(scores: torch.Tensor) -> None:
    teacher = Fixed(scores.flip(0))
    targets = StageLoss(teacher=teacher, weight=1.0, temperature=4.0).targets(IMAGES)
    assert targets is not None
    assert not targets.requires_grad
    assert teacher.scores.requires_grad


def test_the_divergence_is_that_of_the_student_from_the_teacher(scores: torch.Tensor) -> None:
    # Not the same scores in another order: between those the mean divergence may be the same in both directions.
    teacher = scores.square()
    target = functional.softmax(teacher / 3, dim=1)
    distance = (target * (target.log() - functional.log_softmax(scores / 3, dim=1))).sum(dim=1).mean()
    torch.testing.assert_close(distilled(teacher, temperature=3.0)(scores, LABELS), 9 * distance)


def test_the_divergence_of_half_precision_scores_is_computed_in_full(scores: torch.Tensor) -> None:
    coarse, teacher = scores.bfloat16(), scores.flip(0).bfloat16()
    loss = distilled(teacher)(coarse, LABELS)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, distilled(teacher.float())(coarse.float(), LABELS))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5))


def test_the_average_equals_a_slow_reference_over_several_steps() -> None:
    model = network()
    average = AveragedModel(model, 0.7)
    expected = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        torch.autograd.backward(model(torch.randn(8, 3, 6, 6)).square().mean())
        optimizer.step()
        average.update_()
        average.copy_counters_()
        for name, value in model.state_dict().items():
            expected[name] = 0.7 * expected[name] + 0.3 * value if value.is_floating_point() else value.clone()
    torch.testing.assert_close(average.model.state_dict(), expected)
    assert average.model.get_buffer("1.num_batches_tracked").item() == 5
    moved = average.model.get_parameter("0.weight") - model.get_parameter("0.weight")
    assert moved.abs().max() > 1e-4


def test_the_average_follows_weights_that_are_loaded() -> None:
    model = network()
    average = AveragedModel(model, 0.5)
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
    before = average.model.get_parameter("0.weight").clone()
    average.update_()
    torch.testing.assert_close(average.model.get_parameter("0.weight"), before + 0.5)


def test_the_average_is_not_trained_and_stays_in_evaluation_mode() -> None:
    average = AveragedModel(network(), 0.9)
    assert not average.model.training
    assert not any(parameter.requires_grad for parameter in average.model.parameters())


def test_what_has_two_names_follows_as_slowly_as_the_rest() -> None:
    model = network()
    model.add_module("norm_again", model[1])
    model.add_module("tied", nn.Conv2d(3, 4, 3, bias=False))
    model.get_submodule("tied").weight = model[0].weight
    average = AveragedModel(model, 0.7)
    expected = {name: 0.7 * value + 0.3 * (value + 1) for name, value in model.state_dict().items()}
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.add_(1)
    average.update_()
    floating = {name: value for name, value in average.model.state_dict().items() if value.is_floating_point()}
    torch.testing.assert_close(floating, {name: expected[name] for name in floating})


def losses_and_gradients(
    model: nn.Module, cast: CastAtOnce | None, images: torch.Tensor
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    model.zero_grad(set_to_none=True)
    with torch.autocast("cpu", torch.bfloat16):
        loss = (cast or model)(images).float().logsumexp(dim=1).mean()
    torch.autograd.backward(loss)
    if cast is not None:
        cast.collect_gradients_()
    return loss.detach(), [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def test_casting_all_weights_at_once_computes_what_autocast_does() -> None:
    torch.manual_seed(0)
    model = PreactivationResNet(20)
    images = torch.randn(4, 3, 16, 16)
    expected_loss, expected = losses_and_gradients(model, None, images)
    loss, gradients = losses_and_gradients(model, CastAtOnce(model, torch.bfloat16), images)
    assert len(gradients) == len(expected) == len(list(model.parameters()))
    assert all(gradient.dtype == torch.float32 for gradient in gradients)
    assert_close(loss, expected_loss)
    assert_close(gradients, expected)


def test_a_compiled_cast_trains_as_the_plain_one() -> None:
    """Step by step: a graph that had kept the first copies would fall behind."""
    images = torch.randn(4, 3, 16, 16)
    losses: dict[bool, list[torch.Tensor]] = {}
    for compiled in (False, True):
        torch.manual_seed(0)
        model = PreactivationResNet(20)
        cast = CastAtOnce(model, torch.bfloat16)
        forward = torch.compile(cast, backend="aot_eager") if compiled else cast
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        losses[compiled] = []
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = forward(images).float().logsumexp(dim=1).mean()
            torch.autograd.backward(loss)
            cast.collect_gradients_()
            optimizer.step()
            losses[compiled].append(loss.detach())
    assert losses[False][0] != losses[False][2]
    assert_close(losses[True], losses[False], rtol=1e-2, atol=0)


def test_cast_weights_follow_the_weights_they_are_copies_of() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten(), nn.LazyLinear(2))
    images = torch.randn(2, 3, 4, 4)
    model(images)
    cast = CastAtOnce(model, torch.bfloat16)
    before = cast(images.bfloat16()).float()
    with torch.no_grad():
        model.get_parameter("0.weight").mul_(2)
        model.get_parameter("0.bias").mul_(2)
        model.get_parameter("2.bias").zero_()
    after = cast(images.bfloat16()).float()
    assert not torch.equal(before, after)
    assert_close(after, model(images), rtol=0.05, atol=0.05)


def test_frozen_and_unused_parameters_get_no_gradient() -> None:
    model = nn.ModuleDict({"used": nn.Linear(2, 2), "frozen": nn.Linear(2, 2), "unused": nn.Linear(2, 2)})
    model["frozen"].requires_grad_(False)

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model

        def forward(self, features: torch.Tensor) -> torch.Tensor:
            hidden: torch.Tensor = self.layers["frozen"](self.layers["used"](features))
            return hidden

    cast = CastAtOnce(Chain(), torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        torch.autograd.backward(cast(torch.ones(1, 2)).sum())
    cast.collect_gradients_()
    assert model["used"].weight.grad is not None
    assert model["frozen"].weight.grad is None
    assert model["unused"].weight.grad is None


def test_a_weight_that_two_layers_share_is_cast_once_and_gets_both_gradients() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.ReLU(), nn.Linear(3, 3, bias=False))
    model[2].weight = model[0].weight
    inputs = torch.randn(4, 3)
    expected_loss, expected = losses_and_gradients(model, None, inputs)
    loss, gradients = losses_and_gradients(model, CastAtOnce(model, torch.bfloat16), inputs)
    assert_close(loss, expected_loss)
    assert_close(gradients, expected)


def test_a_layer_that_computes_with_its_weight_first_does_so_in_full_precision() -> None:
    class Standardised(nn.Conv2d):
        def forward(self, features: torch.Tensor) -> torch.Tensor:
            assert self.weight.dtype == torch.float32
            convolved: torch.Tensor = self._conv_forward(features, self.weight - self.weight.mean(), self.bias)
            return convolved

    cast = CastAtOnce(nn.Sequential(Standardised(2, 2, 1), nn.Conv2d(2, 2, 1)), torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        assert cast(torch.ones(1, 2, 3, 3)).dtype == torch.bfloat16


def test_the_gradients_of_a_step_hold_nothing_of_the_step_before() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2))
    images = torch.randn(2, 3, 4, 4)
    cast = CastAtOnce(model, torch.bfloat16)
    first, again = (losses_and_gradients(model, cast, images)[1] for _ in range(2))
    assert_close(again, first, rtol=0, atol=0)


def all_rates(stage: StageRecipe, steps: int) -> list[float]:
    return [rate for epoch in range(1, stage.epochs + 1) for rate in learning_rates(stage, epoch, steps)]


@given(st.integers(1, 40), st.integers(1, 30))
def test_steps_divide_the_rate_by_ten_at_half_and_three_quarters_of_all_steps(epochs: int, steps: int) -> None:
    rates = all_rates(StageRecipe(epochs=epochs, lr=0.1, schedule="steps"), steps)
    total = epochs * steps
    for place, rate in enumerate(rates):
        passed = (place >= total / 2) + (place >= 3 * total / 4)
        # Between two steps the change may come at the nearer one.
        if all(abs(place - share * total) > 0.5 or place == share * total for share in (0.5, 0.75)):
            assert rate == pytest.approx(0.1 * 0.1**passed)
    assert rates == sorted(rates, reverse=True)


def test_the_papers_finetuning_changes_at_the_first_step_of_epochs_81_and_121() -> None:
    stage = StageRecipe(epochs=160, lr=0.1, schedule="steps", lr_warmup=10 / 160)
    ends = {epoch: (learning_rates(stage, epoch, 782)[0], learning_rates(stage, epoch, 782)[-1]) for epoch in (80, 81)}
    assert ends == {80: pytest.approx((0.1, 0.1)), 81: pytest.approx((0.01, 0.01))}
    assert learning_rates(stage, 120, 782)[-1] == pytest.approx(0.01)
    assert learning_rates(stage, 121, 782)[0] == pytest.approx(0.001)


@given(st.sampled_from(["constant", "steps", "cosine"]), st.integers(1, 5), st.integers(1, 20))
def test_the_warm_up_rises_in_equal_steps_to_the_full_rate(schedule: Schedule, warmup: int, steps: int) -> None:
    stage = StageRecipe(epochs=3 * warmup, lr=0.4, schedule=schedule, lr_warmup=1 / 3)
    rates = all_rates(stage, steps)[: warmup * steps]
    assert rates == pytest.approx([0.4 * (place + 1) / (warmup * steps) for place in range(warmup * steps)])


@given(st.integers(2, 40), st.integers(1, 30), st.integers(0, 1))
def test_the_cosine_falls_from_the_full_rate_to_nearly_zero(epochs: int, steps: int, warmup: int) -> None:
    stage = StageRecipe(epochs=epochs, lr=0.2, schedule="cosine", lr_warmup=warmup / epochs)
    rates = all_rates(stage, steps)[warmup * steps :]
    assert rates[0] == pytest.approx(0.2)
    assert rates == sorted(rates, reverse=True)
    last_step = math.pi / len(rates)
    assert 0 < rates[-1] <= 0.2 * last_step**2 / 4 + 1e-12
    assert sum(rates) / len(rates) == pytest.approx(0.1 * (1 + 1 / len(rates)))


def test_a_constant_rate_is_constant() -> None:
    assert set(all_rates(StageRecipe(epochs=5, lr=0.3), 7)) == {0.3}
