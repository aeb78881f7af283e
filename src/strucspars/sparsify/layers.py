"""What is known about a layer during sparse training, and how an epoch changes it (Algorithm 1)."""

import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Executor
from dataclasses import dataclass
from types import TracebackType

import numpy as np
from threadpoolctl import threadpool_limits
from torch import nn

from strucspars.core.budget import LayerBudget
from strucspars.core.checks import FloatArray, IntArray
from strucspars.core.connectivity import Connectivity
from strucspars.core.criterion import kept_norm_by_level
from strucspars.core.hierarchy import num_groups, penalty_matrix
from strucspars.core.learning import Method, learn_permutations
from strucspars.core.permutation import inverse
from strucspars.nn.groupable import SelectedLayer
from strucspars.nn.importance import importance_matrix
from strucspars.nn.names import bare_modules, modules_by_name
from strucspars.sparsify.config import SparsifyConfig

# One step of the way to a layer: a module, the name of one that it holds, and that one. No class: that takes twice as
# long to look at, and every training step does.
_Place = tuple[nn.Module, str, nn.Module]


class LayerPlaces:
    """The way from a model to each of its layers, cheap enough to be looked at before every training step."""

    def __init__(self, model: nn.Module, layers: Sequence[SelectedLayer]) -> None:
        self.model, self._layers = model, tuple(layers)
        self._places = _ways(model, {layer.module for layer in layers})

    def check(self) -> None:
        """Raise a `ValueError` that names a layer whose place in the model another module has taken."""
        for holder, name, module in self._places:
            if holder._modules.get(name) is not module:
                self._follow()
                return

    def are_called(self, names: Sequence[str]) -> bool:
        """Whether these are the layers in their order; names may have wrappers in them, as those of older states."""
        modules = modules_by_name(self.model)
        return [modules.get(name) for name in names] == [layer.module for layer in self._layers]

    def _follow(self) -> None:
        """A wrapper may have come between (compiled, or with activations recomputed): then the layers are the same."""
        present = dict(bare_modules(self.model, remove_duplicate=False))
        for layer in self._layers:
            if layer.module not in _nearest(layer.name, present).modules():
                raise ValueError(
                    f"layer {layer.name!r} has been replaced in the model, or taken out of it, and the Sparsifier "
                    "would go on with the old module; make a new Sparsifier"
                )
        self._places = _ways(self.model, {layer.module for layer in self._layers})


def _nearest(name: str, present: Mapping[str, nn.Module]) -> nn.Module:
    """What is there under a name, or as much of it as there is."""
    while name not in present:
        name = name.rpartition(".")[0]
    return present[name]


def _ways(model: nn.Module, layers: set[nn.Module]) -> tuple[_Place, ...]:
    """Every place that leads to a layer by its first name, each once."""
    names = [name for name, module in model.named_modules() if module in layers]
    places: dict[tuple[str, ...], _Place] = {}
    for name in names:
        holder, parts = model, name.split(".") if name else []
        for depth, part in enumerate(parts, start=1):
            held = holder.get_submodule(part)
            places[tuple(parts[:depth])] = holder, part, held
            holder = held
    return tuple(places.values())


class OneBlasThread:
    """A context that the first to enter sets up, and the last to leave takes down.

    The limit holds for the whole process. Were everyone to set and restore it for himself, who leaves first would lift
    it for the others, and who leaves last would restore what he found: one thread, for good.

    The channel orders are learned with many small matrix products: further threads gain little, and where other
    processes hold their cores they wait.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._limits: threadpool_limits | None = None

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._limits = threadpool_limits(limits=1, user_api="blas")
            self._inside += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0 and self._limits is not None:
                self._limits.restore_original_limits()


ONE_BLAS_THREAD = OneBlasThread()


logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class LayerState:
    """Channel orders, kept norms and level of one layer at the end of an epoch."""

    out_perm: IntArray
    in_perm: IntArray
    cost: float
    kept_norm: tuple[float, ...]
    group_level: int


def check_values(layers: Iterable[SelectedLayer]) -> None:
    """Raise a `ValueError` where a weight is on the meta device: there is nothing to learn from."""
    for layer in layers:
        if layer.weight.is_meta:
            raise ValueError(
                f"layer {layer.name!r} is on the meta device, where weights have no values; call "
                "model.to_empty(device=...) and load the weights first"
            )


def learned_states(
    layers: Sequence[SelectedLayer],
    config: SparsifyConfig,
    previous: Sequence[LayerState] | None,
    executor: Executor | None = None,
) -> list[LayerState]:
    """Learn or refresh the channel orders of all layers from their present weights, then read off the levels.

    With an executor the layers are solved by its workers, side by side; the outcome is the same.
    """
    starts = previous if previous is not None else [None] * len(layers)
    problems = (_problem(layer, config, start) for layer, start in zip(layers, starts, strict=True))
    solutions = _solved_here(problems) if executor is None else _solved_by_workers(list(problems), executor)
    return [
        LayerState(learned.out_perm, learned.in_perm, learned.cost, kept_norm, _level(layer, kept_norm, config))
        for layer, (learned, kept_norm) in zip(layers, solutions, strict=True)
    ]


@dataclass(frozen=True, eq=False)
class _Problem:
    """What a worker needs to know about a layer."""

    name: str
    importance: FloatArray
    method: Method
    decay: float
    largest_level: int
    start: tuple[IntArray, IntArray] | None
    seed: int


_Solution = tuple[Connectivity, tuple[float, ...]]


def _problem(layer: SelectedLayer, config: SparsifyConfig, start: LayerState | None) -> _Problem:
    try:
        importance = importance_matrix(layer.weight, config.norm)
    except ValueError as error:
        raise ValueError(f"layer {layer.name!r}: {error}") from error
    orders = None if start is None else (start.out_perm, start.in_perm)
    return _Problem(layer.name, importance, config.method, config.decay, layer.largest_level, orders, config.seed)


def _solved(problem: _Problem) -> _Solution:
    try:
        learned = learn_permutations(
            problem.importance,
            problem.method,
            decay=problem.decay,
            max_group_level=problem.largest_level,
            start=problem.start,
            seed=problem.seed,
        )
    except ValueError as error:
        raise ValueError(f"layer {problem.name!r}: {error}") from error
    permuted = problem.importance[learned.out_perm][:, learned.in_perm]
    return learned, tuple(kept_norm_by_level(permuted).tolist())


def _solved_here(problems: Iterable[_Problem]) -> list[_Solution]:
    with ONE_BLAS_THREAD:
        return [_solved(problem) for problem in problems]


def _solved_by_workers(problems: Sequence[_Problem], executor: Executor) -> list[_Solution]:
    # The largest first: a long one that starts last keeps all others waiting.
    order = sorted(range(len(problems)), key=lambda index: -problems[index].importance.size)
    try:
        futures = {index: executor.submit(_solved, problems[index]) for index in order}
        return [futures[index].result() for index in range(len(problems))]
    except BrokenExecutor:
        logger.warning("a worker process died, for lack of memory maybe; the channel orders are learned without them")
        return _solved_here(problems)


def _level(layer: SelectedLayer, kept_norm: tuple[float, ...], config: SparsifyConfig) -> int:
    return layer_budget(layer, kept_norm).level_at(config.min_kept_norm)


def layer_budget(layer: SelectedLayer, kept_norm: tuple[float, ...], macs: int = 0) -> LayerBudget:
    """The layer as the threshold search sees it."""
    fixed = layer.fixed_level is not None
    return LayerBudget(
        layer.name,
        layer.weight.numel(),
        macs=macs,
        kept_norm=kept_norm,
        fixed_level=layer.fixed_level,
        largest_level=None if fixed else layer.largest_level,
    )


def penalty_strength(layer: SelectedLayer, state: LayerState, *, decay: float, lambda_value: float) -> FloatArray:
    """lambda * R_g in the original channel order, `(C_out, C_in)`, within the layer's largest level (Sec. 3.3)."""
    out_channels, in_channels = layer.weight_shape[:2]
    penalty = penalty_matrix(
        out_channels, in_channels, state.group_level, decay=decay, largest_level=layer.largest_level
    )
    return lambda_value * penalty[inverse(state.out_perm)][:, inverse(state.in_perm)]


def churn(layer: SelectedLayer, before: LayerState, after: LayerState) -> float:
    """Share of the channels that changed their group of the level after the present one."""
    groups = num_groups(min(after.group_level + 1, layer.largest_level))
    moved = [
        _group_of_channel(old, groups) != _group_of_channel(new, groups)
        for old, new in ((before.out_perm, after.out_perm), (before.in_perm, after.in_perm))
    ]
    return float(np.concatenate(moved).mean())


def _group_of_channel(perm: IntArray, groups: int) -> IntArray:
    return inverse(perm) * groups // len(perm)
