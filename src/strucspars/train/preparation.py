"""Everything that a run begins with: whatever could refuse it is met here, before anything is written."""

import textwrap
from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from strucspars.train.checkpoint import load_named
from strucspars.train.loss import StageLoss
from strucspars.train.methods import COMPRESSION_METHODS, CompressionMethod, DenseTraining, Deployment, Workshop
from strucspars.train.recipe import FINETUNE, TRAIN
from strucspars.train.rules import TrainingRule
from strucspars.train.run_folder import RunFolder
from strucspars.train.setting import Setting

# Name of the checkpoint after the first stage.
SPARSIFIED = "sparsified"
# Of PyTorch's words about two networks that differ, which name every tensor.
SHOWN_CHARACTERS = 300


@dataclass(frozen=True, eq=False, kw_only=True)
class Preparation:
    """What a run begins with, or goes on with.

    Attributes:
        checkpoint: to go on from; None at the beginning.
        compression: the way to make the network smaller; None for a dense run.
        deployment: how it is trained last and saved: the same, but for a dense run.
        last_loss: of the last stage, with its teacher.
        model: the network to train first; fresh where the last stage has begun, whose checkpoint has the weights.
        first_rule: of the first stage; None where that is over, trained by another run, or not part of the method.
    """

    checkpoint: Mapping[str, Any] | None
    compression: CompressionMethod | None
    deployment: Deployment
    last_loss: StageLoss
    model: nn.Module
    first_rule: TrainingRule | None

    @property
    def last_stage(self) -> str:
        """Name of the stage that ends in the deployed network."""
        return TRAIN if self.compression is None else FINETUNE

    def has_begun(self, stage: str) -> bool:
        """Whether the checkpoint is one of this stage."""
        return _is_of(self.checkpoint, stage)

    def last_digests(self) -> dict[str, str | None]:
        """Of what the last stage builds on beside its checkpoints, once that is decided: it goes on with no other."""
        distillation = self.last_loss.distillation
        return {
            "teacher": None if distillation is None else distillation.digest(),
            "decision": self.deployment.decision_digest(),
        }


def prepared(
    setting: Setting, folder: RunFolder, checkpoint: Mapping[str, Any] | None, executor: Executor | None
) -> Preparation:
    """Build the networks, load what the recipe names, learn the first channel orders.

    Args:
        setting: data, networks and teacher.
        folder: of the run; only read.
        checkpoint: the last one there.
        executor: worker processes that learn the channel orders.

    Raises:
        ValueError: the recipe asks for what is not there or cannot be done, or the checkpoint is another run's.
    """
    recipe = setting.recipe
    workshop = Workshop(
        recipe=recipe,
        folder=folder,
        build=setting.fresh_model,
        build_other=setting.other_fresh_model,
        example=setting.example,
        steps_per_epoch=setting.train.steps,
        executor=executor,
        is_first=setting.engine.is_first,
        is_resumed=checkpoint is not None,
    )
    compression = COMPRESSION_METHODS[recipe.kind](workshop) if recipe.kind in COMPRESSION_METHODS else None
    _check_stage(checkpoint, setting, folder, compression)
    last_loss = setting.second_stage_loss()
    model = _model(setting, compression, checkpoint)
    first_rule = None
    if compression is not None and not _is_of(checkpoint, FINETUNE):
        first_rule = compression.first_rule(model)
    start = Preparation(
        checkpoint=checkpoint,
        compression=compression,
        deployment=compression or DenseTraining(workshop),
        last_loss=last_loss,
        model=model,
        first_rule=first_rule,
    )
    _check_unchanged(start, folder)
    return start


def _is_of(checkpoint: Mapping[str, Any] | None, stage: str) -> bool:
    return checkpoint is not None and checkpoint["stage"] == stage


def _check_stage(
    checkpoint: Mapping[str, Any] | None, setting: Setting, folder: RunFolder, compression: CompressionMethod | None
) -> None:
    stages = [TRAIN] if compression is None else [compression.first_stage, FINETUNE]
    if checkpoint is not None and checkpoint["stage"] not in stages:
        raise ValueError(
            f"{folder.checkpoints}: the checkpoint is of a stage {checkpoint['stage']!r}, but a run of kind "
            f"{setting.recipe.kind} has {' and '.join(stages)}; restore the right one, or use another folder"
        )


def _check_unchanged(start: Preparation, folder: RunFolder) -> None:
    """Refuse to go on where the last stage began with something else than is there now."""
    if start.checkpoint is None or not start.has_begun(start.last_stage):
        return
    other = {
        "teacher": ("a teacher of other weights than finetune.teacher has", "give that teacher"),
        "decision": (f"other contents of {start.deployment.decision_path}", "restore them"),
    }
    for key, digest in start.last_digests().items():
        # Checkpoints of before know of none.
        if start.checkpoint.get(key, digest) != digest:
            thing, remedy = other[key]
            raise ValueError(
                f"{folder.checkpoints}: {start.last_stage} began with {thing}, so it would become another run; "
                f"{remedy}, or start another run in another folder"
            )


def _model(setting: Setting, compression: CompressionMethod | None, checkpoint: Mapping[str, Any] | None) -> nn.Module:
    if compression is not None and _is_of(checkpoint, FINETUNE):
        compression.recall()
        return setting.fresh_model()
    model = setting.first_model()
    source = setting.recipe.sparsify.from_run
    if source is not None:
        _load_first_stage_(model, source, setting)
    return model


def _load_first_stage_(model: nn.Module, source: str, setting: Setting) -> None:
    """Give the network the weights that another run had after its first stage."""
    origin = RunFolder(Path(source).expanduser())
    saved = load_named(origin.checkpoints, SPARSIFIED)
    if saved is None:
        raise ValueError(
            f"sparsify.from_run: {source} is no run that has finished its first stage; finish it, or name another run"
        )
    setting.check_classes_of(origin)
    try:
        model.load_state_dict(saved["model"])
    except (KeyError, TypeError, RuntimeError) as error:
        reason = textwrap.shorten(str(error), SHOWN_CHARACTERS, placeholder=" ...")
        raise ValueError(
            f"sparsify.from_run: {source} belongs to another network: {reason}; give model.name as in its recipe.yaml, "
            "or leave from_run out"
        ) from error
