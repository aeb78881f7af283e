"""Reading a run folder for a report. A run may be in progress; a damaged file is an error that names it."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import torch

from strucspars.bench.results import BenchReport, report_from_json
from strucspars.core.checks import FloatArray, IntArray, is_number
from strucspars.core.importance import Norm
from strucspars.core.permutation import checked_permutation
from strucspars.core.plan import GroupingPlan
from strucspars.io.arrays import load_arrays
from strucspars.io.files import read_text
from strucspars.nn.importance import importance_matrix
from strucspars.train.outcome import RunSummary, progress_words, read_metrics, read_summary, stage_seconds
from strucspars.train.recipe import Recipe, learning_stage
from strucspars.train.run_folder import ONE_SHOT, ONE_SHOT_STATE, RunFolder

# S is stored in half precision, which is enough for pictures.
StoredMatrix = npt.NDArray[np.floating[Any]]
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class LayerShape:
    """An entry of `layers.json`."""

    name: str
    weight_shape: tuple[int, ...]


@dataclass(frozen=True, eq=False, kw_only=True)
class EpochLayers:
    """All layers after an epoch of the first stage, in network order; `kept_norm` is NaN beyond the last level."""

    group_level: IntArray
    kept_norm: FloatArray
    churn: FloatArray
    out_perm: tuple[IntArray, ...]
    in_perm: tuple[IntArray, ...]


@dataclass(frozen=True, eq=False, kw_only=True)
class RunData:
    """What a run folder holds; `summary` is None before the end, `plan` before the decision, `bench` if not measured.

    The dynamics are the epochs of the stage that learns channel orders. The importance is S of every layer, by name, at
    its `start` and `end`, or `now` in between.
    """

    path: Path
    name: str
    recipe: Recipe
    summary: RunSummary | None
    rows: Sequence[Mapping[str, Any]]
    plan: GroupingPlan | None
    weight_shapes: Shapes
    dynamics: Sequence[EpochLayers]
    importance: Mapping[str, Mapping[str, StoredMatrix]]
    environment: Mapping[str, Any]
    decisions: Mapping[str, Any]
    bench: BenchReport | None

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds of every stage so far."""
        return stage_seconds(self.rows)

    @property
    def learned_importance(self) -> Mapping[str, StoredMatrix]:
        """S of every layer at the end of the learning, or of the last checkpoint before it."""
        return self.importance.get("end") or self.importance.get("now") or {}

    @property
    def one_shot(self) -> Mapping[str, Any] | None:
        """What `strucspars compress` noted; None for a run that trains."""
        return self.decisions.get(ONE_SHOT)

    @property
    def is_finished(self) -> bool:
        """Whether nothing is left to do."""
        return self.summary is not None or self.one_shot is not None

    @property
    def state(self) -> str:
        """The progress of the run, in words."""
        if self.summary is not None:
            return "finished"
        if self.one_shot is not None:
            return ONE_SHOT_STATE
        if not self.rows:
            return "before the end of its first epoch"
        return progress_words(self.recipe, self.rows)


def read_run(path: str | os.PathLike[str]) -> RunData:
    """Read a run folder. Nothing in it is executed, and nothing is written."""
    folder = RunFolder(path)
    if not folder.path.is_dir():
        raise ValueError(f"there is no folder {folder.path}; give the folder of a run")
    if not folder.recipe_path.exists():
        raise ValueError(
            f"{folder.path} is not a run folder: it has no {folder.recipe_path.name}; give the folder of a run"
        )
    recipe, plan, bench = folder.load_recipe(), folder.load_plan(), folder.path / "bench.json"
    rows = [
        {key: value for key, value in row.items() if key == "stage" or is_number(value)} for row in read_metrics(folder)
    ]
    if plan is not None:
        shapes = {name: layer.weight_shape for name, layer in plan.layers.items()}
    else:
        entries = folder.read_record(folder.path / "layers.json", list[LayerShape], [])
        shapes = {layer.name: layer.weight_shape for layer in entries}
    # A killed run may have stored one epoch more than its metrics have.
    stage = learning_stage(recipe)
    epochs = sum(row["stage"] == stage for row in rows)
    stored = [folder.dynamics / f"{stage}-{epoch:04d}.npz" for epoch in range(1, epochs + 1)]
    has_dynamics = shapes and any(folder.dynamics.glob(f"{stage}-*.npz"))
    return RunData(
        path=folder.path,
        name=folder.path.resolve().name,
        recipe=recipe,
        summary=read_summary(folder),
        rows=rows,
        plan=plan,
        weight_shapes=shapes,
        dynamics=[_epoch_layers(path, list(shapes.values())) for path in stored] if has_dynamics else [],
        importance=_importance(folder, recipe, shapes),
        environment=folder.read_record(folder.environment_path, dict[str, Any], {}),
        decisions=folder.read_record(folder.decisions_path, dict[str, Any], {}),
        bench=report_from_json(read_text(bench), str(bench)) if bench.exists() else None,
    )


def _epoch_layers(path: Path, shapes: Sequence[tuple[int, ...]]) -> EpochLayers:
    arrays = load_arrays(path)
    try:
        for name in ("group_level", "kept_norm", "churn"):
            if len(arrays[name]) != len(shapes):
                raise ValueError(f"{name} of {len(arrays[name])} layers")
        return EpochLayers(
            group_level=arrays["group_level"].astype(np.int64),
            kept_norm=arrays["kept_norm"].astype(np.float64),
            churn=arrays["churn"].astype(np.float64),
            out_perm=_orders(arrays["out_perm"], [shape[0] for shape in shapes]),
            in_perm=_orders(arrays["in_perm"], [shape[1] for shape in shapes]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is damaged: it does not fit the run's {len(shapes)} layers ({error}); restore it from a copy, "
            f"or delete the folder {path.parent}"
        ) from error


def _orders(orders: npt.NDArray[Any], widths: Sequence[int]) -> tuple[IntArray, ...]:
    """The orders of all layers, which are stored one after the other."""
    if orders.shape != (sum(widths),):
        raise ValueError(f"orders of {len(orders)} channels instead of {sum(widths)}")
    pieces = np.split(orders, np.cumsum(widths)[:-1])
    return tuple(checked_permutation(piece, len(piece), name="the order") for piece in pieces)


def _importance(folder: RunFolder, recipe: Recipe, shapes: Shapes) -> Mapping[str, Mapping[str, StoredMatrix]]:
    """S of every layer by moment, where stored; `now` is of the last checkpoint, for norms of weights only."""
    stored: dict[str, Mapping[str, StoredMatrix]] = {}
    for moment in ("start", "end"):
        path = folder.importance / f"{moment}.npz"
        if path.exists():
            stored[moment] = load_arrays(path)
            for name, matrix in stored[moment].items():
                if name not in shapes or matrix.shape != shapes[name][:2] or not np.isfinite(matrix).all():
                    raise ValueError(
                        f"{path} is damaged: its matrix of layer {name!r} does not fit the run's layers; "
                        "restore it from a copy or delete it"
                    )
    may_compute = list(stored) == ["start"] and recipe.sparsify.importance in get_args(Norm)
    checkpoint = folder.load_checkpoint() if may_compute else None
    if checkpoint is not None and checkpoint.get("stage") == learning_stage(recipe):
        norm: Norm = "l2" if recipe.sparsify.importance == "l2" else "l1"
        weights = {name: checkpoint["model"].get(f"{name}.weight") for name in shapes}
        stored["now"] = {
            name: importance_matrix(weight, norm).astype(np.float32)
            for name, weight in weights.items()
            if isinstance(weight, torch.Tensor) and tuple(weight.shape) == shapes[name]
        }
    return {moment: matrices for moment, matrices in stored.items() if matrices}
