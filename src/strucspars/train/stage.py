"""One stage of training: epochs, their metrics, and checkpoints from which a killed run resumes exactly."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, final

import torch
from torch import nn

from strucspars.train.epochs import CAPTURE_LOCK, Evaluation, epoch_runner
from strucspars.train.recipe import FINETUNE, TRAIN
from strucspars.train.rules import TrainingRule, cut
from strucspars.train.run import Run, RunInterrupted, TrainingDiverged, derived_seed
from strucspars.train.steps import StageLoss, TrainingStep, learning_rates

CHECKPOINT_VERSION = 3
EPOCHS_BETWEEN_PICTURES = 5


@final
class Stage:
    """Trains one model under one rule, from its last checkpoint, which also has the `digests` of other files."""

    def __init__(
        self,
        run: Run,
        name: str,
        model: nn.Module,
        rule: TrainingRule,
        loss: StageLoss,
        *,
        digests: Mapping[str, str] | None = None,
    ) -> None:
        self._run, self._name, self._model, self._rule = run, name, model, rule
        self._options = run.recipe.stage2 if name in (FINETUNE, TRAIN) else run.recipe.stage1
        # Epochs of data are counted over both stages, also where another run trained the first one: all variants of a
        # seed see the same batches.
        self._data_epochs_before = run.recipe.stage1.epochs if name == FINETUNE else 0
        self._digests = dict(digests or {})
        self._step = TrainingStep(run.engine, model, self._options, loss, rule)
        self._done_epochs, self._done_steps = 0, 0
        self._random_states: Sequence[torch.Tensor] = []
        if run.checkpoint is not None and run.has_begun(name):
            try:
                self._restore_(run.checkpoint)
            except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
                raise ValueError(
                    f"{run.folder.checkpoints}: the checkpoint does not belong to this run: "
                    f"{' '.join(str(error).split())}; restore the right one, or delete them to train from the beginning"
                ) from error
        # Captured graphs keep the addresses of tensors: none may be replaced from here on.
        self._epochs = epoch_runner(run.engine, self._step, run.train)
        self._evaluation = Evaluation(run.engine, self.trained_model, run.test)

    @property
    def trained_model(self) -> nn.Module:
        """The model, or its average if there is one."""
        return self._model if self._step.average is None else self._step.average.model

    def train(self) -> nn.Module:
        """Train to the last epoch, or until asked to stop, which is a `RunInterrupted`; returns the trained model."""
        run, epochs = self._run, self._options.epochs
        progress = {"epochs": epochs, "steps": run.train.steps, "done_epochs": self._done_epochs}
        for observer in run.observers:
            observer.stage_started(run.name, self._name, **progress)
        for epoch in range(self._done_epochs + 1, epochs + 1):
            self._train_epoch(epoch)
        return self.trained_model

    def _train_epoch(self, epoch: int) -> None:
        run, begin = self._run, time.perf_counter()
        self._prepare_epoch_(epoch)
        rates = learning_rates(self._options, epoch, run.train.steps)
        self._done_steps = self._epochs.run(
            self._data_epochs_before + epoch,
            rates,
            start_step=self._done_steps,
            should_stop=run.stop_question(),
            on_step=lambda step: self._tell_step(epoch, step),
        )
        if self._done_steps < run.train.steps:
            self._check_weights(epoch, rates[self._done_steps])
            self._save(epoch - 1)
            raise RunInterrupted(f"stopped in epoch {epoch} of {self._name}")
        self._finish_epoch(epoch, rates[-1], begin)
        if run.engine.any_true(run.should_stop()):
            raise RunInterrupted(f"stopped after epoch {epoch} of {self._name}")

    def _tell_step(self, epoch: int, step: int) -> None:
        for observer in self._run.observers:
            observer.steps_done(self._run.name, epoch=epoch, step=step)

    def _prepare_epoch_(self, epoch: int) -> None:
        """Seed the dropout of this epoch, so that the epoch can be repeated on its own."""
        self._model.train()
        # Processes that share a batch must not drop the same neurons.
        process = f", process {self._run.engine.rank}" if self._run.engine.rank else ""
        # A run in another thread may be drawing its weights from the same generator.
        with CAPTURE_LOCK:
            if self._done_steps == 0:
                self._step.sums.zero_()
                torch.manual_seed(derived_seed(self._run.recipe.seed, f"{self._name} epoch{process}", epoch))
                return
            torch.set_rng_state(self._random_states[0])
            if len(self._random_states) > 1 and torch.cuda.is_available():
                torch.cuda.set_rng_state(self._random_states[1])

    def _finish_epoch(self, epoch: int, rate: float, begin: float) -> None:
        run, engine = self._run, self._run.engine
        loss_sum, right = engine.summed(self._step.sums.clone()).tolist()
        batches, trained = run.train.steps * engine.world_size, time.perf_counter()
        engine.share_buffers_(self._model)
        if self._step.average is not None:
            self._step.average.copy_counters_()
            engine.share_buffers_(self._step.average.model)
        accuracy = self._evaluation.accuracy()
        # Also of the test images: weights that the last step has spoilt must not reach a checkpoint.
        for loss in (loss_sum, accuracy.loss):
            self._check_finite(loss, epoch, rate)
        decided = dict(self._rule.end_epoch())
        plan = self._rule.plan_to_cut()
        if plan is not None:
            decided["uncut_top1"] = accuracy.top1
            # An average still holds some of what the model has lost by then.
            with cut(self.trained_model, plan, for_good=decided["annealed"] == 1):
                accuracy = self._evaluation.accuracy()
        row = {
            "stage": self._name,
            "epoch": epoch,
            "lr": rate,
            "train_loss": loss_sum / batches,
            "train_top1": right / (batches * run.train.batch_size),
            **{f"test_{key}": value for key, value in asdict(accuracy).items()},
            **decided,
            "train_seconds": trained - begin,
            "seconds": time.perf_counter() - begin,
        }
        self._done_epochs, self._done_steps = epoch, 0
        if engine.is_first:
            if arrays := self._rule.arrays():
                run.folder.save_epoch_arrays(self._name, epoch, arrays)
            run.folder.append_metrics(row)
        self._save(epoch)
        has_pictures = engine.is_first and (epoch == 1 or epoch % EPOCHS_BETWEEN_PICTURES == 0)
        matrices = self._rule.matrices() if has_pictures else {}
        for observer in run.observers:
            observer.matrices_seen(run.name, matrices)
            observer.epoch_done(run.name, row)

    def _check_finite(self, loss: float, epoch: int, rate: float) -> None:
        if not math.isfinite(loss):
            raise TrainingDiverged(
                f"the loss became {loss} in epoch {epoch} of {self._name}; what was saved before that epoch is kept. "
                f"Start another run with a lower learning rate (it was {rate:g})"
            )

    def _check_weights(self, epoch: int, rate: float) -> None:
        """Check weights and loss before a checkpoint in the middle of an epoch."""
        largest = [parameter.detach().abs().max() for parameter in self._model.parameters() if parameter.numel()]
        # Summed over all processes, so that they decide together.
        loss_sum = self._run.engine.summed(self._step.sums.clone())[0]
        self._check_finite(float(torch.stack(largest).sum() + loss_sum), epoch, rate)

    def _save(self, done_epochs: int) -> None:
        """Write a checkpoint of the present step."""
        run, average = self._run, self._step.average
        with CAPTURE_LOCK:
            random_states = [torch.get_rng_state()]
            if torch.cuda.is_available():
                random_states.append(torch.cuda.get_rng_state())
        processes = run.engine.gathered((self._step.sums.cpu(), random_states))
        if run.engine.is_first:
            run.folder.save_checkpoint(
                {
                    "version": CHECKPOINT_VERSION,
                    "stage": self._name,
                    "done_epochs": done_epochs,
                    "done_steps": self._done_steps,
                    "metrics_rows": len(run.folder.metrics()),
                    "model": self._model.state_dict(),
                    "momenta": self._step.momenta(),
                    "average": None if average is None else average.model.state_dict(),
                    "rule": self._rule.state_dict(),
                    "sums": torch.stack([sums for sums, _ in processes]),
                    "precision": dict(run.engine.fabric.strategy.precision.state_dict()),
                    "random_states": [states for _, states in processes],
                    "images": run.images,
                    "digests": self._digests,
                }
            )

    def _restore_(self, checkpoint: Mapping[str, Any]) -> None:
        self._model.load_state_dict(checkpoint["model"])
        for momentum, saved in zip(self._step.momenta(), checkpoint["momenta"], strict=True):
            momentum.copy_(saved)
        if self._step.average is not None:
            self._step.average.model.load_state_dict(checkpoint["average"])
        if checkpoint["rule"]:
            self._rule.load_state_dict(checkpoint["rule"])
        self._run.engine.fabric.strategy.precision.load_state_dict(checkpoint["precision"])
        self._done_epochs, self._done_steps = checkpoint["done_epochs"], checkpoint["done_steps"]
        if self._done_epochs > self._options.epochs or self._done_steps >= self._run.train.steps:
            raise ValueError(f"it has {self._done_epochs} epochs and {self._done_steps} steps of {self._name}")
        if self._done_steps:
            engine, random_states = self._run.engine, checkpoint["random_states"]
            if len(random_states) != engine.world_size:
                raise ValueError(
                    f"it was saved in the middle of an epoch by {len(random_states)} processes, and this run has "
                    f"{engine.world_size}; start as many, or stop the run at the end of an epoch before changing them"
                )
            self._step.sums.copy_(checkpoint["sums"][engine.rank])
            self._random_states = random_states[engine.rank]
