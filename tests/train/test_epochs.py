import pytest
import torch
from torch import nn
from torch.nn import functional

from strucspars.data.batches import EpochOrder, ResidentBatches
from strucspars.data.image_set import ImageSet
from strucspars.train.engine import Engine
from strucspars.train.epochs import TEACHER_BATCHES, Evaluation, counters_set_aside, epoch_targets
from strucspars.train.recipe import EngineRecipe, StageRecipe
from strucspars.train.rules import TrainingRule
from strucspars.train.steps import StageLoss, TrainingStep

CLASSES = 8


class Lookup(nn.Module):
    """Scores by the number of an image, which is its only pixel."""

    def __init__(self, scores: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("scores", scores)
        self.dropout = nn.Dropout(0.9)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        numbers = images[:, 0, 0, 0].round().long()
        scores: torch.Tensor = self.dropout(self.get_buffer("scores")[numbers])
        return scores


def evaluation(scores: torch.Tensor, labels: list[int], *, batch_size: int) -> tuple[Evaluation, Lookup]:
    pixels = torch.arange(len(labels), dtype=torch.uint8).view(-1, 1, 1, 1)
    batches = ResidentBatches(
        ImageSet(pixels, torch.tensor(labels)),
        EpochOrder(count=len(labels), batch_size=batch_size, shuffled=False, seed=0),
        mean=(0.0,),
        std=(1 / 255,),
        device=torch.device("cpu"),
    )
    model = Lookup(scores)
    return Evaluation(Engine(EngineRecipe(device="cpu")), model, batches), model


def scores_with_label_at_rank(ranks: list[int], labels: list[int]) -> torch.Tensor:
    """Scores whose label is the best guess (rank 1), the second best, ..."""
    scores = torch.zeros(len(ranks), CLASSES)
    for row, (rank, label) in enumerate(zip(ranks, labels, strict=True)):
        others = [number for number in range(CLASSES) if number != label]
        order = [*others[: rank - 1], label, *others[rank - 1 :]]
        scores[row, order] = torch.arange(CLASSES, 0, -1, dtype=torch.float32)
    return scores


@pytest.mark.parametrize("batch_size", [2, 3, 4, 7, 10, 64])
def test_top_1_top_5_and_loss_count_every_image_once_whatever_the_batches(batch_size: int) -> None:
    ranks, labels = [1, 2, 5, 6, 8, 1, 5, 1, 7, 1], [0, 1, 2, 3, 4, 5, 6, 7, 0, 1]
    scores = scores_with_label_at_rank(ranks, labels)
    accuracy = evaluation(scores, labels, batch_size=batch_size)[0].accuracy()
    assert accuracy.top1 == 4 / 10
    assert accuracy.top5 == 7 / 10
    assert accuracy.loss == pytest.approx(functional.cross_entropy(scores, torch.tensor(labels)).item())


def test_images_that_only_fill_up_the_last_batch_are_not_counted() -> None:
    # The filling is image 0, which alone is right.
    scores = scores_with_label_at_rank([1, 6, 6, 6, 6], [0, 1, 2, 3, 4])
    assert evaluation(scores, [0, 1, 2, 3, 4], batch_size=64)[0].accuracy().top1 == 1 / 5


def test_evaluating_restores_the_models_mode_and_can_be_repeated() -> None:
    evaluated, model = evaluation(scores_with_label_at_rank([1, 2], [3, 4]), [3, 4], batch_size=2)
    for training in (True, False):
        model.train(training)
        assert evaluated.accuracy() == evaluated.accuracy()
        assert model.training == model.dropout.training == training


def test_fewer_than_five_classes_are_all_among_the_best_five() -> None:
    scores = torch.tensor([[2.0, 1.0, 0.0], [2.0, 1.0, 0.0]])
    accuracy = evaluation(scores, [0, 2], batch_size=2)[0].accuracy()
    assert (accuracy.top1, accuracy.top5) == (0.5, 1.0)


def test_an_evaluation_counts_nothing_of_the_one_before() -> None:
    labels = [0, 1, 2, 3]
    evaluated, model = evaluation(scores_with_label_at_rank([1, 1, 1, 1], labels), labels, batch_size=3)
    assert evaluated.accuracy().top1 == 1
    model.get_buffer("scores").copy_(scores_with_label_at_rank([1, 2, 6, 6], labels))
    again = evaluated.accuracy()
    assert (again.top1, again.top5) == (1 / 4, 2 / 4)


def test_evaluating_keeps_nothing_for_gradients() -> None:
    evaluated, model = evaluation(scores_with_label_at_rank([1, 2], [3, 4]), [3, 4], batch_size=2)
    enabled: list[bool] = []
    model.register_forward_hook(lambda *_: enabled.append(torch.is_grad_enabled()))
    evaluated.accuracy()
    assert enabled == [False]


def normalised_network() -> nn.Module:
    """A network whose images influence each other, but for evaluation mode."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.LazyLinear(5))
    model(torch.randn(16, 3, 4, 4))
    return model


def training_step(loss: StageLoss) -> TrainingStep:
    return TrainingStep(
        Engine(EngineRecipe(device="cpu")), normalised_network(), StageRecipe(epochs=1), loss, TrainingRule()
    )


@pytest.mark.parametrize("steps", [1, TEACHER_BATCHES, 2 * TEACHER_BATCHES + 1])
@pytest.mark.parametrize("batch_size", [2, 7])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_the_targets_of_an_epoch_are_those_of_its_batches(
    steps: int, batch_size: int, memory_format: torch.memory_format
) -> None:
    teacher = normalised_network().eval()
    step = training_step(StageLoss(teacher=teacher, weight=0.5, temperature=3.0))
    images = torch.randn(steps * batch_size, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    images = images.to(memory_format=memory_format).view(steps, batch_size, 3, 4, 4)
    targets = epoch_targets(step.targets, images)
    assert targets is not None
    for batch, batch_targets in zip(images, targets, strict=True):
        torch.testing.assert_close(batch_targets, torch.log_softmax(teacher(batch) / 3, dim=1))


def test_a_teacher_says_nothing_about_classes_that_the_images_do_not_show() -> None:
    teacher, images = normalised_network().eval(), torch.randn(6, 3, 4, 4)
    shown, hidden = torch.tensor([0, 2, 3]), torch.tensor([1, 4])
    loss = StageLoss(teacher=teacher, shown=shown, weight=1.0, temperature=2.0)
    targets = loss.targets(images)
    assert targets is not None
    torch.testing.assert_close(targets, torch.log_softmax(teacher(images)[:, shown] / 2, dim=1))
    labels = torch.zeros(6, dtype=torch.int64)
    assert loss(teacher(images), labels, targets) == 0
    scores = torch.randn(6, 5, requires_grad=True)
    torch.autograd.backward(loss(scores, labels, targets))
    assert scores.grad is not None
    assert (scores.grad[:, hidden] == 0).all()
    assert (scores.grad[:, shown] != 0).all()


def test_without_a_teacher_an_epoch_has_no_targets() -> None:
    assert epoch_targets(training_step(StageLoss()).targets, torch.zeros(3, 2, 3, 4, 4)) is None


def test_counters_of_batch_norms_come_back_as_the_same_tensors_uncounted() -> None:
    model = nn.Sequential(
        nn.BatchNorm2d(2), nn.BatchNorm2d(2, momentum=None), nn.BatchNorm2d(2, track_running_stats=False)
    )
    counter = model[0].num_batches_tracked
    with counters_set_aside(model) as counters:
        assert model[0].num_batches_tracked is None
        model(torch.randn(2, 2, 3, 3))
    assert counters == [counter]
    assert model[0].num_batches_tracked is counter
    assert counter == 0
    # The plain mean of all batches needs its count.
    assert model[1].num_batches_tracked == 1
    assert not torch.equal(model[0].running_mean, torch.zeros(2))


def test_counters_of_batch_norms_come_back_after_an_error_too() -> None:
    norm = nn.BatchNorm2d(2)
    counter = norm.num_batches_tracked
    with pytest.raises(RuntimeError, match="out of memory"), counters_set_aside(norm):
        raise RuntimeError("out of memory")
    assert norm.num_batches_tracked is counter
