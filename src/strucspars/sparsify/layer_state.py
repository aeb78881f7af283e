"""What is known about a layer during sparse training, and how an epoch changes it (Algorithm 1)."""

import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import BrokenExecutor, Executor
from dataclasses import dataclass

import numpy as np

from strucspars.core.arrays import FloatArray, IntArray
from strucspars.core.budget import LayerBudget
from strucspars.core.connectivity import Connectivity
from strucspars.core.criterion import kept_norm_by_level
from strucspars.core.hierarchy import num_groups, penalty_matrix
from strucspars.core.learning import Method, learn_permutations
from strucspars.core.permutation import inverse
from strucspars.nn.importance import importance_matrix
from strucspars.nn.selection import SelectedLayer
from strucspars.sparsify.config import SparsifyConfig
from strucspars.sparsify.one_blas_thread import ONE_BLAS_THREAD

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
