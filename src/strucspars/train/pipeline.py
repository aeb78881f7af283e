"""Train, compress, finetune, evaluate, save: a recipe becomes a finished run folder, whatever happens in between."""

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from strucspars.bench.machine import environment_after
from strucspars.io.files import write_text
from strucspars.nn.copying import copied
from strucspars.train.checkpoint import save_named
from strucspars.train.compression import FORMS, form_milliseconds, recalibrate_
from strucspars.train.engine import Engine, lost_processes_explained
from strucspars.train.evaluation import Accuracy, Evaluation
from strucspars.train.loss import StageLoss
from strucspars.train.methods import CompressionMethod
from strucspars.train.observer import Observer, Several, Silence, TensorBoardLog
from strucspars.train.outcome import RunSummary, read_metrics, read_summary, run_summary
from strucspars.train.outcome_text import outcome_text
from strucspars.train.preparation import SPARSIFIED, Preparation, prepared
from strucspars.train.recipe import COMPRESS, FINETUNE, Form, Recipe, StageRecipe
from strucspars.train.recipe_identity import check_same_run
from strucspars.train.recipe_reading import recipe_yaml
from strucspars.train.rules import TrainingRule
from strucspars.train.run_folder import RunFolder, store_classes
from strucspars.train.setting import Setting
from strucspars.train.stage import RunContext, RunInterrupted, Stage, check_checkpoint
from strucspars.train.steps import CAPTURE_LOCK

# Group convolutions add in another order, half precision coarsely so; another network is far beyond.
ROUNDING_OF_LOSS = 0.05

_logger = logging.getLogger(__name__)


def run_pipeline(
    recipe: Recipe,
    path: str | Path,
    *,
    observer: Observer | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    executor: Executor | None = None,
) -> RunSummary:
    """Run a recipe in a folder, or go on with what was begun there; a finished run is only read.

    Args:
        recipe: what to do.
        path: the run folder.
        observer: gets told what happens.
        should_stop: asked after every step; once it is true, the state is saved and `RunInterrupted` raised.
        executor: worker processes that learn the channel orders.

    Raises:
        ValueError: the recipe, the data or the folder do not fit; the message says how.
        RunFolderBusy: another process works in the folder.
        RunInterrupted: asked to stop.
        ChildProcessError, ConnectionError: another process of the run has died.
        TrainingDiverged: the loss is no number.
    """
    observer = observer or Silence()
    folder = RunFolder(path)
    observer.run_started(folder.path.name)
    words = "failed"
    try:
        with lost_processes_explained():
            summary = _run(recipe, folder, observer, should_stop, executor)
        words = f"finished, accuracy {summary.converted_top1:.2%}"
    except RunInterrupted:
        words = "stopped"
        raise
    finally:
        observer.run_ended(folder.path.name, words)
    return summary


def _run(
    recipe: Recipe,
    folder: RunFolder,
    observer: Observer,
    should_stop: Callable[[], bool],
    executor: Executor | None,
) -> RunSummary:
    with CAPTURE_LOCK:
        engine = Engine(recipe.engine)
    with ExitStack() as stack:
        if engine.device.type == "cuda":
            # A stream of its own: graphs cannot be captured on the default one, and several runs can go side by side.
            stack.enter_context(torch.cuda.stream(torch.cuda.Stream(engine.device)))  # type: ignore[no-untyped-call]  # in torch
        # The lock file of an earlier process is there to be held from now on; a new one would be the first trace.
        was_locked = folder.was_locked
        finished: RunSummary | None = engine.shared(
            _opened(recipe, folder, stack, was_locked) if engine.is_first else None
        )
        if finished is not None:
            return finished
        setting = Setting(recipe, engine)
        checkpoint = engine.shared(_checkpoint(setting, folder) if engine.is_first else None)
        start = prepared(setting, folder, checkpoint, executor)
        # Nothing was written so far: a start that is refused leaves no trace, and binds the next attempt to nothing.
        if engine.is_first:
            _begin(start, setting, folder, stack, was_locked)
        watchers = [observer]
        if engine.is_first:
            log = TensorBoardLog(folder.tensorboard, done_rows=len(folder.metrics()))
            watchers.append(stack.enter_context(log))
        context = RunContext(
            name=folder.path.name,
            seed=recipe.seed,
            engine=engine,
            folder=folder,
            train=setting.train,
            test=setting.test,
            observer=Several(*watchers),
            should_stop=should_stop,
            images=setting.images if engine.is_first else None,
        )
        return _Run(setting, context, start).finished()


def _opened(recipe: Recipe, folder: RunFolder, stack: ExitStack, was_locked: bool) -> RunSummary | None:
    """Look at the folder, locked if it was before; returns the summary that is there if the run is finished."""
    folder.check_usable()
    if was_locked:
        stack.enter_context(folder.locked())
    check_same_run(folder, recipe)
    summary = read_summary(folder)
    if summary is None or folder.model_path.is_file():
        return summary
    if folder.load_checkpoint() is None:
        # Going on would train from the beginning, over the metrics that are there.
        raise ValueError(
            f"{folder.model_path} is missing, though the run is finished, and there is no checkpoint to write it again "
            f"from; restore it from a copy, or delete {folder.summary_json_path} to train from the beginning"
        )
    _logger.warning("%s is missing; it is written again from the last checkpoint", folder.model_path)
    return None


def _checkpoint(setting: Setting, folder: RunFolder) -> dict[str, Any] | None:
    """The last checkpoint; None where there is none."""
    checkpoint = folder.load_checkpoint()
    if checkpoint is not None:
        check_checkpoint(checkpoint, folder.checkpoints)
    if folder.is_begun:
        setting.check_classes_of(folder)
    if checkpoint is not None:
        setting.check_images_of(checkpoint)
    return checkpoint


def _begin(start: Preparation, setting: Setting, folder: RunFolder, stack: ExitStack, was_locked: bool) -> None:
    """Take possession of the folder and write down what is about to happen; rows after the checkpoint go."""
    folder.create()
    if not was_locked:
        stack.enter_context(folder.locked(is_first=True))
    folder.remove_leftovers()
    folder.write_recipe(recipe_yaml(setting.recipe))
    store_classes(folder, setting.classes)
    former = None if start.checkpoint is None else _former_environment(folder)
    folder.write_json(folder.environment_path, environment_after(former))
    folder.rewind_metrics(0 if start.checkpoint is None else start.checkpoint["metrics_rows"])
    # Of a run whose network was lost: it is finished when that has been written again and found good.
    folder.summary_json_path.unlink(missing_ok=True)


def _former_environment(folder: RunFolder) -> Any:
    try:
        return folder.read_json(folder.environment_path)
    except ValueError as error:
        _logger.warning("%s; what the run was computed on before is not known", error)
        return None


class _Run:
    """One run from its last checkpoint to its summary."""

    def __init__(self, setting: Setting, context: RunContext, start: Preparation) -> None:
        self._setting, self._context, self._start = setting, context, start
        self._recipe, self._engine, self._folder = setting.recipe, setting.engine, context.folder
        self._deployment = start.deployment

    def finished(self) -> RunSummary:
        """Do what is left to do."""
        start, model = self._start, self._start.model
        if start.compression is not None and not start.has_begun(FINETUNE):
            model = self._compressed(start.compression, self._after_first_stage(start.compression))
        form = self._form(model)
        trainable = self._deployment.trainable(model, form)
        stage = self._stage(
            start.last_stage,
            self._recipe.stage2,
            trainable.model,
            trainable.rule,
            start.last_loss,
            digests=start.last_digests(),
        )
        self._deployment.finish(stage.run())
        self._engine.wait()
        return self._summed_up(form)

    def _after_first_stage(self, method: CompressionMethod) -> nn.Module:
        """The network after the first stage: trained now, earlier, or by another run."""
        model, rule, options = self._start.model, self._start.first_rule, self._recipe.stage1
        if rule is None:
            return model
        method.note_start()
        if options.epochs:
            loss = self._setting.loss(options)
            trained = self._stage(method.first_stage, options, model, rule, loss, digests={}).run()
            if trained is not model:
                model.load_state_dict(trained.state_dict())
        if self._engine.is_first:
            save_named(self._folder.checkpoints, SPARSIFIED, {"model": model.state_dict()})
        return model

    def _stage(
        self,
        name: str,
        options: StageRecipe,
        model: nn.Module,
        rule: TrainingRule,
        loss: StageLoss,
        *,
        digests: Mapping[str, str | None],
    ) -> Stage:
        return Stage(
            self._context,
            name,
            options,
            model,
            loss=loss,
            rule=rule,
            checkpoint=self._start.checkpoint if self._start.has_begun(name) else None,
            # Also where another run trained the first stage: variants of one seed see the same batches.
            data_epochs_before=self._recipe.stage1.epochs if name == FINETUNE else 0,
            digests=digests,
        )

    def _compressed(self, method: CompressionMethod, model: nn.Module) -> nn.Module:
        """Decide what goes, and look at the network before and after (Table 5); returns what to go on with."""
        begin = time.perf_counter()
        decided = method.decide(model)
        before = self._accuracy(model)
        cut = method.cut_(copied(model))
        after = self._accuracy(cut)
        row = {
            "stage": COMPRESS,
            "epoch": 0,
            "before_top1": before.top1,
            "before_top5": before.top5,
            "test_top1": after.top1,
            "test_top5": after.top5,
            "test_loss": after.loss,
            **decided,
        }
        if self._recipe.finetune.recalibrate_bn:
            recalibrate_(cut, self._context.train, self._engine)
            row["recalibrated_top1"] = self._accuracy(cut).top1
        row["seconds"] = time.perf_counter() - begin
        if self._engine.is_first:
            self._folder.append_metrics(row)
        self._context.observer.epoch_done(self._context.name, row)
        # Zeroed, it is still dense, and has its statistics; really narrow, it cannot be narrowed again.
        return cut if self._recipe.finetune.recalibrate_bn and method.plan is not None else model

    def _accuracy(self, model: nn.Module) -> Accuracy:
        return Evaluation(self._engine, model, self._context.test).accuracy()

    def _form(self, model: nn.Module) -> Form | None:
        """Masked or grouped: as the recipe says, as decided before, or whichever is faster here."""
        plan = self._deployment.plan
        if plan is None:
            return None
        wanted = self._recipe.finetune.form
        if wanted != "auto":
            return wanted
        decided: Form | None = self._engine.shared(
            self._folder.remembered("finetune_form") if self._engine.is_first else None
        )
        if decided is None:
            times = form_milliseconds(self._engine, model, plan, self._recipe.stage2, self._context.train)
            decided = self._engine.shared(min(times, key=times.__getitem__))
            if self._engine.is_first:
                # The decision first: killed in between, the next process would measure other times and contradict.
                self._folder.remember("finetune_form", decided)
                self._folder.remember("form_milliseconds", times)
        if decided not in FORMS:
            raise ValueError(f"{self._folder.decisions_path}: finetune_form must be masked or grouped, got {decided!r}")
        return decided

    def _check_deployed(self, loss: float, trained_loss: float) -> None:
        """What was read back must be what was trained: the promise of every conversion and of every file."""
        if not abs(loss - trained_loss) <= ROUNDING_OF_LOSS * max(trained_loss, 0.1):
            raise RuntimeError(
                f"{self._folder.model_path} is not the network that was trained: its loss is {loss:.4f}, that of the "
                f"last epoch {trained_loss:.4f}. The checkpoint is kept; please report this as a bug"
            )

    def _summed_up(self, form: Form | None) -> RunSummary:
        """Read back what was saved, evaluate that, and write the summary."""
        small = self._engine.placed(self._deployment.reload())
        converted = self._accuracy(small)
        rows, dense = read_metrics(self._folder), self._setting.fresh_model()
        self._check_deployed(converted.loss, rows[-1]["test_loss"])
        with CAPTURE_LOCK:
            summary = run_summary(
                self._recipe,
                rows,
                dense=dense,
                small=small,
                example=self._setting.example,
                converted=converted,
                finetune_form=form,
            )
        if self._engine.is_first:
            text = outcome_text(summary, self._recipe, self._folder)
            write_text(self._folder.summary_text_path, text + "\n")
            # Last: a run that has this file is finished.
            self._folder.write_json(self._folder.summary_json_path, summary.to_json())
        return summary
