"""The run folder of a one-shot compression: all that a report shows of it."""

import errno
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import nn

from strucspars.core.arrays import FloatArray
from strucspars.core.plan import GroupingPlan
from strucspars.export.os_errors import reworded
from strucspars.export.storage import save
from strucspars.report.one_shot import OneShotOutcome
from strucspars.runs.arrays import save_arrays
from strucspars.runs.environment import environment
from strucspars.runs.folder import RunFolder
from strucspars.training.recipe import DataRecipe, ModelRecipe, Recipe, SparsifyRecipe
from strucspars.training.recipe_reading import recipe_yaml

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
