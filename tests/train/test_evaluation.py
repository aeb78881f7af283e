import pytest
import torch
from torch import nn
from torch.nn import functional

from strucspars.data.batches import ResidentBatches
from strucspars.data.image_set import ImageSet
from strucspars.train.engine import Engine
from strucspars.train.epochs import Evaluation
from strucspars.train.recipe import EngineRecipe

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
        split=ImageSet(pixels, torch.tensor(labels)),
        mean=(0.0,),
        std=(1 / 255,),
        batch_size=batch_size,
        device=torch.device("cpu"),
        shuffled=False,
        augmentation=None,
        seed=0,
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
