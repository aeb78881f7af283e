"""The parts of a run folder, each checked against what the others say; what is damaged is named and left out."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from strucspars.bench.results import BenchReport, report_from_json
from strucspars.core.checks import FloatArray, IntArray, is_number, is_whole_number
from strucspars.core.hierarchy import checked_group_level
from strucspars.core.permutation import checked_permutation
from strucspars.core.plan import GroupingPlan
from strucspars.io.arrays import load_arrays
from strucspars.io.files import read_bytes, read_text
from strucspars.io.records import parse_json
from strucspars.nn.importance import importance_matrix
from strucspars.train.outcome import LARGEST, ROW_TYPES
from strucspars.train.recipe import STAGES
from strucspars.train.run_folder import RunFolder

# What S is stored as: half precision, which is plenty for a picture.
StoredMatrix = npt.NDArray[np.floating[Any]]
Shapes = Mapping[str, tuple[int, ...]]
Part = TypeVar("Part")

EPOCH_FILE = re.compile(r"sparsify-(\d{4,})\.npz")
MOMENTS = ("start", "end")
# More problems of one kind say nothing new.
NAMED_LINES = 3


@dataclass(frozen=True, eq=False, kw_only=True)
class EpochLayers:
    """All layers after an epoch of the first stage, in network order.

    Attributes:
        epoch: from 1.
        group_level: `(layers,)`.
        kept_norm: `(layers, levels)`; NaN beyond a layer's last level.
        cost: `(layers,)`.
        churn: `(layers,)`.
        out_perm, in_perm: a channel order for every layer.
    """

    epoch: int
    group_level: IntArray
    kept_norm: FloatArray
    cost: FloatArray
    churn: FloatArray
    out_perm: tuple[IntArray, ...]
    in_perm: tuple[IntArray, ...]


class PartReader:
    """Reads parts of one folder and keeps a sentence about each that is damaged."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.problems: list[str] = []

    def note(self, problem: str) -> None:
        """Keep a sentence; paths in it are told from the folder."""
        self.problems.append(problem.replace(f"{self.folder.path}/", ""))

    def part(self, read: Callable[[], Part]) -> Part | None:
        """What `read` returns; None, and a sentence, if it cannot."""
        try:
            return read()
        except OSError as error:
            self.note(str(error) if error.filename is None else f"{error.filename} cannot be read: {error.strerror}")
        except ValueError as error:
            self.note(str(error))
        return None

    def json_object(self, path: Path) -> dict[str, Any]:
        """A JSON object; empty, and named, where it is missing or something else."""
        if not path.exists():
            self.note(f"{path.name} is missing")
            return {}
        return self.part(lambda: _object(self.folder.read_json(path), path.name)) or {}

    def rows(self) -> tuple[Mapping[str, Any], ...]:
        """The rows of the metrics that are whole. The torn last line of a killed run is no problem."""
        content = self.part(lambda: _bytes_of(self.folder.metrics_path)) or b""
        rows, damaged = [], []
        for number, line in enumerate(content.split(b"\n")[:-1], start=1):
            try:
                rows.append(_row(line, f"metrics.jsonl, line {number}"))
            except ValueError as error:
                damaged.append(str(error))
        self._note_some(damaged, "lines of metrics.jsonl are damaged")
        return tuple(rows)

    def weight_shapes(self, plan: GroupingPlan | None) -> Shapes:
        """Shapes of the layers that may be grouped, from `layers.json`, or else from the plan."""
        path = self.folder.path / "layers.json"
        stored = self.part(lambda: _layer_shapes(self.folder.read_json(path))) or {}
        if plan is None:
            return stored
        planned = {name: layer.weight_shape for name, layer in plan.layers.items()}
        if stored and stored != planned:
            self.note("layers.json and plan.json speak of different layers; the plan is believed")
        return planned

    def dynamics(self, shapes: Shapes, *, last_epoch: int) -> tuple[EpochLayers, ...]:
        """The stored epochs of the first stage, without what a killed run wrote beyond its last row."""
        epochs, damaged = [], []
        for epoch, path in _epoch_files(self.folder.dynamics, last_epoch):
            try:
                epochs.append(_epoch_layers(load_arrays(path), epoch, list(shapes.values()), path.name))
            except (OSError, ValueError) as error:
                damaged.append(str(error))
        self._note_some(damaged, "files of dynamics/ are damaged")
        return tuple(epochs)

    def importance(self, shapes: Shapes, *, norm: str) -> Mapping[str, Mapping[str, StoredMatrix]]:
        """S of every layer, by moment, where it was stored; of a run in its first stage, also from its checkpoint."""
        stored = {
            moment: self._matrices(path, shapes)
            for moment in MOMENTS
            if (path := self.folder.importance / f"{moment}.npz").exists()
        }
        if list(stored) != ["start"]:
            return stored
        now = self.part(lambda: _checkpoint_matrices(self.folder, shapes, norm)) or {}
        return {**stored, "now": now} if now else stored

    def bench(self) -> BenchReport | None:
        """What was timed of the run, None if nothing was."""
        path = self.folder.path / "bench.json"
        if not path.exists():
            return None
        return self.part(lambda: report_from_json(read_text(path), path.name))

    def _matrices(self, path: Path, shapes: Shapes) -> Mapping[str, StoredMatrix]:
        arrays = self.part(lambda: load_arrays(path)) or {}
        whole: dict[str, StoredMatrix] = {}
        damaged = []
        for name, matrix in arrays.items():
            try:
                _check_matrix(matrix, shapes.get(name))
                whole[name] = matrix
            except ValueError as error:
                damaged.append(f"importance/{path.name}, layer {name!r}: {error}")
        self._note_some(damaged, f"matrices of importance/{path.name} are damaged")
        return whole

    def _note_some(self, damaged: Sequence[str], words: str) -> None:
        for problem in damaged[:NAMED_LINES]:
            self.note(problem)
        if len(damaged) > NAMED_LINES:
            self.note(f"{len(damaged) - NAMED_LINES} more {words}")


def _object(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name} must hold a JSON object, got {type(value).__name__}")
    return value


def _bytes_of(path: Path) -> bytes:
    return read_bytes(path) if path.exists() else b""


def _row(line: bytes, where: str) -> Mapping[str, Any]:
    """A row with its stage, its epoch, and whatever else is a number."""
    row = parse_json(line, where)
    if not isinstance(row, dict):
        raise ValueError(f"{where}: must be a JSON object, got {type(row).__name__}")
    if row.get("stage") not in STAGES:
        raise ValueError(f"{where}: is of no stage that is known here: {json.dumps(row.get('stage'))[:40]}")
    if not is_whole_number(row.get("epoch")):
        raise ValueError(f"{where}: must have an epoch")
    numbers = {key: value for key, value in row.items() if is_number(value) and abs(value) < LARGEST}
    for key in ROW_TYPES:
        if key != "stage" and key not in numbers:
            raise ValueError(f"{where}: must have a number for {key}")
    return {"stage": row["stage"], **numbers}


def _layer_shapes(entries: Any) -> dict[str, tuple[int, ...]]:
    if entries is None:
        return {}
    try:
        shapes = {entry["name"]: tuple(entry["weight_shape"]) for entry in entries}
    except (TypeError, KeyError) as error:
        raise ValueError(f"layers.json must list names and weight shapes: {error!r}") from error
    for name, shape in shapes.items():
        widths_fit = all(is_whole_number(width) and 1 <= width < LARGEST for width in shape)
        if not isinstance(name, str) or not 2 <= len(shape) <= 5 or not widths_fit:
            raise ValueError(f"layers.json: {name!r} has no weight shape, got {shape}")
    return shapes


def _checkpoint_matrices(folder: RunFolder, shapes: Shapes, norm: str) -> dict[str, StoredMatrix]:
    """S of the weights in the last checkpoint, if that is one of the first stage."""
    checkpoint = folder.load_checkpoint() or {}
    weights = checkpoint.get("model")
    if checkpoint.get("stage") != "sparsify" or not isinstance(weights, Mapping):
        return {}
    found = {name: weights.get(f"{name}.weight") for name in shapes}
    return {
        name: importance_matrix(weight, "l2" if norm == "l2" else "l1").astype(np.float32)
        for name, weight in found.items()
        if isinstance(weight, torch.Tensor) and tuple(weight.shape) == shapes[name]
    }


def _epoch_files(folder: Path, last_epoch: int) -> list[tuple[int, Path]]:
    if not folder.is_dir():
        return []
    matches = ((EPOCH_FILE.fullmatch(path.name), path) for path in folder.iterdir())
    files = [(int(match.group(1)), path) for match, path in matches if match is not None]
    return sorted((epoch, path) for epoch, path in files if epoch <= last_epoch)


def _epoch_layers(
    arrays: Mapping[str, npt.NDArray[Any]], epoch: int, shapes: Sequence[tuple[int, ...]], where: str
) -> EpochLayers:
    missing = {"group_level", "kept_norm", "cost", "churn", "out_perm", "in_perm"} - set(arrays)
    if missing:
        raise ValueError(f"dynamics/{where} lacks {', '.join(sorted(missing))}")
    try:
        return EpochLayers(
            epoch=epoch,
            group_level=_levels(arrays["group_level"], shapes),
            kept_norm=_checked(arrays["kept_norm"], len(shapes), np.floating, dimensions=2).astype(np.float64),
            cost=_finite(arrays["cost"], len(shapes)),
            churn=_finite(arrays["churn"], len(shapes)),
            out_perm=_orders(arrays["out_perm"], [shape[0] for shape in shapes]),
            in_perm=_orders(arrays["in_perm"], [shape[1] for shape in shapes]),
        )
    except ValueError as error:
        raise ValueError(f"dynamics/{where} is damaged: {error}") from error


def _checked(array: npt.NDArray[Any], layers: int, kind: type[Any], *, dimensions: int = 1) -> npt.NDArray[Any]:
    if array.ndim != dimensions or len(array) != layers or not np.issubdtype(array.dtype, kind):
        raise ValueError(f"an array of {array.dtype} with shape {array.shape} does not fit {layers} layers")
    return array


def _finite(array: npt.NDArray[Any], layers: int) -> FloatArray:
    numbers: FloatArray = _checked(array, layers, np.floating).astype(np.float64)
    if not np.isfinite(numbers).all():
        raise ValueError("a number in it is not finite")
    return numbers


def _levels(array: npt.NDArray[Any], shapes: Sequence[tuple[int, ...]]) -> IntArray:
    levels = _checked(array, len(shapes), np.integer).tolist()
    return np.array(
        [checked_group_level(level, *shape[:2]) for level, shape in zip(levels, shapes, strict=True)], dtype=np.int64
    )


def _orders(orders: npt.NDArray[Any], widths: Sequence[int]) -> tuple[IntArray, ...]:
    """The orders of all layers, which lie one after the other."""
    if orders.shape != (sum(widths),):
        raise ValueError(f"{orders.shape} channels in a row, but the layers have {sum(widths)}")
    pieces = np.split(orders, np.cumsum(widths)[:-1])
    return tuple(checked_permutation(piece, len(piece), name="the order") for piece in pieces)


def _check_matrix(matrix: npt.NDArray[Any], shape: tuple[int, ...] | None) -> None:
    if shape is None:
        raise ValueError("there is no such layer")
    if matrix.shape != shape[:2] or not np.issubdtype(matrix.dtype, np.floating):
        raise ValueError(f"{matrix.dtype} of shape {matrix.shape} does not fit a weight of shape {shape}")
    if not np.isfinite(matrix).all() or (matrix < 0).any():
        raise ValueError("it holds something else than finite numbers from 0 on")
