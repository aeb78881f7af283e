"""What a stage minimises: cross-entropy, and the distance from a teacher."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True, eq=False, kw_only=True)
class Distillation:
    """A teacher in evaluation mode, its share of the loss, and the temperature (Hinton et al., 2015)."""

    teacher: nn.Module
    weight: float
    temperature: float

    def loss(self, scores: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
        """Divergence of the softened predictions, scaled so that its gradient does not depend on the temperature."""
        with torch.no_grad():
            target = functional.log_softmax(self.teacher(images).float() / self.temperature, dim=1)
        softened = functional.log_softmax(scores.float() / self.temperature, dim=1)
        divergence = functional.kl_div(softened, target, reduction="batchmean", log_target=True)
        return divergence * self.temperature**2


@dataclass(frozen=True, eq=False, kw_only=True)
class StageLoss:
    """The loss of one stage."""

    label_smoothing: float = 0.0
    distillation: Distillation | None = None

    def __call__(self, scores: torch.Tensor, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Mean loss over the batch."""
        loss = functional.cross_entropy(scores, labels, label_smoothing=self.label_smoothing)
        if self.distillation is None:
            return loss
        weight = self.distillation.weight
        return (1 - weight) * loss + weight * self.distillation.loss(scores, images)
