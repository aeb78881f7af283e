import pytest
import torch
from torch import nn

from strucspars.train.engine import Engine
from strucspars.train.epochs import TEACHER_BATCHES, epoch_targets
from strucspars.train.recipe import EngineRecipe, StageRecipe
from strucspars.train.rules import TrainingRule
from strucspars.train.steps import Distillation, StageLoss, TrainingStep


def network() -> nn.Module:
    """A network whose images influence each other, but for evaluation mode."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.LazyLinear(5))
    model(torch.randn(16, 3, 4, 4))
    return model


def training_step(loss: StageLoss) -> TrainingStep:
    return TrainingStep(Engine(EngineRecipe(device="cpu")), network(), StageRecipe(epochs=1), loss, TrainingRule())


@pytest.mark.parametrize("steps", [1, TEACHER_BATCHES, 2 * TEACHER_BATCHES + 1])
@pytest.mark.parametrize("batch_size", [2, 7])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_the_targets_of_an_epoch_are_those_of_its_batches(
    steps: int, batch_size: int, memory_format: torch.memory_format
) -> None:
    teacher = network().eval()
    step = training_step(StageLoss(distillation=Distillation(teacher=teacher, weight=0.5, temperature=3.0)))
    images = torch.randn(steps * batch_size, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    images = images.to(memory_format=memory_format).view(steps, batch_size, 3, 4, 4)
    targets = epoch_targets(step.targets, images)
    assert targets is not None
    for batch, batch_targets in zip(images, targets, strict=True):
        torch.testing.assert_close(batch_targets, torch.log_softmax(teacher(batch) / 3, dim=1))


def test_without_a_teacher_an_epoch_has_no_targets() -> None:
    assert epoch_targets(training_step(StageLoss()).targets, torch.zeros(3, 2, 3, 4, 4)) is None
