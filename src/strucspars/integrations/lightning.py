"""Sparse training inside Lightning's Trainer; the LightningModule needs no changes.

Why these hooks, and not their neighbours:

- `on_fit_start`: the model is on its device, a checkpoint's weights are loaded, and no step is taken, on every rank.
- `on_before_optimizer_step`: once per step however many batches it gathers; gradients are reduced over the ranks and
  unscaled, and not yet clipped. So the penalty acts as if it were part of the loss.
- `on_train_epoch_end`: before checkpoints of this epoch are written.
- `on_fit_end`: after the last checkpoint, which therefore has the dense model, and after the optimizers are gone.
"""

import logging
import math
from collections.abc import Sequence
from typing import Any

import torch

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.plugins.precision import MixedPrecision
    from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
    from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
except ModuleNotFoundError as error:
    message = f"{error.name} is missing: pip install 'strucspars[lightning]'"
    raise ModuleNotFoundError(message, name=error.name) from error

from strucspars.convert.conversion import convert_
from strucspars.core.plan import GroupingPlan
from strucspars.cost.counting import ExampleInputs
from strucspars.nn.groupable import FilterFn, SelectedLayer
from strucspars.sparsify.config import SparsifyConfig
from strucspars.sparsify.sparsifier import Sparsifier

logger = logging.getLogger(__name__)


class SparsifyCallback(Callback):
    """Sparsify any LightningModule while a Trainer fits it, then plan its groups and, if asked, convert it in place.

    After every epoch it logs `sparsify/lambda_value` and `sparsify/removed_fraction`. Its state is part of the
    Trainer's checkpoints: a resumed fit continues exactly, if the data loader does. Other fits start afresh.

    Checkpoints of a fit hold the dense model, and do not fit a converted one (`ckpt_path="best"`): test the module
    itself, `trainer.test(module)`, and finetune it with a Trainer that lacks this callback.

    >>> import strucspars as ss
    >>> callback = SparsifyCallback(ss.SparsifyConfig(target=0.6, epochs=100), convert=True)
    >>> trainer = Trainer(max_epochs=100, callbacks=[callback], logger=False, accelerator="cpu")
    """

    def __init__(
        self,
        config: SparsifyConfig,
        *,
        filter_fn: FilterFn | None = None,
        example_inputs: ExampleInputs | None = None,
        convert: bool = False,
    ) -> None:
        """Take the options of sparse training, whose `epochs` should be the Trainer's `max_epochs`.

        `filter_fn` and `example_inputs` are as in `Sparsifier`; names are those of the LightningModule (`net.conv1`).
        `convert` turns the module into group convolutions when the fit ends.
        """
        self._config = config
        self._filter_fn = filter_fn
        self._example_inputs = example_inputs
        self._convert = convert
        self._sparsifier: Sparsifier | None = None
        self._plan: GroupingPlan | None = None
        self._optimizer_index = 0
        # A checkpoint is read before there is a Sparsifier.
        self._restored: dict[str, Any] = {}
        # Begun, and not yet ended in the Sparsifier.
        self._open_epoch: int | None = None
        self._steps_of_epoch = 0

    @property
    def sparsifier(self) -> Sparsifier:
        """The training state of the present or the last fit."""
        if self._sparsifier is None:
            raise RuntimeError("there is no Sparsifier yet: it is made when trainer.fit(...) starts")
        return self._sparsifier

    @property
    def plan(self) -> GroupingPlan:
        """The grouping that meets the target, from the weights at the end of the fit."""
        if self._plan is None:
            raise RuntimeError("there is no plan yet: it is made when trainer.fit(...) ends")
        return self._plan

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse what cannot work before anything expensive happens; forget what earlier runs left and restored."""
        self._restored = {}
        if stage == "fit":
            _check_strategy(trainer)
            # A search for a learning rate or a batch size saves all callbacks before its fit, and restores them.
            self._sparsifier, self._plan = None, None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Learn the channel orders from the initial weights, or take them over from a checkpoint."""
        inputs = self._example_inputs
        sparsifier = Sparsifier(
            pl_module,
            self._config,
            self._filter_fn,
            example_inputs=None if inputs is None else trainer.strategy.batch_to_device(inputs),
        )
        self._optimizer_index = _optimizer_index(trainer.optimizers, sparsifier.selection.layers)
        _check_gradients_arrive_unscaled(trainer, self._optimizer_index)
        if self._restored:
            sparsifier.load_state_dict(self._restored["sparsifier"])
        self._open_epoch = self._restored.get("open_epoch")
        self._sparsifier, self._plan, self._restored = sparsifier, None, {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compare the schedule that lambda is planned for with the Trainer's."""
        _warn_of_another_schedule(self._config, trainer)
        # Later on, a rate that was lowered by hand is not the one that training began with.
        if trainer.global_step == 0 and trainer.optimizers:
            layers = self.sparsifier.selection.layers
            _warn_of_another_rate(self._config, trainer.optimizers[self._optimizer_index], layers)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Notice that another epoch has begun: some resumed fits skip the hook for that."""
        if trainer.current_epoch == self._open_epoch:
            return
        # A checkpoint of an epoch's last step or of its validation has not seen the end that Lightning leaves out.
        if self._open_epoch is not None:
            self._end_epoch(pl_module)
        self._open_epoch = trainer.current_epoch
        self._steps_of_epoch = 0

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Add the penalty's gradient to the finished gradients of the layers' optimizer."""
        if optimizer is not trainer.optimizers[self._optimizer_index]:
            return
        self._steps_of_epoch += 1
        # A training_step that returns None skips its step: then the penalty must not make one of its own.
        if any(layer.weight.grad is not None for layer in self.sparsifier.selection.layers):
            self.sparsifier.regularize_()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refresh orders, levels and lambda; log them."""
        if self._open_epoch is None:
            return
        if self._steps_of_epoch == 0:
            logger.warning(
                "no optimizer step of epoch %d came through Lightning, so nothing was penalised; in manual "
                "optimization step the optimizers that self.optimizers() returns",
                self._open_epoch,
            )
        self._end_epoch(pl_module)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Plan the groups; convert the module if asked to."""
        if self._open_epoch is not None:
            self.sparsifier.end_epoch()
            self._open_epoch = None
        self._plan = self.sparsifier.plan()
        if self._convert:
            convert_(pl_module, self._plan)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs to continue exactly; plain numbers and tensors."""
        if self._sparsifier is None:
            return {}
        return {"sparsifier": self._sparsifier.state_dict(), "open_epoch": self._open_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep a checkpoint's state for the fit that is about to start."""
        self._restored = state_dict

    def _end_epoch(self, pl_module: LightningModule) -> None:
        report = self.sparsifier.end_epoch()
        self._open_epoch = None
        # Equal on all ranks already; without sync_dist Lightning would warn on every fit.
        logged = {"sparsify/lambda_value": report.lambda_value, "sparsify/removed_fraction": report.removed_fraction}
        pl_module.log_dict(logged, on_step=False, on_epoch=True, sync_dist=True)


def _check_strategy(trainer: Trainer) -> None:
    strategy = trainer.strategy
    name = type(strategy).__name__
    if isinstance(strategy, (DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy)):
        raise ValueError(f"{name} divides the weights, the channel orders need whole ones; use strategy='ddp'")
    if isinstance(strategy.launcher, _MultiProcessingLauncher):
        raise ValueError(f"the processes that {name} spawns take the plan with them when they end; use strategy='ddp'")


def _optimizer_index(optimizers: Sequence[torch.optim.Optimizer], layers: Sequence[SelectedLayer]) -> int:
    """Which optimizer trains the layers: the penalty belongs to its steps only."""
    # A single one is not checked: it may get its parameters later, as when a backbone is unfrozen.
    if len(optimizers) <= 1:
        return 0
    owners = {
        index: layer.name
        for index, optimizer in enumerate(optimizers)
        for layer in layers
        if any(parameter is layer.weight for group in optimizer.param_groups for parameter in group["params"])
    }
    if len(owners) != 1:
        found = ", ".join(f"{name!r} belongs to optimizer {index}" for index, name in owners.items())
        raise ValueError(
            f"the layers to sparsify need one optimizer, {len(owners)} of {len(optimizers)} train them "
            f"({found or 'none'}); choose the layers of one network by filter_fn, include or exclude"
        )
    return next(iter(owners))


def _check_gradients_arrive_unscaled(trainer: Trainer, optimizer_index: int) -> None:
    precision = trainer.precision_plugin
    if not isinstance(precision, MixedPrecision) or precision.scaler is None:
        return
    optimizer = trainer.optimizers[optimizer_index]
    # The mark by which torch knows optimizers that unscale inside their step, the fused ones.
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        raise ValueError(
            f"with precision {precision.precision!r} this {type(optimizer).__name__} unscales gradients only inside "
            "its step, too late for the penalty; build it with fused=False or use precision 'bf16-mixed'"
        )


def _warn_of_another_schedule(config: SparsifyConfig, trainer: Trainer) -> None:
    if trainer.max_epochs != config.epochs:
        logger.warning(
            "lambda is planned for %d epochs but the Trainer has max_epochs=%s; set both to the same number",
            *(config.epochs, trainer.max_epochs),
        )
    batches = trainer.num_training_batches
    if config.lambda_step is None and math.isfinite(batches):
        steps = math.ceil(batches / trainer.accumulate_grad_batches)
        if steps != config.steps_per_epoch:
            logger.warning(
                "lambda_step is derived from steps_per_epoch=%d but the Trainer makes %d optimizer steps per epoch; "
                "set SparsifyConfig(steps_per_epoch=%d)",
                *(config.steps_per_epoch, steps, steps),
            )


def _warn_of_another_rate(
    config: SparsifyConfig, optimizer: torch.optim.Optimizer, layers: Sequence[SelectedLayer]
) -> None:
    weights = {id(layer.weight) for layer in layers}
    groups = [group for group in optimizer.param_groups if weights & set(map(id, group["params"]))]
    # The rate before its schedule lowers it; a warm-up may have done so already.
    rates = [float(group.get("max_lr", group.get("initial_lr", group["lr"]))) for group in groups]
    if config.lambda_step is None and rates and not any(math.isclose(rate, config.lr, rel_tol=1e-3) for rate in rates):
        logger.warning(
            "lambda_step is derived from lr=%g but the layers are trained with lr=%g; set SparsifyConfig(lr=%g)",
            *(config.lr, max(rates), max(rates)),
        )
