"""One optimizer step, and a whole epoch of them: plainly, or as a CUDA graph that is replayed.

In a graph everything of a step happens on the device, the choice of the batch and of the learning rate included, so
the host only says "again". Sums are read once per epoch.
"""

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import nn

from strucspars.data.batches import Batches, ResidentBatches
from strucspars.train.average import AveragedModel
from strucspars.train.engine import CastAtOnce, Engine
from strucspars.train.loss import StageLoss
from strucspars.train.recipe import StageRecipe
from strucspars.train.rules import TrainingRule


def batch_norms_with_idle_counters(model: nn.Module) -> list[nn.modules.batchnorm._BatchNorm]:
    """The batch norms that count batches, but do not use the count: those with a momentum."""
    return [
        module
        for module in model.modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
        and module.momentum is not None
        and module.num_batches_tracked is not None
    ]


@contextmanager
def counters_set_aside(model: nn.Module) -> Iterator[list[torch.Tensor]]:
    """Let batch norms forget their counters for a while; they come back as the same tensors.

    Yields:
        The counters, for whoever counts instead.
    """
    norms = batch_norms_with_idle_counters(model)
    counters = [norm.get_buffer("num_batches_tracked") for norm in norms]
    for norm in norms:
        norm._buffers["num_batches_tracked"] = None
    try:
        yield counters
    finally:
        for norm, counter in zip(norms, counters, strict=True):
            norm._buffers["num_batches_tracked"] = counter


WARMUP_STEPS = 3
# How far the host may run ahead of the device, in steps: enough to keep it busy, little enough to stop soon.
MAX_STEPS_AHEAD = 64
# Runs in several threads share the random state of the process and of the device. Whoever captures a graph, draws
# weights, seeds the generator or sets its state aside for a while does so alone.
CAPTURE_LOCK = threading.Lock()
# A teacher is asked about this many batches at a time where they are all there: one at a time leaves a GPU idle. It
# keeps no activations, so these take no more memory than a training step of one batch through some dozens of layers.
BATCHES_PER_QUESTION = 16


class TrainingStep:
    """Forward, backward, rule, optimizer and average.

    Attributes:
        sums: of the batches' mean losses and of their right answers, on the device.
    """

    def __init__(
        self, engine: Engine, model: nn.Module, options: StageRecipe, loss: StageLoss, rule: TrainingRule
    ) -> None:
        self.model = model
        self.optimizer = _sgd(model, options, on_device=engine.captures_graphs, device=engine.device)
        self.average = None if options.ema is None else AveragedModel(model, options.ema)
        self.sums = torch.zeros(2, dtype=torch.float64, device=engine.device)
        self._engine, self._loss, self._rule = engine, loss, rule
        self._cast = CastAtOnce(model, torch.bfloat16) if engine.casts_at_once else None
        self._forward = engine.trainable(self._cast or model)
        self._fabric_optimizer = engine.prepared(self.optimizer)

    def targets(self, images: torch.Tensor) -> torch.Tensor | None:
        """What the teacher says of images, computed in the precision of training; None without one."""
        if self._loss.distillation is None:
            return None
        with self._engine.with_precision():
            return self._loss.distillation.targets(images)

    def __call__(self, images: torch.Tensor, labels: torch.Tensor, targets: torch.Tensor | None) -> None:
        """One step on one batch, with the teacher's `targets` for it if there is one."""
        self.optimizer.zero_grad(set_to_none=True)
        scores = self._forward(images)
        # The loss itself is in full precision all the same.
        with self._engine.with_precision():
            loss = self._loss(scores, labels, targets)
        self._engine.backward(loss)
        if self._cast is not None:
            self._cast.collect_gradients_()
        self._engine.unscale_(self.optimizer)
        self._rule.add_gradient_()
        self._fabric_optimizer.step()
        if self.average is not None:
            self.average.update_()
        with torch.no_grad():
            right = (scores.argmax(dim=1) == labels).sum()
            self.sums += torch.stack([loss.detach(), right])

    def set_rate_(self, rate: float) -> None:
        """The learning rate of the next steps."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def tensors(self) -> list[torch.Tensor]:
        """Every tensor that a step changes."""
        momenta = [value for state in self.optimizer.state.values() for value in state.values()]
        averaged = [] if self.average is None else list(self.average.model.state_dict().values())
        return [*self.model.state_dict().values(), *momenta, *averaged, self.sums]


def _sgd(model: nn.Module, options: StageRecipe, *, on_device: bool, device: torch.device) -> torch.optim.SGD:
    """SGD with its momenta in place from the start, at zero, which is what its first step assumes."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # A learning rate that lives on the device needs the fused form.
    rate = torch.tensor(options.lr, device=device) if on_device else options.lr
    optimizer = torch.optim.SGD(
        parameters,
        lr=rate,
        momentum=options.momentum,
        weight_decay=options.weight_decay,
        fused=True if on_device else None,
    )
    if options.momentum > 0:
        for parameter in parameters:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


class EpochRunner(Protocol):
    """Runs the steps of one epoch."""

    def run(
        self,
        epoch: int,
        rates: Sequence[float],
        *,
        start_step: int,
        should_stop: Callable[[], bool],
        on_step: Callable[[int], None],
    ) -> int:
        """Run from a step to the end, or until told to stop; returns the steps of this epoch that are done."""


class PlainEpochs:
    """Step after step, as written."""

    def __init__(self, step: TrainingStep, batches: Batches) -> None:
        self._step, self._batches = step, batches

    def run(
        self,
        epoch: int,
        rates: Sequence[float],
        *,
        start_step: int,
        should_stop: Callable[[], bool],
        on_step: Callable[[int], None],
    ) -> int:
        """Run the steps of an epoch."""
        done = start_step
        for batch in self._batches.epoch(epoch, start_step=start_step):
            self._step.set_rate_(rates[done])
            self._step(batch.images, batch.labels, self._step.targets(batch.images))
            done += 1
            on_step(done)
            if should_stop():
                break
        return done


class CapturedEpochs:
    """The step as one CUDA graph over data that lie on the device."""

    def __init__(self, step: TrainingStep, batches: ResidentBatches) -> None:
        self._batches = batches
        device = batches.images.device
        self._place = torch.zeros(1, dtype=torch.int64, device=device)
        self._rates = torch.zeros(batches.steps, device=device)
        self._rate = torch.zeros((), device=device)
        # The graph knows addresses only: whatever it reads or writes must live as long as this object.
        self._step = step
        self._images, self._labels = torch.empty_like(batches.images[0]), torch.empty_like(batches.labels[0])
        for group in step.optimizer.param_groups:
            group["lr"] = self._rate
        batches.fill_(1)
        self._targets = epoch_targets(step.targets, batches.images)
        with counters_set_aside(step.model) as self._counters:
            self._graph = captured(self._whole_step, lambda: [*step.tensors(), self._place])

    def run(
        self,
        epoch: int,
        rates: Sequence[float],
        *,
        start_step: int,
        should_stop: Callable[[], bool],
        on_step: Callable[[int], None],
    ) -> int:
        """Replay the steps of an epoch."""
        self._batches.fill_(epoch)
        targets = epoch_targets(self._step.targets, self._batches.images)
        if targets is not None:
            assert self._targets is not None, "the step has had a teacher from the beginning"
            self._targets.copy_(targets)
        self._rates.copy_(torch.tensor(rates))
        self._place.fill_(start_step)
        done = self._replayed(start_step, should_stop, on_step)
        if self._counters:
            torch._foreach_add_(self._counters, done - start_step)
        return done

    def _replayed(self, start_step: int, should_stop: Callable[[], bool], on_step: Callable[[int], None]) -> int:
        pace = Pace()
        for step in range(start_step, self._batches.steps):
            self._graph.replay()
            if pace.keep():
                on_step(step + 1)
            if should_stop():
                return step + 1
        return self._batches.steps

    def _whole_step(self) -> None:
        batches = self._batches
        self._images.copy_(batches.images.index_select(0, self._place)[0])
        self._labels.copy_(batches.labels.index_select(0, self._place)[0])
        self._rate.copy_(self._rates.index_select(0, self._place)[0])
        targets = None if self._targets is None else self._targets.index_select(0, self._place)[0]
        self._step(self._images, self._labels, targets)
        # Around: the warm-up may take more steps than a small epoch has.
        self._place.add_(1).remainder_(batches.steps)


def epoch_targets(targets: Callable[[torch.Tensor], torch.Tensor | None], images: torch.Tensor) -> torch.Tensor | None:
    """A teacher's targets `(steps, B, classes)` for an epoch of images `(steps, B, C, H, W)`; None without a teacher.

    In evaluation mode images do not influence each other, so they need not be asked about batch by batch.
    """
    steps, batch_size = images.shape[:2]
    answers = []
    for batches in torch.split(images, BATCHES_PER_QUESTION):
        answer = targets(batches.flatten(0, 1))
        if answer is None:
            return None
        answers.append(answer)
    return torch.cat(answers).view(steps, batch_size, -1)


class Pace:
    """Keeps the host from running far ahead of the device, without ever emptying the device's queue."""

    def __init__(self) -> None:
        self._count = 0
        self._earlier: torch.cuda.Event | None = None

    def keep(self) -> bool:
        """Count a step; every some steps wait for the device to finish those before, and return True."""
        self._count += 1
        if self._count % (MAX_STEPS_AHEAD // 2):
            return False
        if self._earlier is not None:
            self._earlier.synchronize()
        self._earlier = torch.cuda.Event()  # type: ignore[no-untyped-call]  # untyped in torch
        self._earlier.record()
        return True


def captured(step: Callable[[], None], tensors: Callable[[], Sequence[torch.Tensor]]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of the step. The warm-up that capturing needs is undone: `tensors` are what a step changes."""
    with CAPTURE_LOCK:
        before = [tensor.clone() for tensor in tensors()]
        for _ in range(WARMUP_STEPS):
            step()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.current_stream().synchronize()
        # Other runs go on in other threads meanwhile; what they ask of the device must not spoil this capture.
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
            step()
        with torch.no_grad():
            for tensor, value in zip(tensors(), before, strict=True):
                tensor.copy_(value)
    return graph


def epoch_runner(engine: Engine, step: TrainingStep, batches: Batches) -> EpochRunner:
    """The fastest way that the engine and the data allow."""
    if engine.captures_graphs and isinstance(batches, ResidentBatches):
        return CapturedEpochs(step, batches)
    return PlainEpochs(step, batches)


DECAY_AT = (0.5, 0.75)
DECAY_FACTOR = 0.1


def learning_rates(stage: StageRecipe, epoch: int, steps: int) -> list[float]:
    """The rates of all steps of an epoch, counted from 1: warm-up first, then the schedule.

    >>> stage = StageRecipe(epochs=4, lr=1.0, schedule="steps")
    >>> [round(learning_rates(stage, epoch, steps=1)[0], 3) for epoch in (1, 2, 3, 4)]
    [1.0, 1.0, 0.1, 0.01]
    """
    return [_rate(stage, epoch - 1 + step / steps, 1 / steps) for step in range(steps)]


def _rate(stage: StageRecipe, position: float, step: float) -> float:
    """The rate at a position in epochs; `step` is the length of one step in epochs."""
    if position < stage.lr_warmup_epochs:
        # The end of the step counts: a rate of zero would waste the first one.
        return stage.lr * (position + step) / stage.lr_warmup_epochs
    if stage.schedule == "cosine":
        progress = (position - stage.lr_warmup_epochs) / (stage.epochs - stage.lr_warmup_epochs)
        return stage.lr * (1 + math.cos(math.pi * progress)) / 2
    if stage.schedule == "steps":
        # Compared in whole steps: 0.75 of the epochs must not be missed by a rounding error.
        passed = sum(position + step / 2 > share * stage.epochs for share in DECAY_AT)
        return stage.lr * DECAY_FACTOR**passed
    return stage.lr
