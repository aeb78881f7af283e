"""The folder of a run: its files, its lock, and atomic writing. Reading a folder from any source executes nothing."""

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar, cast, final

import numpy as np

from strucspars.core.plan import GroupingPlan
from strucspars.io.arrays import save_arrays
from strucspars.io.files import (
    UNFINISHED,
    disk_error,
    named_errors,
    read_bytes,
    read_text,
    reworded,
    sync_folder,
    write_bytes,
    write_text,
)
from strucspars.io.records import RecordError, convert, parse_json, plain, to_json
from strucspars.train.checkpoint import load_checkpoint, save_checkpoint
from strucspars.train.observer import RunFailed
from strucspars.train.recipe import Recipe
from strucspars.train.recipe_reading import read_recipe

# The decision of one-shot compression: classes and image shape of the network, and the lost norm.
ONE_SHOT = "one_shot"
# The decision of a run with data of a function: the shape of its images, so that others need not call the function.
DATA_OF_FUNCTION = "data_of_function"
ONE_SHOT_STATE = "one-shot: never trained here"

Value = TypeVar("Value")

# Descriptors of the lock files that this process holds.
_held: set[int] = set()


class RunFolderBusy(RunFailed):
    """Another process, or another part of this one, works in the run folder."""


@final
class RunFolder:
    """The folder of a run. Its files stay complete whenever the process is killed. A folder with links is refused.

    A run calls `create()`, then works inside `locked()`, where it calls `write_recipe` first.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        _check_no_links(self.path)
        self.lock_path = self.path / ".lock"
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
        with named_errors(self.path, "make the run folder"):
            self._check_own()
            nearest = next(place for place in (self.path, *self.path.absolute().parents) if place.exists())
            if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
                number = errno.EACCES if nearest.is_dir() else errno.ENOTDIR
                raise OSError(number, os.strerror(number))

    def create(self) -> None:
        """Make the folder and its subfolders; refuse what `check_usable` refuses."""
        self.check_usable()
        for folder in (self.path, *self._subfolders):
            with named_errors(folder, "make the run folder"):
                folder.mkdir(parents=True, exist_ok=True)

    @property
    def was_locked(self) -> bool:
        """Whether a process has held the folder before, or holds it now."""
        return os.path.lexists(self.lock_path)

    @contextmanager
    def locked(self, *, is_first: bool = False) -> Iterator[None]:
        """Hold the folder for this process while the block runs; the kernel releases the lock when the process ends.

        The lock file stays: without it, a third process could lock a new file while a second still waits for the old
        one. With `is_first`, a folder that any process has held before is refused: what was read there without the lock
        may have changed.
        """
        descriptor = self._open_lock(os.O_EXCL if is_first else 0)
        _held.add(descriptor)
        try:
            self._acquire(descriptor)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
            yield
        finally:
            # A forked child that leaves the block has closed its copy already.
            if descriptor in _held:
                _held.remove(descriptor)
                os.close(descriptor)

    def _open_lock(self, more_flags: int) -> int:
        try:
            # Links are not followed: the process number would be written into a foreign file.
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | more_flags
            descriptor = os.open(self.lock_path, flags, 0o666)
        except FileExistsError as error:
            raise RunFolderBusy(
                f"another process has just begun a run in {self.path}; wait for it, or use another folder"
            ) from error
        except OSError as error:
            raise disk_error("lock", self.lock_path, error) from error
        if not self.lock_path.is_file():
            os.close(descriptor)
            raise ValueError(f"{self.lock_path} is not a regular file; delete it")
        return descriptor

    def _acquire(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            text = os.pread(descriptor, 20, 0).strip()
            holder = f"process {int(text)}" if text.isdigit() else "another process"
            raise RunFolderBusy(
                f"the run folder {self.path} is in use by {holder}; wait for it, stop it, or use another folder"
            ) from error
        except OSError as error:
            raise reworded(
                error,
                f"the file system of {self.path} refuses locks ({error.strerror}), so two processes could write there "
                "at once; put the run folder on a local disk",
            ) from error

    @property
    def is_begun(self) -> bool:
        """Whether there is a checkpoint to resume from, or an outcome that must not be lost."""
        return self.summary_json_path.exists() or self.is_one_shot or any(self.checkpoints.glob("*.pt"))

    @property
    def is_finished(self) -> bool:
        """Whether the run is finished and its network exists."""
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

    def read_record(self, path: Path, kind: type[Value], missing: Value) -> Value:
        """The value of a JSON file as this type; `missing` where there is no such file."""
        value = self.read_json(path)
        return missing if value is None else cast(Value, convert(kind, value, str(path)))

    def append_metrics(self, row: Mapping[str, Any]) -> None:
        """Add a row, one JSON object per line, and wait for the disk; incomplete lines are removed."""
        line = json.dumps(plain(row, "row"), allow_nan=False, separators=(",", ":")).encode() + b"\n"
        is_new = not self.metrics_path.exists()
        with named_errors(self.metrics_path):
            # Links are not followed: in a hostile folder they lead to files of the user.
            descriptor = os.open(self.metrics_path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
            with open(descriptor, "r+b", buffering=0) as file:
                end = file.read().rfind(b"\n") + 1
                try:
                    os.ftruncate(descriptor, end)
                    written = 0
                    while written < len(line):
                        written += os.pwrite(descriptor, line[written:], end + written)
                    os.fsync(descriptor)
                except BaseException:
                    os.ftruncate(descriptor, end)
                    raise
        if is_new:
            sync_folder(self.path)

    def metrics(self) -> list[dict[str, Any]]:
        """All rows of the metrics, none where there is no file; an incomplete last line is left out."""
        return [self._metrics_row(number, line) for number, line in enumerate(self._metrics_lines(), start=1)]

    def rewind_metrics(self, count: int) -> None:
        """Keep the first `count` rows: a resumed run writes those after its last checkpoint again."""
        lines = self._metrics_lines()
        if len(lines) < count:
            raise ValueError(
                f"{self.metrics_path} has {len(lines)} whole rows, but the checkpoint was made after {count}; "
                "restore the file from a copy, or start again in another folder"
            )
        for number, line in enumerate(lines[:count], start=1):
            self._metrics_row(number, line)
        if self.metrics_path.exists():
            write_bytes(self.metrics_path, b"".join(line + b"\n" for line in lines[:count]))

    def _metrics_lines(self) -> list[bytes]:
        try:
            return read_bytes(_kept(self.metrics_path)).split(b"\n")[:-1]
        except FileNotFoundError:
            return []

    def _metrics_row(self, number: int, line: bytes) -> dict[str, Any]:
        where = f"{self.metrics_path}, line {number}"
        row = parse_json(line, where)
        if not isinstance(row, dict):
            raise RecordError(where, "", f"must be a JSON object, got {type(row).__name__}")
        return row

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
            return GroupingPlan.from_json(read_text(_kept(self.plan_path)), str(self.plan_path))
        except FileNotFoundError:
            return None

    def save_epoch_arrays(self, stage: str, epoch: int, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Store the state of the layers after an epoch."""
        self.dynamics.mkdir(exist_ok=True)
        save_arrays(self.dynamics / f"{stage}-{epoch:04d}.npz", arrays)

    def remember(self, key: str, value: object) -> None:
        """Store a decision that the run keeps to, as plain values."""
        self.write_json(self.decisions_path, self._decisions() | {key: value})

    def remembered(self, key: str) -> Any:
        """The stored decision; None where there is none."""
        return self._decisions().get(key)

    def _decisions(self) -> dict[str, Any]:
        return self.read_record(self.decisions_path, dict[str, Any], {})

    def _check_own(self) -> None:
        """Refuse a folder with other contents. A run that was killed before it wrote its recipe may start again."""
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
        leftovers = {self.lock_path, *self.path.glob(f"{UNFINISHED}*"), *empty}
        foreign = sorted(entry.name for entry in self.path.iterdir() if entry not in leftovers)
        if foreign:
            raise ValueError(
                f"{self.path} holds {', '.join(foreign[:3])}{' and more' if foreign[3:] else ''}, but no "
                f"{self.recipe_path.name}: it is not a run folder; choose an empty one or a path that does not exist"
            )


def _kept(path: Path) -> Path:
    """The file, or its packed copy where only that exists: recorded runs pack their largest files."""
    packed = path.with_name(f"{path.name}.gz")
    return packed if packed.exists() and not path.exists() else path


def _close_in_child() -> None:
    """Close the locks in a forked worker: they live as long as any copy of their descriptors."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)


def _check_no_links(path: Path) -> None:
    """Refuse links, which would let a run change or show a file elsewhere."""
    with suppress(FileNotFoundError, NotADirectoryError):
        links = sorted(entry.name for entry in os.scandir(path) if entry.is_symlink())
        if links:
            raise ValueError(
                f"{path / links[0]} is a link, which a run folder must not hold: its target would be overwritten; "
                "replace it by a copy, or delete it"
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
