from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from strucspars.train.steps import Distillation, StageLoss


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
    distillation = Distillation(teacher=Fixed(teacher_scores), weight=weight, temperature=temperature)
    loss = StageLoss(distillation=distillation)
    return lambda scores, labels: loss(scores, labels, distillation.targets(IMAGES))


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
    targets = Distillation(teacher=teacher, weight=1.0, temperature=4.0).targets(IMAGES)
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


def test_the_digest_of_a_teacher_is_that_of_its_weights_in_any_memory_format() -> None:
    def digest(teacher: nn.Module) -> str:
        return Distillation(teacher=teacher, weight=1.0, temperature=4.0).digest()

    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    before = digest(teacher)
    assert digest(teacher.to(memory_format=torch.channels_last)) == before
    teacher.get_buffer("1.running_mean")[2] += 1
    assert digest(teacher) != before
