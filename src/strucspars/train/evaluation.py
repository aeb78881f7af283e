"""Accuracy on the test images."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from strucspars.data.batches import Batches, ResidentBatches
from strucspars.train.engine import Engine
from strucspars.train.steps import captured

TOP = 5


@dataclass(frozen=True)
class Accuracy:
    """Shares of the test images whose label is the best guess, or among the best five; and the mean loss."""

    top1: float
    top5: float
    loss: float


class Evaluation:
    """Evaluates one model as often as asked; on a GPU as a CUDA graph, with the shapes of training."""

    def __init__(self, engine: Engine, model: nn.Module, batches: Batches) -> None:
        self._engine, self._model, self._batches = engine, model, batches
        self._sums = torch.zeros(4, dtype=torch.float64, device=engine.device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._place = torch.zeros(1, dtype=torch.int64, device=engine.device)
        # Weights are not modules' for good: a layer that is replaced needs another capture, hence another Evaluation.
        self._captures = engine.captures_graphs and isinstance(batches, ResidentBatches)

    @torch.no_grad()
    def accuracy(self) -> Accuracy:
        """Evaluate over all processes; the model's mode is restored."""
        training = self._model.training
        self._model.eval()
        self._sums.zero_()
        if self._captures:
            self._replay()
        else:
            for batch in self._batches.epoch(0):
                self._add(batch.images, batch.labels, batch.valid)
        self._model.train(training)
        loss, top1, top5, count = self._engine.summed(self._sums.clone()).tolist()
        return Accuracy(top1 / count, top5 / count, loss / count)

    def _add(self, images: torch.Tensor, labels: torch.Tensor, valid: torch.Tensor) -> None:
        with self._engine.with_precision():
            scores = self._model(images).float()
        losses = functional.cross_entropy(scores, labels, reduction="none")
        best = scores.topk(min(TOP, scores.shape[1]), dim=1).indices
        hits = best == labels[:, None]
        counts = torch.stack([losses, hits[:, 0], hits.any(dim=1), torch.ones_like(losses)])
        self._sums += (counts * valid).sum(dim=1, dtype=torch.float64)

    def _replay(self) -> None:
        batches = self._batches
        assert isinstance(batches, ResidentBatches)
        if self._graph is None:
            batches.fill_(0)
            self._graph = captured(self._captured_step, lambda: [self._place, self._sums])
        self._place.zero_()
        for _ in range(batches.steps):
            self._graph.replay()

    def _captured_step(self) -> None:
        batches = self._batches
        assert isinstance(batches, ResidentBatches)
        images = torch.empty_like(batches.images[0]).copy_(batches.images.index_select(0, self._place)[0])
        labels, valid = (part.index_select(0, self._place)[0] for part in (batches.labels, batches.valid))
        self._add(images, labels, valid)
        self._place.add_(1).remainder_(batches.steps)
