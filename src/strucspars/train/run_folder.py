"""The folder of a run: its files, and writing and reading them whole. Reading executes nothing, whatever its origin."""

import errno
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any, final

import numpy as np

from strucspars.core.plan import GroupingPlan
from strucspars.io.arrays import load_arrays, save_arrays
from strucspars.io.files import UNFINISHED, disk_error, read_text, write_text
from strucspars.io.records import convert, parse_json, to_json
from strucspars.train.checkpoint import load_checkpoint, save_checkpoint
from strucspars.train.lock import LOCK_NAME, folder_lock, was_locked
from strucspars.train.metrics import append_row, keep_rows, read_rows
from strucspars.train.recipe import Recipe
from strucspars.train.recipe_reading import read_recipe

# The decision of one-shot compression: classes and image shape of the network, and the lost norm.
ONE_SHOT = "one_shot"
ONE_SHOT_STATE = "one-shot: never trained here, accuracy not measured"


@final
class RunFolder:
    """A run's folder; its methods lose nothing, whenever the process dies. A folder with links is refused.

    A run begins with `create()`, then works inside `locked()`, where `write_recipe` comes first. `check_usable()` and
    the methods that only read leave the disk as it is.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        _check_no_links(self.path)
        self.recipe_path = self.path / "recipe.yaml"
        self.environment_path = self.path / "environment.json"
        self.classes_path = self.path / "classes.json"
        self.plan_path = self.path / "plan.json"
        self.metrics_path = self.path / "metrics.jsonl"
        self.decisions_path = self.path / "decisions.json"
        self.summary_json_path = self.path / "summary.json"
        self.summary_text_path = self.path / "summary.txt"
        self.model_path = self.path / "model.safetensors"
        self.checkpoints = self.path / "checkpoints"
        self.dynamics = self.path / "dynamics"
        self.importance = self.path / "importance"
        self.tensorboard = self.path / "tensorboard"

    @property
    def _subfolders(self) -> tuple[Path, ...]:
        return self.checkpoints, self.dynamics, self.importance, self.tensorboard

    def check_usable(self) -> None:
        """Refuse a path where no folder can be made or that holds something other than a run; writes nothing."""
        try:
            self._check_own()
            nearest = next(place for place in (self.path, *self.path.absolute().parents) if place.exists())
            if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
                number = errno.EACCES if nearest.is_dir() else errno.ENOTDIR
                raise OSError(number, os.strerror(number))
        except OSError as error:
            raise disk_error("make the run folder", self.path, error) from error

    def create(self) -> None:
        """Make the folder and its subfolders; refuse what `check_usable` refuses."""
        self.check_usable()
        for folder in (self.path, *self._subfolders):
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise disk_error("make the run folder", folder, error) from error

    @property
    def was_locked(self) -> bool:
        """Whether some process has worked here before, or does now."""
        return was_locked(self.path)

    def locked(self, *, is_first: bool = False) -> AbstractContextManager[None]:
        """Hold the folder for this process alone while the block runs; see `folder_lock`."""
        return folder_lock(self.path, is_first=is_first)

    @property
    def is_begun(self) -> bool:
        """Whether there is something to go on from, or an outcome that must not be lost."""
        return self.summary_json_path.exists() or self.is_one_shot or any(self.checkpoints.glob("*.pt"))

    @property
    def is_finished(self) -> bool:
        """Whether a run has finished here and its network is there."""
        return all(path.is_file() for path in (self.model_path, self.recipe_path, self.summary_json_path))

    @property
    def is_one_shot(self) -> bool:
        """Whether `strucspars compress` made the network here: a run has metrics long before it has a network."""
        return self.model_path.exists() and not (self.metrics_path.exists() or self.summary_json_path.exists())

    def write_recipe(self, text: str) -> None:
        """Store the resolved recipe."""
        write_text(self.recipe_path, text)

    def load_recipe(self, overrides: Sequence[str] = ()) -> Recipe:
        """The stored recipe, with overrides."""
        return read_recipe(self.recipe_path, overrides, is_resolved=True)

    def remove_leftovers(self) -> None:
        """Remove what a killed process was writing; only while the folder is locked."""
        for leftover in list(self.path.rglob(f"{UNFINISHED}*")):
            shutil.rmtree(leftover, ignore_errors=True)

    def write_json(self, path: Path, value: object) -> None:
        """Replace a JSON file, all or nothing; NaN and infinity become null."""
        write_text(path, to_json(value, path.name) + "\n")

    def read_json(self, path: Path) -> Any:
        """The value of a JSON file; None where there is no such file."""
        try:
            return parse_json(read_text(path), str(path))
        except FileNotFoundError:
            return None

    def append_metrics(self, row: Mapping[str, Any]) -> None:
        """Add a row to the metrics; it is on the disk when this returns."""
        append_row(self.metrics_path, row)

    def metrics(self) -> list[dict[str, Any]]:
        """All whole rows of the metrics."""
        return read_rows(self.metrics_path)

    def rewind_metrics(self, count: int) -> None:
        """Keep the first `count` rows, those that the checkpoint knows of."""
        keep_rows(self.metrics_path, count)

    def save_checkpoint(self, state: dict[str, Any]) -> None:
        """Write a checkpoint and keep the one before it; see `strucspars.train.checkpoint`."""
        self.checkpoints.mkdir(exist_ok=True)
        save_checkpoint(self.checkpoints, state)

    def load_checkpoint(self) -> dict[str, Any] | None:
        """The last complete checkpoint, None before the first."""
        return load_checkpoint(self.checkpoints)

    def save_plan(self, plan: GroupingPlan) -> None:
        """Store the plan."""
        write_text(self.plan_path, plan.to_json() + "\n")

    def load_plan(self) -> GroupingPlan | None:
        """The stored plan, None before there is one."""
        try:
            return GroupingPlan.from_json(read_text(self.plan_path), str(self.plan_path))
        except FileNotFoundError:
            return None

    def save_epoch_arrays(self, stage: str, epoch: int, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Store the state of the layers after an epoch."""
        self.dynamics.mkdir(exist_ok=True)
        save_arrays(self._epoch_path(stage, epoch), arrays)

    def epoch_arrays(self, stage: str, epoch: int) -> dict[str, np.ndarray[Any, Any]]:
        """The arrays that `save_epoch_arrays` stored."""
        return load_arrays(self._epoch_path(stage, epoch))

    def remember(self, key: str, value: object) -> None:
        """Store a decision that the run keeps to, as plain values."""
        self.write_json(self.decisions_path, self._decisions() | {key: value})

    def remembered(self, key: str) -> Any:
        """The stored decision; None where there is none."""
        return self._decisions().get(key)

    def _decisions(self) -> dict[str, Any]:
        stored = self.read_json(self.decisions_path)
        decisions: dict[str, Any] = {} if stored is None else convert(dict[str, Any], stored, str(self.decisions_path))
        return decisions

    def _epoch_path(self, stage: str, epoch: int) -> Path:
        return self.dynamics / f"{stage}-{epoch:04d}.npz"

    def _check_own(self) -> None:
        """Refuse a folder with other contents. A run that was killed before it wrote its recipe may begin again."""
        if self.is_one_shot:
            raise ValueError(
                f"{self.path} holds a network of one-shot compression, which a run would overwrite; "
                "choose another folder with --out"
            )
        if self.recipe_path.exists() or not self.path.exists():
            return
        if not self.path.is_dir():
            raise ValueError(f"{self.path} is a file; choose another path for the run folder")
        empty = {folder for folder in self._subfolders if folder.is_dir() and not any(folder.iterdir())}
        leftovers = {self.path / LOCK_NAME, *self.path.glob(f"{UNFINISHED}*"), *empty}
        foreign = sorted(entry.name for entry in self.path.iterdir() if entry not in leftovers)
        if foreign:
            raise ValueError(
                f"{self.path} holds {', '.join(foreign[:3])}{' and more' if foreign[3:] else ''}, but no "
                f"{self.recipe_path.name}: it is not a run folder; choose an empty one or a path that does not exist"
            )


def _check_no_links(path: Path) -> None:
    """Writing would go through a link to a file elsewhere, and reading would show one: refuse both."""
    with suppress(FileNotFoundError, NotADirectoryError):
        links = sorted(entry.name for entry in os.scandir(path) if entry.is_symlink())
        if links:
            raise ValueError(
                f"{path / links[0]} is a link, and a run folder holds none: what it leads to would be overwritten; "
                "put a copy in its place, or delete it"
            )


def store_classes(folder: RunFolder, classes: Sequence[str] | None) -> None:
    """Store the names of the classes in the order of the outputs; None for data whose classes are fixed."""
    if classes is None:
        # Left by an earlier attempt with other data.
        folder.classes_path.unlink(missing_ok=True)
        return
    # Escaped: a folder's name is bytes, and need not be UTF-8.
    write_text(folder.classes_path, json.dumps(list(classes), indent=2) + "\n")


def stored_classes(folder: RunFolder) -> tuple[str, ...] | None:
    """The names in the order of the outputs; None where none are stored."""
    stored = folder.read_json(folder.classes_path)
    return None if stored is None else convert(tuple[str, ...], stored, str(folder.classes_path))


def check_same_classes(folder: RunFolder, classes: Sequence[str] | None, *, data: str) -> None:
    """Refuse data, named by `data`, whose classes differ from those of the run; unnamed classes match any."""
    stored = stored_classes(folder)
    if stored is None or classes is None:
        return
    for output, names in enumerate(zip_longest(stored, classes)):
        before, now = ("no class" if name is None else repr(name) for name in names)
        if before != now:
            raise ValueError(
                f"the run in {folder.path} has other classes than {data}: output {output} means {before} in the run, "
                f"{now} in the data; give the data of that run. Where only names have changed, and not the order of "
                f"the classes, delete {folder.classes_path}"
            )
