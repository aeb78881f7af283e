"""What a stage minimises: cross-entropy, and the distance from a teacher."""

import hashlib
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

    @torch.no_grad()
    def targets(self, images: torch.Tensor) -> torch.Tensor:
        """The teacher's softened predictions, as logarithms of probabilities `(B, classes)`."""
        return functional.log_softmax(self.teacher(images).float() / self.temperature, dim=1)

    def loss(self, scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Divergence from the targets, scaled so that its gradient does not depend on the temperature."""
        softened = functional.log_softmax(scores.float() / self.temperature, dim=1)
        divergence = functional.kl_div(softened, targets, reduction="batchmean", log_target=True)
        return divergence * self.temperature**2

    def digest(self) -> str:
        """SHA-256 of the teacher's weights: the same network has the same, wherever its folder lies."""
        digest = hashlib.sha256()
        for name, tensor in self.teacher.state_dict().items():
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\0".encode())
            digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
        return digest.hexdigest()


@dataclass(frozen=True, eq=False, kw_only=True)
class StageLoss:
    """The loss of one stage."""

    label_smoothing: float = 0.0
    distillation: Distillation | None = None

    def __call__(self, scores: torch.Tensor, labels: torch.Tensor, targets: torch.Tensor | None) -> torch.Tensor:
        """Mean loss over the batch; `targets` are the teacher's for its images, None without one."""
        loss = functional.cross_entropy(scores, labels, label_smoothing=self.label_smoothing)
        if self.distillation is None:
            return loss
        assert targets is not None, "a teacher's targets belong to its loss"
        weight = self.distillation.weight
        return (1 - weight) * loss + weight * self.distillation.loss(scores, targets)
