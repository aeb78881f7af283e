"""All steps of an epoch, and evaluations: step by step, or as a CUDA graph that is replayed.

In a graph even the batch and the learning rate are chosen on the device. Sums are read once per epoch.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from strucspars.data.batches import Batches, ResidentBatches
from strucspars.train.engine import Engine
from strucspars.train.steps import TrainingStep

WARMUP_STEPS = 3
# Steps that the host may queue ahead of the device: enough to keep it busy, few enough to stop soon.
MAX_STEPS_AHEAD = 64
# Several runs share the random state of the process and of the device. Capturing a graph, initialising weights, seeding
# a generator and saving its state each need exclusive access.
CAPTURE_LOCK = threading.Lock()
# The teacher computes this many batches at once; one at a time would leave a GPU idle. Without activations for a
# backward pass they need no more memory than a training step of one batch.
TEACHER_BATCHES = 16
TOP = 5

Stop = Callable[[], bool]
OnStep = Callable[[int], None]


@final
class PlainEpochs:
    """Runs step after step."""

    def __init__(self, step: TrainingStep, batches: Batches) -> None:
        self._step, self._batches = step, batches

    def run(self, epoch: int, rates: Sequence[float], *, start_step: int, should_stop: Stop, on_step: OnStep) -> int:
        """Run from a step to the end, or until `should_stop`; returns how many steps of the epoch are done."""
        done = start_step
        for batch in self._batches.epoch(epoch, start_step=start_step):
            for group in self._step.optimizer.param_groups:
                group["lr"] = rates[done]
            self._step(batch.images, batch.labels, self._step.targets(batch.images))
            done += 1
            on_step(done)
            if should_stop():
                break
        return done


@final
class CapturedEpochs:
    """Replays the step as one CUDA graph over data that are on the device."""

    def __init__(self, step: TrainingStep, batches: ResidentBatches) -> None:
        self._batches = batches
        device = batches.images.device
        self._place = torch.zeros(1, dtype=torch.int64, device=device)
        self._rates = torch.zeros(batches.steps, device=device)
        self._rate = torch.zeros((), device=device)
        # The graph knows addresses only: everything it reads or writes must live as long as this object.
        self._step = step
        self._images, self._labels = torch.empty_like(batches.images[0]), torch.empty_like(batches.labels[0])
        for group in step.optimizer.param_groups:
            group["lr"] = self._rate
        batches.fill_(1)
        self._targets = epoch_targets(step.targets, batches.images)
        with counters_set_aside(step.model) as self._counters:
            self._graph = captured(self._whole_step, lambda: [*step.tensors(), self._place])

    def run(self, epoch: int, rates: Sequence[float], *, start_step: int, should_stop: Stop, on_step: OnStep) -> int:
        """As `PlainEpochs.run`."""
        self._batches.fill_(epoch)
        targets = epoch_targets(self._step.targets, self._batches.images)
        if targets is not None:
            assert self._targets is not None, "the step has had a teacher from the beginning"
            self._targets.copy_(targets)
        self._rates.copy_(torch.tensor(rates))
        self._place.fill_(start_step)
        done = self._replay(start_step, should_stop, on_step)
        if self._counters:
            torch._foreach_add_(self._counters, done - start_step)
        return done

    def _replay(self, start_step: int, should_stop: Stop, on_step: OnStep) -> int:
        """Replay without ever emptying the device's queue, and without running far ahead of the device."""
        earlier: torch.cuda.Event | None = None
        for done in range(start_step + 1, self._batches.steps + 1):
            self._graph.replay()
            if (done - start_step) % (MAX_STEPS_AHEAD // 2) == 0:
                if earlier is not None:
                    earlier.synchronize()
                earlier = torch.cuda.Event()  # type: ignore[no-untyped-call]  # untyped in torch
                earlier.record()
                on_step(done)
            if should_stop():
                return done
        return self._batches.steps

    def _whole_step(self) -> None:
        batches = self._batches
        self._images.copy_(batches.images.index_select(0, self._place)[0])
        self._labels.copy_(batches.labels.index_select(0, self._place)[0])
        self._rate.copy_(self._rates.index_select(0, self._place)[0])
        targets = None if self._targets is None else self._targets.index_select(0, self._place)[0]
        self._step(self._images, self._labels, targets)
        # Wraps around: the warm-up may take more steps than a small epoch has.
        self._place.add_(1).remainder_(batches.steps)


EpochRunner = PlainEpochs | CapturedEpochs


def epoch_runner(engine: Engine, step: TrainingStep, batches: Batches) -> EpochRunner:
    """The fastest runner that the engine and the data allow."""
    if engine.captures_graphs and isinstance(batches, ResidentBatches):
        return CapturedEpochs(step, batches)
    return PlainEpochs(step, batches)


def epoch_targets(targets: Callable[[torch.Tensor], torch.Tensor | None], images: torch.Tensor) -> torch.Tensor | None:
    """A teacher's targets `(steps, B, classes)` for the images `(steps, B, C, H, W)` of an epoch; None without one."""
    steps, batch_size = images.shape[:2]
    # In evaluation mode images do not influence each other, so several batches can go through at once. Trying out
    # algorithms for their shape would spoil what another thread is capturing.
    with CAPTURE_LOCK:
        answers = [targets(batches.flatten(0, 1)) for batches in torch.split(images, TEACHER_BATCHES)]
    present = [answer for answer in answers if answer is not None]
    return torch.cat(present).view(steps, batch_size, -1) if present else None


@contextmanager
def counters_set_aside(model: nn.Module) -> Iterator[list[torch.Tensor]]:
    """Remove the unused counters of batch norms; yields them, to be increased once per epoch instead of per step."""
    norms = [
        norm
        for norm in model.modules()
        if isinstance(norm, _BatchNorm) and norm.momentum is not None and norm.num_batches_tracked is not None
    ]
    counters = [norm.get_buffer("num_batches_tracked") for norm in norms]
    for norm in norms:
        norm._buffers["num_batches_tracked"] = None
    try:
        yield counters
    finally:
        for norm, counter in zip(norms, counters, strict=True):
            norm._buffers["num_batches_tracked"] = counter


def captured(step: Callable[[], None], tensors: Callable[[], Sequence[torch.Tensor]]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of the step. Capturing needs a warm-up, which is undone: `tensors` are those that a step changes."""
    with CAPTURE_LOCK:
        before = [tensor.clone() for tensor in tensors()]
        for _ in range(WARMUP_STEPS):
            step()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.current_stream().synchronize()
        # Runs in other threads use the device meanwhile, which must not spoil this capture.
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
            step()
        with torch.no_grad():
            for tensor, value in zip(tensors(), before, strict=True):
                tensor.copy_(value)
    return graph


@dataclass(frozen=True)
class Accuracy:
    """Fractions of the test images whose label is the best guess, or among the best five; and the mean loss."""

    top1: float
    top5: float
    loss: float


@final
class Evaluation:
    """Evaluates one model as often as asked; with a graph, only until one of its layers is replaced."""

    def __init__(self, engine: Engine, model: nn.Module, batches: Batches) -> None:
        self._engine, self._model, self._batches = engine, model, batches
        self._sums = torch.zeros(4, dtype=torch.float64, device=engine.device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._place = torch.zeros(1, dtype=torch.int64, device=engine.device)

    @torch.no_grad()
    def accuracy(self) -> Accuracy:
        """Evaluate over all processes; the model's mode is restored."""
        training = self._model.training
        self._model.eval()
        self._sums.zero_()
        if self._engine.captures_graphs and isinstance(self._batches, ResidentBatches):
            self._replay(self._batches)
        else:
            for batch in self._batches.epoch(0):
                self._add(batch.images, batch.labels, batch.valid)
        self._model.train(training)
        loss, top1, top5, count = self._engine.summed(self._sums.clone()).tolist()
        return Accuracy(top1 / count, top5 / count, loss / count)

    def _add(self, images: torch.Tensor, labels: torch.Tensor, valid: torch.Tensor) -> None:
        with self._engine.fabric.autocast():
            scores = self._model(images).float()
        losses = functional.cross_entropy(scores, labels, reduction="none")
        best = scores.topk(min(TOP, scores.shape[1]), dim=1).indices
        hits = best == labels[:, None]
        counts = torch.stack([losses, hits[:, 0], hits.any(dim=1), torch.ones_like(losses)])
        self._sums += (counts * valid).sum(dim=1, dtype=torch.float64)

    def _replay(self, batches: ResidentBatches) -> None:
        def step() -> None:
            images = torch.empty_like(batches.images[0]).copy_(batches.images.index_select(0, self._place)[0])
            labels, valid = (part.index_select(0, self._place)[0] for part in (batches.labels, batches.valid))
            self._add(images, labels, valid)
            self._place.add_(1).remainder_(batches.steps)

        if self._graph is None:
            batches.fill_(0)
            self._graph = captured(step, lambda: [self._place, self._sums])
        self._place.zero_()
        for _ in range(batches.steps):
            self._graph.replay()
