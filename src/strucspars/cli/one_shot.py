"""One-shot compression of a checkpoint, from file to file."""

import logging
import os
import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from strucspars.cli.networks import ImageShape
from strucspars.cli.one_shot_folder import OneShotRun, check_new_run_folder, write_one_shot_run
from strucspars.cli.output_files import check_can_be_written
from strucspars.convert.conversion import convert_
from strucspars.core.budget import Budget
from strucspars.export.storage import save
from strucspars.measure.summary import Summary, summary
from strucspars.models.catalogue import build_model
from strucspars.models.weights import load_weights_
from strucspars.nn.importance import importance_matrix
from strucspars.nn.selection import select_layers
from strucspars.report.one_shot import OneShotOutcome
from strucspars.report.repeat_command import sparsify_overrides
from strucspars.sparsify import one_shot
from strucspars.sparsify.planning import kept_fraction
from strucspars.training.recipe import SparsifyRecipe

# By which other commands know the file.
SUFFIX = ".safetensors"
# What of a recipe one-shot compression reads.
ONE_SHOT_OPTIONS = ("target", "budget", "min_channels_per_group", "include", "exclude", "layer_types")


@dataclass(frozen=True, kw_only=True)
class CompressedCheckpoint:
    """What one-shot compression came to.

    Attributes:
        path: the file with the compressed network.
        summary: its layers, before and after.
        sparsify: what was asked for.
        lost_norm: share of the grouped layers' norm that is gone.
        run: the run folder that was made; None if none was asked for.
    """

    path: Path
    summary: Summary
    sparsify: SparsifyRecipe
    lost_norm: float
    run: Path | None = None

    def text(self) -> str:
        """For people."""
        run = "" if self.run is None else f"\n{self.run}  the run folder; strucspars report {self.run} shows it"
        options = shlex.join(sparsify_overrides(self.sparsify))
        return (
            f"{self.summary}\n\n"
            f"{self.lost_norm:.1%} of the norm of the layers that can be grouped is lost: without training that is the "
            "price.\nFinetune the network before you judge it:\n\n"
            f"strucspars run RECIPE model.weights=CHECKPOINT stage1.epochs=0 {options}\n\n"
            "groups and finetunes, and loses less with some epochs of stage1.\n\n"
            f"{self.path}  the compressed network; strucspars.load({str(self.path)!r}, model) reads it"
            f"{run}"
        )

    def document(self) -> dict[str, Any]:
        """For scripts."""
        return {
            "path": str(self.path),
            "run": None if self.run is None else str(self.run),
            **{key: getattr(self.sparsify, key) for key in ONE_SHOT_OPTIONS},
            "lost_norm": self.lost_norm,
            **asdict(self.summary),
        }


def sparsify_recipe(
    *,
    target: float,
    budget: Budget,
    min_channels_per_group: int,
    include: Sequence[str],
    exclude: Sequence[str],
    layer_types: Sequence[str],
) -> SparsifyRecipe:
    """What was asked for on the command line; errors do not speak of a recipe."""
    try:
        return SparsifyRecipe(
            target=target,
            budget=budget,
            min_channels_per_group=min_channels_per_group,
            include=tuple(include),
            exclude=tuple(exclude),
            layer_types=tuple(layer_types),
        )
    except ValueError as error:
        raise ValueError(str(error).removeprefix("sparsify.")) from error


def compressed_checkpoint(
    checkpoint: str,
    *,
    model: str,
    sparsify: SparsifyRecipe,
    classes: int,
    image_shape: ImageShape,
    out: Path,
    force: bool = False,
    run: Path | None = None,
) -> CompressedCheckpoint:
    """Compress a checkpoint and write the outcome to a new file, and to a run folder if one is asked for.

    Args:
        checkpoint: as `source` of `load_weights_`.
        model: name of the network.
        sparsify: what to remove, and of which layers; how to train is not read.
        classes: its outputs.
        image_shape: of an image, to count MACs with.
        out: the file to write.
        force: replace a file that is there.
        run: the folder to make for a report; None for none.

    Raises:
        ValueError: the checkpoint does not fit, or the target cannot be met.
        OSError: there is such a file or folder already, or it cannot be written.
    """
    check_can_be_written(out, force=force)
    if out.suffix != SUFFIX:
        raise ValueError(f"--out {out}: the network is written as a {SUFFIX} file; call it {out.with_suffix(SUFFIX)}")
    if run is not None:
        check_new_run_folder(run)
        if Path(os.path.realpath(out)).is_relative_to(os.path.realpath(run)):
            raise ValueError(f"--out {out} lies in the folder that --run makes, {run}; write it elsewhere")
    rules = sparsify.rules()
    network = build_model(model, num_classes=classes, image_shape=image_shape, must_classify=False)
    load_weights_(network, checkpoint, model, with_classifier=True)
    example = torch.zeros(1, *image_shape)
    begin = time.perf_counter()
    with _said_elsewhere(one_shot.__name__):
        plan = one_shot.one_shot_plan(
            network, sparsify.target, budget=sparsify.budget, rules=rules, example_inputs=example
        )
    layers = select_layers(network, rules).layers
    lost_norm = 1 - kept_fraction(layers, plan)
    seconds = time.perf_counter() - begin
    # Of the dense network: only there the kept norm of each layer can still be seen, and the whole importance.
    described = summary(network, example, plan=plan, rules=rules)
    importance = {} if run is None else {layer.name: importance_matrix(layer.weight) for layer in layers}
    save(convert_(network, plan), out, plan=plan)
    if run is not None:
        written = OneShotRun(
            checkpoint=checkpoint,
            model=model,
            plan=plan,
            sparsify=sparsify,
            importance=importance,
            network=network,
            outcome=_outcome(described, classes, image_shape, lost_norm, seconds),
        )
        write_one_shot_run(run, written)
    return CompressedCheckpoint(
        path=out,
        summary=described,
        sparsify=sparsify,
        lost_norm=lost_norm,
        run=run,
    )


def _outcome(
    described: Summary, classes: int, image_shape: ImageShape, lost_norm: float, seconds: float
) -> OneShotOutcome:
    assert described.macs is not None, "counted with an example"
    return OneShotOutcome(
        classes=classes,
        image_shape=image_shape,
        params=described.params,
        macs=described.macs,
        lost_norm=lost_norm,
        seconds=seconds,
    )


@contextmanager
def _said_elsewhere(logger_name: str) -> Iterator[None]:
    """Keep a logger quiet whose message is part of the outcome, at its end, where it is seen."""
    logger = logging.getLogger(logger_name)
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = False
