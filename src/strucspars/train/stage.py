"""One stage of training: epochs, their metrics, and checkpoints that a killed run goes on from, exactly."""

import itertools
import math
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from strucspars.core.checks import checked_at_least
from strucspars.data.batches import Batches
from strucspars.train.engine import Engine
from strucspars.train.evaluation import Evaluation
from strucspars.train.loss import StageLoss
from strucspars.train.observer import Observer
from strucspars.train.recipe import StageRecipe
from strucspars.train.rules import TrainingRule
from strucspars.train.run_folder import RunFolder
from strucspars.train.steps import CAPTURE_LOCK, TrainingStep, epoch_runner, learning_rates


def _gathered(engine: Engine, own: Any) -> list[Any]:
    """The values of all processes, in their order; every process must call this."""
    if engine.world_size == 1:
        return [own]
    values = [None] * engine.world_size
    torch.distributed.all_gather_object(values, own)
    return values


def _random_states() -> list[torch.Tensor]:
    """The random state of the CPU, and of the GPU if there is one."""
    with CAPTURE_LOCK:
        states = [torch.get_rng_state()]
        return [*states, torch.cuda.get_rng_state()] if torch.cuda.is_available() else states


def _set_random_states_(states: Sequence[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1 and torch.cuda.is_available():
        torch.cuda.set_rng_state(states[1])


def derived_seed(seed: int, purpose: str, number: int = 0) -> int:
    """A seed for one purpose of a run, such as the dropout of its epoch 7; different purposes are independent.

    >>> derived_seed(0, "weights") == derived_seed(0, "weights") != derived_seed(1, "weights")
    True
    """
    words = np.random.SeedSequence([seed, zlib.crc32(purpose.encode()), number]).generate_state(2)
    return int(words[0]) << 31 | int(words[1]) >> 1


CHECKPOINT_VERSION = 2
STEPS_BETWEEN_AGREEMENTS = 50
EPOCHS_BETWEEN_PICTURES = 5
CHECKPOINT_NUMBERS = ("done_epochs", "done_steps", "metrics_rows")
CHECKPOINT_REMEDY = "restore the right one, or delete them to train from the beginning"


class RunInterrupted(Exception):
    """The run was asked to stop; everything is saved, and the same command goes on."""


class TrainingDiverged(RuntimeError):
    """The loss is no number any more; the last good checkpoint is kept."""


@dataclass(frozen=True, eq=False, kw_only=True)
class RunContext:
    """What all stages of a run share.

    Attributes:
        images: which ones an image folder holds, to be kept in checkpoints; None where they are fixed.
    """

    name: str
    seed: int
    engine: Engine
    folder: RunFolder
    train: Batches
    test: Batches
    observer: Observer
    should_stop: Callable[[], bool]
    images: Mapping[str, Any] | None


class Stage:
    """Trains one model under one rule from where the last checkpoint of this stage left it.

    Args:
        context: what all stages share.
        name: of the stage.
        options: epochs, rates and the like.
        model: to be trained.
        loss: of the batches.
        rule: what happens beside the loss.
        checkpoint: of this stage, if it was begun before.
        data_epochs_before: epochs of the data that earlier stages have seen; this one goes on with the next.
        digests: of what it builds on beside its checkpoints, which keep them by these names.
    """

    def __init__(
        self,
        context: RunContext,
        name: str,
        options: StageRecipe,
        model: nn.Module,
        *,
        loss: StageLoss,
        rule: TrainingRule,
        checkpoint: Mapping[str, Any] | None,
        data_epochs_before: int,
        digests: Mapping[str, str | None],
    ) -> None:
        self._context, self._name, self._options, self._model, self._rule = context, name, options, model, rule
        self._step = TrainingStep(context.engine, model, options, loss, rule)
        self._done_epochs, self._done_steps, self._data_epochs_before = 0, 0, data_epochs_before
        self._random_states: Sequence[torch.Tensor] = []
        self._digests = digests
        if checkpoint is not None:
            try:
                self._restore_(checkpoint)
            except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
                # Whatever tensors of a foreign checkpoint do not fit to, it means the same.
                raise ValueError(
                    f"{context.folder.checkpoints}: the checkpoint does not belong to this run: "
                    f"{' '.join(str(error).split())}; {CHECKPOINT_REMEDY}"
                ) from error
        # Captures hold on to tensors: nothing may be replaced from here on.
        self._epochs = epoch_runner(context.engine, self._step, context.train)
        self._evaluation = Evaluation(context.engine, self.trained_model, context.test)

    @property
    def trained_model(self) -> nn.Module:
        """What the stage is about: the model, or its average."""
        return self._model if self._step.average is None else self._step.average.model

    def run(self) -> nn.Module:
        """Train to the last epoch; returns the trained model.

        Raises:
            RunInterrupted: asked to stop; a checkpoint holds the middle of the epoch.
            TrainingDiverged: the loss is not finite.
        """
        context, options = self._context, self._options
        context.observer.stage_started(
            context.name, self._name, epochs=options.epochs, steps=context.train.steps, done_epochs=self._done_epochs
        )
        for epoch in range(self._done_epochs + 1, options.epochs + 1):
            self._run_epoch(epoch)
        return self.trained_model

    def _run_epoch(self, epoch: int) -> None:
        begin = time.perf_counter()
        self._prepare_epoch_(epoch)
        rates = learning_rates(self._options, epoch, self._context.train.steps)
        self._done_steps = self._epochs.run(
            self._data_epochs_before + epoch,
            rates,
            start_step=self._done_steps,
            should_stop=self._stop_question(),
            on_step=lambda step: self._context.observer.steps_done(self._context.name, epoch=epoch, step=step),
        )
        if self._done_steps < self._context.train.steps:
            self._check_weights(epoch, rates[self._done_steps])
            self._save(epoch - 1)
            raise RunInterrupted(f"stopped in epoch {epoch} of {self._name}")
        self._finish_epoch(epoch, rates[-1], begin)
        if self._context.engine.any_true(self._context.should_stop()):
            raise RunInterrupted(f"stopped after epoch {epoch} of {self._name}")

    def _stop_question(self) -> Callable[[], bool]:
        """What to ask after every step. Several processes stop together or not at all: they agree every some steps."""
        engine, should_stop = self._context.engine, self._context.should_stop
        if engine.world_size == 1:
            return should_stop
        asked = itertools.count(1)
        return lambda: next(asked) % STEPS_BETWEEN_AGREEMENTS == 0 and engine.any_true(should_stop())

    def _prepare_epoch_(self, epoch: int) -> None:
        self._model.train()
        # Not while a run in another thread draws its weights from the same generator.
        with CAPTURE_LOCK:
            if self._done_steps == 0:
                self._step.sums.zero_()
                torch.manual_seed(self._dropout_seed(epoch))
            else:
                _set_random_states_(self._random_states)

    def _dropout_seed(self, epoch: int) -> int:
        """Dropout and the like: every epoch starts from its own seed, so that it can be repeated on its own."""
        # Processes that share a batch must not drop the same neurons.
        process = f", process {self._context.engine.rank}" if self._context.engine.rank else ""
        return derived_seed(self._context.seed, f"{self._name} epoch{process}", epoch)

    def _finish_epoch(self, epoch: int, rate: float, begin: float) -> None:
        context = self._context
        loss_sum, right = context.engine.summed(self._step.sums.clone()).tolist()
        batches = context.train.steps * context.engine.world_size
        trained = time.perf_counter()
        context.engine.share_buffers_(self._model)
        if self._step.average is not None:
            self._step.average.copy_counters_()
            context.engine.share_buffers_(self._step.average.model)
        accuracy = self._evaluation.accuracy()
        for loss in (loss_sum, accuracy.loss):
            self._check_finite(loss, epoch, rate)
        decided = self._rule.end_epoch()
        row = {
            "stage": self._name,
            "epoch": epoch,
            "lr": rate,
            "train_loss": loss_sum / batches,
            "train_top1": right / (batches * context.train.batch_size),
            "test_loss": accuracy.loss,
            "test_top1": accuracy.top1,
            "test_top5": accuracy.top5,
            **decided,
            "train_seconds": trained - begin,
            "seconds": time.perf_counter() - begin,
        }
        self._done_epochs, self._done_steps = epoch, 0
        if context.engine.is_first:
            arrays = self._rule.arrays()
            if arrays:
                context.folder.save_epoch_arrays(self._name, epoch, arrays)
            context.folder.append_metrics(row)
        self._save(epoch)
        if context.engine.is_first and (epoch == 1 or epoch % EPOCHS_BETWEEN_PICTURES == 0):
            context.observer.matrices_seen(context.name, self._rule.matrices())
        context.observer.epoch_done(context.name, row)

    def _check_finite(self, loss: float, epoch: int, rate: float) -> None:
        # Of the test images too: the epoch's last step may have spoilt the weights, which must not become a checkpoint.
        if not math.isfinite(loss):
            raise TrainingDiverged(
                f"the loss became {loss} in epoch {epoch} of {self._name}; what was saved before that epoch is kept. "
                f"Start another run with a lower learning rate (it was {rate:g})"
            )

    def _check_weights(self, epoch: int, rate: float) -> None:
        """In the middle of an epoch nothing else says whether what is about to be saved is worth it."""
        largest = [parameter.detach().abs().max() for parameter in self._model.parameters() if parameter.numel()]
        # Of all processes: where one found its own sums spoilt, the others would save without it.
        loss_sum = self._context.engine.summed(self._step.sums.clone())[0]
        self._check_finite(float(torch.stack(largest).sum() + loss_sum), epoch, rate)

    def _save(self, done_epochs: int) -> None:
        """Write a checkpoint: of an epoch's end, or of the step within the next one that the run has come to."""
        processes = _gathered(self._context.engine, (self._step.sums.cpu(), _random_states()))
        if self._context.engine.is_first:
            self._context.folder.save_checkpoint(
                {
                    "version": CHECKPOINT_VERSION,
                    "stage": self._name,
                    "done_epochs": done_epochs,
                    "done_steps": self._done_steps,
                    "metrics_rows": len(self._context.folder.metrics()),
                    "model": self._model.state_dict(),
                    "momenta": _momenta(self._step),
                    "average": None if self._step.average is None else self._step.average.model.state_dict(),
                    "rule": self._rule.state_dict(),
                    "sums": torch.stack([sums for sums, _ in processes]),
                    "precision": self._context.engine.precision_state(),
                    "random_states": [states for _, states in processes],
                    "images": self._context.images,
                    **self._digests,
                }
            )

    def _restore_(self, checkpoint: Mapping[str, Any]) -> None:
        self._model.load_state_dict(checkpoint["model"])
        for momentum, saved in zip(_momenta(self._step), checkpoint["momenta"], strict=True):
            momentum.copy_(saved)
        if self._step.average is not None:
            self._step.average.model.load_state_dict(checkpoint["average"])
        if checkpoint["rule"]:
            self._rule.load_state_dict(checkpoint["rule"])
        self._context.engine.load_precision_state(checkpoint["precision"])
        self._done_epochs, self._done_steps = checkpoint["done_epochs"], checkpoint["done_steps"]
        if self._done_epochs > self._options.epochs or self._done_steps >= self._context.train.steps:
            raise ValueError(f"it has {self._done_epochs} epochs and {self._done_steps} steps of {self._name}")
        if self._done_steps:
            self._restore_process_(checkpoint["sums"], checkpoint["random_states"])

    def _restore_process_(self, sums: torch.Tensor, random_states: Sequence[Sequence[torch.Tensor]]) -> None:
        """Restore the sums and the random states of this process in the middle of an epoch."""
        engine = self._context.engine
        if len(random_states) != engine.world_size:
            raise ValueError(
                f"it was saved in the middle of an epoch by {len(random_states)} processes, and this run has "
                f"{engine.world_size}; start as many, or stop the run at the end of an epoch before changing them"
            )
        self._step.sums.copy_(sums[engine.rank])
        self._random_states = random_states[engine.rank]
        # Tried on generators of their own, so that an error is still put down to the checkpoint.
        torch.Generator().set_state(self._random_states[0])
        for state in self._random_states[1:] if torch.cuda.is_available() else []:
            torch.Generator("cuda").set_state(state)


def check_checkpoint(checkpoint: Mapping[str, Any], where: Path) -> None:
    """Raise a `ValueError` unless a stage of this version may have written it."""
    version = checkpoint.get("version")
    if version != CHECKPOINT_VERSION:
        raise ValueError(
            f"{where} was written by another version of strucspars ({version!r}, not {CHECKPOINT_VERSION}); "
            "finish the run with that one"
        )
    for key in CHECKPOINT_NUMBERS:
        try:
            checked_at_least(key, checkpoint.get(key, "nothing"), 0)
        except ValueError as error:
            raise ValueError(f"{where}: the checkpoint is no stage's: {error}; {CHECKPOINT_REMEDY}") from error
    if not isinstance(checkpoint.get("images"), Mapping | None):
        raise ValueError(f"{where}: the checkpoint does not say which images it is of; {CHECKPOINT_REMEDY}")
    if not isinstance(checkpoint.get("stage"), str):
        raise ValueError(f"{where}: the checkpoint names no stage; {CHECKPOINT_REMEDY}")


def _momenta(step: TrainingStep) -> list[torch.Tensor]:
    """The optimizer's memory, in the order of its parameters."""
    return [
        step.optimizer.state[parameter]["momentum_buffer"]
        for group in step.optimizer.param_groups
        for parameter in group["params"]
        if step.optimizer.state[parameter]
    ]
