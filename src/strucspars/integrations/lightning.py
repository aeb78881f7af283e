"""Sparse training inside Lightning's Trainer; the LightningModule needs no changes.

Why these hooks, and not their neighbours:

- `on_fit_start`: the model is on its device, a checkpoint's weights are loaded, and no step is taken, on every rank.
- `on_train_start`: the optimizers are those that will step. The Sparsifier attaches to them, so that the penalty joins
  each of their steps, after gradients are accumulated, reduced over the ranks, unscaled and clipped.
- `on_train_epoch_end`: before checkpoints of this epoch are written.
- `on_fit_end`: after the last checkpoint, which therefore has the dense model, and after the optimizers are gone.
"""

import logging
from collections.abc import Iterable
from typing import Any

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
    from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
except ModuleNotFoundError as error:
    message = f"{error.name} is missing: pip install 'strucspars[lightning]'"
    raise ModuleNotFoundError(message, name=error.name) from error

from strucspars.convert.conversion import convert_
from strucspars.core.plan import GroupingPlan
from strucspars.cost.counting import ExampleInputs
from strucspars.nn.groupable import FilterFn
from strucspars.sparsify.calibration import Calibration, CalibrationBatch
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
        calibration: Iterable[CalibrationBatch] | None = None,
        example_inputs: ExampleInputs | None = None,
        convert: bool = False,
    ) -> None:
        """Take the options of sparse training, whose `epochs` should be the Trainer's `max_epochs`.

        `filter_fn`, `calibration` and `example_inputs` are as in `Sparsifier`; names are those of the LightningModule
        (`net.conv1`). `convert` turns the module into group convolutions when the fit ends.
        """
        self._config = config
        self._filter_fn = filter_fn
        self._calibration = None if calibration is None else Calibration.of(calibration)
        self._example_inputs = example_inputs
        self._convert = convert
        self._sparsifier: Sparsifier | None = None
        self._plan: GroupingPlan | None = None
        # A checkpoint is read before there is a Sparsifier.
        self._restored: dict[str, Any] = {}
        # Begun, and not yet ended in the Sparsifier.
        self._open_epoch: int | None = None

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
            strategy, name = trainer.strategy, type(trainer.strategy).__name__
            if isinstance(strategy, (DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy)):
                raise ValueError(f"{name} divides the weights, the channel orders need whole ones; use strategy='ddp'")
            if isinstance(strategy.launcher, _MultiProcessingLauncher):
                lost = f"the processes that {name} spawns take the plan with them when they end"
                raise ValueError(f"{lost}; use strategy='ddp'")
            # A search for a learning rate or a batch size saves all callbacks before its fit, and restores them.
            self._sparsifier, self._plan = None, None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Learn the channel orders from the initial weights, or take them over from a checkpoint."""
        inputs = self._example_inputs
        sparsifier = Sparsifier(
            pl_module,
            self._config,
            self._filter_fn,
            calibration=self._calibration,
            example_inputs=None if inputs is None else trainer.strategy.batch_to_device(inputs),
        )
        if self._restored:
            sparsifier.load_state_dict(self._restored["sparsifier"])
        self._open_epoch = self._restored.get("open_epoch")
        self._sparsifier, self._plan, self._restored = sparsifier, None, {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach the optimizers; compare the epochs that lambda is planned for with the Trainer's."""
        if trainer.max_epochs != self._config.epochs:
            logger.warning(
                "lambda is planned for %d epochs but the Trainer has max_epochs=%s; set both to the same number",
                *(self._config.epochs, trainer.max_epochs),
            )
        # A search for a learning rate trains with optimizers of its own first.
        self.sparsifier.detach()
        for optimizer in trainer.optimizers:
            self.sparsifier.attach(optimizer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Notice that another epoch has begun: some resumed fits skip the hook for that."""
        if trainer.current_epoch == self._open_epoch:
            return
        # A checkpoint of an epoch's last step or of its validation has not seen the end that Lightning leaves out.
        if self._open_epoch is not None:
            self._end_epoch(pl_module)
        self._open_epoch = trainer.current_epoch

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refresh orders, levels and lambda; log them."""
        if self._open_epoch is not None:
            self._end_epoch(pl_module)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Plan the groups; convert the module if asked to."""
        if self._open_epoch is not None:
            self.sparsifier.end_epoch()
            self._open_epoch = None
        self._plan = self.sparsifier.plan()
        self.sparsifier.detach()
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
