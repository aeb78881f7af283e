"""`strucspars compress`: a checkpoint becomes a smaller one, without training."""

import errno
import logging
import os
import shlex
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import nn

from strucspars.bench.machine import environment
from strucspars.cli.console import (
    Classes,
    Debug,
    Force,
    ImageShapeOption,
    Json,
    Output,
    check_can_be_written,
    examples,
    from_home,
    parsed_image_shape,
)
from strucspars.cli.networks import ImageShape
from strucspars.convert.conversion import convert_
from strucspars.core.budget import Budget
from strucspars.core.checks import FloatArray
from strucspars.core.plan import GroupingPlan
from strucspars.cost.summary import Summary, summary
from strucspars.export.storage import save
from strucspars.io.arrays import save_arrays
from strucspars.io.files import reworded
from strucspars.models.catalogue import build_model
from strucspars.models.weights import load_weights_
from strucspars.nn.groupable import select_layers
from strucspars.nn.importance import importance_matrix
from strucspars.report.one_shot import OneShotOutcome
from strucspars.report.repeat_command import sparsify_overrides
from strucspars.sparsify import one_shot
from strucspars.sparsify.planning import kept_fraction
from strucspars.train.recipe import DataRecipe, ModelRecipe, Recipe, SparsifyRecipe
from strucspars.train.recipe_reading import recipe_yaml
from strucspars.train.run_folder import RunFolder

HEADING = "# One-shot: the weights were grouped as they are. None of the stages below has run.\n"
SMALLEST_IMAGE = 8


@dataclass(frozen=True, eq=False, kw_only=True)
class OneShotRun:
    """What goes into the folder.

    Attributes:
        checkpoint: where the weights came from.
        model: name of the network.
        plan: how it is grouped.
        sparsify: what was asked for.
        importance: S of every layer that may be grouped, by name, in network order.
        network: after conversion.
        outcome: sizes and what was lost.
    """

    checkpoint: str
    model: str
    plan: GroupingPlan
    sparsify: SparsifyRecipe
    importance: Mapping[str, FloatArray]
    network: nn.Module
    outcome: OneShotOutcome


def check_new_run_folder(path: Path) -> None:
    """Raise an `OSError` that says what to do where no new run folder can be made: before the work, not after it."""
    # An empty folder is replaced by the new one: not where someone stands in it, or means it by a link.
    if path.name == ".." or path.is_symlink() or Path.cwd().is_relative_to(os.path.realpath(path)):
        raise FileExistsError(f"{path} is there already; name a new folder with --run, such as runs/one-shot")
    if path.is_dir():
        if any(path.iterdir()):
            raise FileExistsError(f"{path} is there already and not empty; name a new folder with --run")
    elif os.path.lexists(path):
        raise FileExistsError(f"{path} is a file; name a new folder with --run")
    parent = next(folder for folder in path.absolute().parents if folder.exists())
    if not parent.is_dir():
        raise NotADirectoryError(f"{path} cannot be made: {parent} is a file; name another folder with --run")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise PermissionError(
            f"{path} cannot be made: the folder {parent} is not writable for you; change that, or --run"
        )


def write_one_shot_run(path: Path, run: OneShotRun) -> None:
    """Make the folder, whole or not at all.

    Raises:
        OSError: it cannot be written, or something is there by now; nothing is left of it.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Beside the folder, since a rename does not cross disks.
        with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=path.parent) as place:
            # Named as it will be: the recipe is, too.
            unfinished = RunFolder(Path(place) / path.name)
            _write(unfinished, run, name=path.absolute().name)
            os.rename(unfinished.path, path)
    except OSError as error:
        taken = error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)
        remedy = "name a new folder with --run" if taken else "see to that, or name another folder with --run"
        raise reworded(error, f"cannot make the run folder {path}: {error.strerror or error}; {remedy}") from error


def _write(folder: RunFolder, run: OneShotRun, *, name: str) -> None:
    folder.importance.mkdir(parents=True)
    folder.write_recipe(HEADING + recipe_yaml(_recipe(run, name)))
    folder.write_json(folder.environment_path, environment())
    folder.save_plan(run.plan)
    shapes = [{"name": layer, "weight_shape": list(plan.weight_shape)} for layer, plan in run.plan.layers.items()]
    folder.write_json(folder.path / "layers.json", shapes)
    # Of the end alone: there was no training that it could differ from at the start.
    matrices = {layer: matrix.astype(np.float16) for layer, matrix in run.importance.items()}
    save_arrays(folder.importance / "end.npz", matrices)
    save(run.network, folder.model_path, plan=run.plan)
    folder.write_json(folder.one_shot_path, run.outcome.to_json())


def _recipe(run: OneShotRun, name: str) -> Recipe:
    """What was asked for; the data stand for the images that operations were counted with."""
    _, height, width = run.outcome.image_shape
    return Recipe(
        name=name,
        data=DataRecipe(name="folder", image_size=max(height, width, SMALLEST_IMAGE)),
        model=ModelRecipe(name=run.model, weights=run.checkpoint),
        sparsify=run.sparsify,
    )


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


EXAMPLES = examples(
    "strucspars compress resnet50.pth --model resnet50 --target 0.35",
    "strucspars compress DEFAULT --model resnet18 --target 0.3 --budget macs --out small.safetensors",
    "strucspars compress resnet50.pth --model resnet50 --target 0.6 --min-channels-per-group 16",
    "strucspars compress resnet50.pth --model resnet50 --target 0.6 --run runs/one-shot",
    "strucspars compress DEFAULT --model convnext_tiny --target 0.4 --layer-type Conv2d --layer-type Linear",
    "strucspars compress mine.pt --model my_package.networks:build --classes 7 --image-shape 3x160x160 --target 0.5",
)


class BudgetOption(StrEnum):
    """What the target is a fraction of."""

    params = "params"
    macs = "macs"


Checkpoint = Annotated[
    str,
    typer.Argument(
        metavar="CHECKPOINT", help="A .pt, .pth or .safetensors file of a state dict, or torchvision weights (DEFAULT)."
    ),
]
Model = Annotated[str, typer.Option(help="The network: preact-resnet20, resnet50, timm:NAME, package.module:function.")]
MinChannelsPerGroup = Annotated[
    int, typer.Option(min=1, help="No group narrower than this; CPU runtimes are slow below 16.")
]
Include = Annotated[
    list[str] | None,
    typer.Option(metavar="PATTERN", help="Only layers of such names; may be repeated.", show_default="'*'"),
]
Exclude = Annotated[
    list[str] | None,
    typer.Option(metavar="PATTERN", help="No layer of such a name; may be repeated.", show_default=False),
]
LayerType = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TYPE",
        help="Group layers of this type: Conv2d, Conv1d, Conv3d or Linear; may be repeated.",
        show_default="Conv2d",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(help="The file to write.", show_default="MODEL-compressed.safetensors", callback=from_home),
]
Run = Annotated[
    Path | None,
    typer.Option(
        "--run",
        metavar="FOLDER",
        help="Also make a run folder, for strucspars report.",
        show_default=False,
        callback=from_home,
    ),
]


def compress(
    checkpoint: Checkpoint,
    model: Model,
    target: Annotated[float, typer.Option(help="Fraction of the whole network to remove.")],
    budget: Annotated[BudgetOption, typer.Option(help="What the target counts.")] = BudgetOption.params,
    min_channels_per_group: MinChannelsPerGroup = 1,
    include: Include = None,
    exclude: Exclude = None,
    layer_type: LayerType = None,
    classes: Classes = None,
    image_shape: ImageShapeOption = None,
    out: Out = None,
    run: Run = None,
    force: Force = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Group the convolutions of a trained network as its weights are: one-shot, without training.

    Much of the weights' norm is lost this way, and only training brings the accuracy back. `run` does both with
    `model.weights=CHECKPOINT stage1.epochs=0`, and loses less where it may train before, too.
    """
    from strucspars.cli.compress import compressed_checkpoint, sparsify_recipe
    from strucspars.cli.networks import usual_classes, usual_image_shape

    done = compressed_checkpoint(
        checkpoint,
        model=model,
        sparsify=sparsify_recipe(
            target=target,
            budget=budget.value,
            min_channels_per_group=min_channels_per_group,
            include=include or ["*"],
            exclude=exclude or [],
            layer_types=layer_type or ["Conv2d"],
        ),
        classes=usual_classes(model) if classes is None else classes,
        image_shape=usual_image_shape(model) if image_shape is None else parsed_image_shape(image_shape),
        force=force,
        out=out or Path(f"{model.replace(':', '-').replace('/', '-')}-compressed.safetensors"),
        run=run,
    )
    Output(as_json=as_json).outcome(done.text(), done.document())
