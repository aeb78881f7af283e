"""A recipe becomes a finished run folder: train, compress, finetune, save, read back, evaluate."""

import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from strucspars.bench.machine import environment_after
from strucspars.convert.compress import recalibrate_
from strucspars.io.files import CHECKPOINT_BYTES, read_bytes, write_text
from strucspars.models.catalogue import names_a_function
from strucspars.nn.names import copied
from strucspars.train.checkpoint import save_named
from strucspars.train.engine import lost_processes_explained
from strucspars.train.epochs import CAPTURE_LOCK, Accuracy, Evaluation
from strucspars.train.observer import RunObserver, TensorBoardLog
from strucspars.train.outcome import RunSummary, outcome_text, read_metrics, read_summary, run_summary
from strucspars.train.procedures import Procedure, procedure_of
from strucspars.train.recipe import COMPRESS, WEIGHTS, Recipe
from strucspars.train.recipe_identity import check_same_run
from strucspars.train.recipe_reading import recipe_yaml
from strucspars.train.rules import TrainingRule
from strucspars.train.run import SPARSIFIED, Run, RunInterrupted
from strucspars.train.run_folder import DATA_OF_FUNCTION, RunFolder, store_classes
from strucspars.train.stage import CHECKPOINT_VERSION, Stage
from strucspars.train.steps import StageLoss

# Relative; group convolutions add in another order, and half precision rounds coarsely. Another network differs more.
ROUNDING_OF_LOSS = 0.05

_logger = logging.getLogger(__name__)


def run_pipeline(
    recipe: Recipe,
    path: str | Path,
    *,
    observers: Sequence[RunObserver] = (),
    should_stop: Callable[[], bool] = lambda: False,
    executor: Executor | None = None,
) -> RunSummary:
    """Run a recipe in a folder, or resume there from the last checkpoint; a finished run is only read.

    `should_stop` is asked after every step; once it is true, the state is saved and `RunInterrupted` raised. The worker
    processes of `executor` learn the channel orders.
    """
    folder = RunFolder(path)
    for observer in observers:
        observer.run_started(folder.path.name)
    words = "failed"
    try:
        with lost_processes_explained(), ExitStack() as stack:
            run = Run(recipe, folder, observers=observers, should_stop=should_stop, executor=executor)
            summary = _run(run, stack)
        words = f"finished, accuracy {summary.converted_top1:.2%}"
    except RunInterrupted:
        words = "stopped"
        raise
    finally:
        for observer in observers:
            observer.run_ended(folder.path.name, words)
    return summary


def _run(run: Run, stack: ExitStack) -> RunSummary:
    """The whole run; `stack` holds the folder's lock, the stream and the log until its end."""
    engine, folder = run.engine, run.folder
    if engine.device.type == "cuda":
        # Graphs cannot be captured on the default stream, and runs side by side need one each.
        stack.enter_context(torch.cuda.stream(torch.cuda.Stream(engine.device)))  # type: ignore[no-untyped-call]  # in torch

    # Everything that could refuse the run comes before anything is written.
    was_locked = folder.was_locked
    finished: RunSummary | None = engine.fabric.broadcast(_open(run, stack, was_locked) if engine.is_first else None)
    if finished is not None:
        return finished
    run.checkpoint = engine.fabric.broadcast(_load_checkpoint(run) if engine.is_first else None)
    procedure = procedure_of(run)
    _ = run.train.steps
    last_loss = run.last_loss()
    first_rule, is_last = None, run.has_begun(procedure.last_stage)
    model = run.fresh_model() if is_last else run.first_model()
    if is_last:
        procedure.recall()
        _check_unchanged(run, procedure)
    else:
        first_rule = procedure.first_rule(model)
    if engine.is_first:
        _begin(run, stack, was_locked)
        log = TensorBoardLog(folder.tensorboard, done_rows=len(folder.metrics()))
        stack.callback(log.close)
        run.observers.append(log)

    if procedure.first_stage is not None and not is_last:
        if first_rule is not None:
            _train_first_stage_(run, procedure, model, first_rule)
        model = _compress(run, procedure, model)
    model, rule = procedure.trainable(model)
    digests = {path.name: digest for path, digest in _digests(run, procedure).items()} if engine.is_first else {}
    trained = Stage(run, procedure.last_stage, model, rule, last_loss, digests=digests).train()
    procedure.finish_(trained)
    engine.fabric.barrier()
    return _sum_up(run, procedure)


def _open(run: Run, stack: ExitStack, was_locked: bool) -> RunSummary | None:
    """Check the folder, and lock it if it was locked before; returns the summary of a finished run."""
    folder = run.folder
    folder.check_usable()
    # A lock file that exists can be held from now on; a new one would be the first trace of this run.
    if was_locked:
        stack.enter_context(folder.locked())
    check_same_run(folder, run.recipe)
    summary = read_summary(folder)
    if summary is not None and not folder.model_path.is_file():
        raise ValueError(
            f"{folder.model_path} is missing, though the run is finished; restore it from a copy, or delete "
            f"{folder.summary_json_path} to write it again from the last checkpoint"
        )
    return summary


def _load_checkpoint(run: Run) -> dict[str, Any] | None:
    """The last checkpoint, if it fits the data; None where there is none."""
    checkpoint = run.folder.load_checkpoint()
    version = CHECKPOINT_VERSION if checkpoint is None else checkpoint.get("version")
    if version != CHECKPOINT_VERSION:
        raise ValueError(
            f"{run.folder.checkpoints} was written by another version of strucspars ({version!r}, not "
            f"{CHECKPOINT_VERSION}); finish the run with that one"
        )
    if run.folder.is_begun:
        run.check_classes_of(run.folder)
    if checkpoint is not None:
        run.check_images_of(checkpoint)
    return checkpoint


def _digests(run: Run, procedure: Procedure) -> dict[Path, str]:
    """SHA-256 of the files that the last stage builds on besides its checkpoints: decision and teacher."""
    teacher = run.recipe.finetune.teacher
    is_run = teacher is not None and teacher != WEIGHTS
    paths = (procedure.decision_path, RunFolder(Path(str(teacher)).expanduser()).model_path if is_run else None)
    contents = {path: read_bytes(path, limit=CHECKPOINT_BYTES) for path in paths if path is not None}
    return {path: hashlib.sha256(content).hexdigest() for path, content in contents.items()}


def _check_unchanged(run: Run, procedure: Procedure) -> None:
    """Refuse to resume a last stage that began with another teacher or decision."""
    assert run.checkpoint is not None, "a stage that has begun has a checkpoint"
    for path, digest in _digests(run, procedure).items():
        if run.checkpoint.get("digests", {}).get(path.name) != digest:
            raise ValueError(
                f"{run.folder.checkpoints}: {procedure.last_stage} began with other contents of {path}, so it would "
                "become another run; restore them, or start another run in another folder"
            )


def _begin(run: Run, stack: ExitStack, was_locked: bool) -> None:
    """Lock the folder, store recipe, classes and environment, and remove rows after the checkpoint."""
    folder, checkpoint = run.folder, run.checkpoint
    folder.create()
    if not was_locked:
        stack.enter_context(folder.locked(is_first=True))
    folder.remove_leftovers()
    folder.write_recipe(recipe_yaml(run.recipe))
    store_classes(folder, run.classes)
    if names_a_function(run.recipe.data.name):
        folder.remember(DATA_OF_FUNCTION, {"image_shape": list(run.example.shape[1:])})
    former = None
    if checkpoint is None:
        # Of an earlier attempt: runs that take over the first stage wait for the plan of this one.
        folder.plan_path.unlink(missing_ok=True)
    else:
        try:
            former = folder.read_json(folder.environment_path)
        except ValueError as error:
            _logger.warning("%s; the machine that the run began on is not known", error)
    folder.write_json(folder.environment_path, environment_after(former))
    folder.rewind_metrics(0 if checkpoint is None else checkpoint["metrics_rows"])


def _train_first_stage_(run: Run, procedure: Procedure, model: nn.Module, rule: TrainingRule) -> None:
    """Train the model, and keep its weights for runs that build on them."""
    assert procedure.first_stage is not None
    options = run.recipe.stage1
    procedure.note_start()
    if options.epochs:
        loss = StageLoss(label_smoothing=options.label_smoothing)
        trained = Stage(run, procedure.first_stage, model, rule, loss).train()
        if trained is not model:
            model.load_state_dict(trained.state_dict())
    if run.engine.is_first:
        save_named(run.folder.checkpoints, SPARSIFIED, {"model": model.state_dict()})


def _compress(run: Run, procedure: Procedure, model: nn.Module) -> nn.Module:
    """Decide what to remove, and evaluate the network before and after (Table 5); returns what to finetune."""
    begin = time.perf_counter()
    decided = procedure.decide(model)
    before = _accuracy(run, model)
    cut = procedure.cut_(copied(model))
    after = _accuracy(run, cut)
    row = {"stage": COMPRESS, "epoch": 0, "before_top1": before.top1, "before_top5": before.top5}
    row |= {f"test_{key}": value for key, value in asdict(after).items()} | decided
    if run.recipe.finetune.recalibrate_bn:
        with run.engine.fabric.autocast():
            recalibrate_(cut, (batch.images for batch in run.train.epoch(1)))
        row["recalibrated_top1"] = _accuracy(run, cut).top1
    row["seconds"] = time.perf_counter() - begin
    if run.engine.is_first:
        run.folder.append_metrics(row)
    for observer in run.observers:
        observer.epoch_done(run.name, row)
    return cut if procedure.is_cut_trainable else model


def _accuracy(run: Run, model: nn.Module) -> Accuracy:
    return Evaluation(run.engine, model, run.test).accuracy()


def _sum_up(run: Run, procedure: Procedure) -> RunSummary:
    """Read back what was saved, evaluate that, and write the summary."""
    small = run.engine.placed(procedure.reload())
    converted = _accuracy(run, small)
    rows, dense = read_metrics(run.folder), run.fresh_model()
    _check_deployed(run.folder.model_path, converted.loss, rows[-1]["test_loss"])
    # Counting operations sets the random state aside, from which other threads may be drawing weights.
    with CAPTURE_LOCK:
        summary = run_summary(
            run.recipe,
            rows,
            dense=dense,
            small=small,
            example=run.example,
            converted=converted,
            finetune_form=procedure.form,
        )
    given = run.given_plan
    if given is not None:
        # The recipe's target had no say.
        is_same = given.budget == run.recipe.sparsify.budget
        summary = replace(summary, target=given.target if is_same else None)
    if run.engine.is_first:
        text = outcome_text(summary, run.recipe, run.folder)
        write_text(run.folder.summary_text_path, text + "\n")
        # Last: a run with this file is finished.
        run.folder.write_json(run.folder.summary_json_path, summary.to_json())
    return summary


def _check_deployed(path: Path, loss: float, trained_loss: float) -> None:
    """Raise a `RuntimeError` unless the saved network is the trained one."""
    if not abs(loss - trained_loss) <= ROUNDING_OF_LOSS * max(trained_loss, 0.1):
        raise RuntimeError(
            f"{path} is not the network that was trained: its loss is {loss:.4f}, that of the last epoch "
            f"{trained_loss:.4f}. The checkpoint is kept; please report this as a bug"
        )
