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

from strucspars.core.checks import FloatArray, IntArray
from strucspars.core.hierarchy import group_penalty, num_groups, penalty_matrix
from strucspars.core.importance import kept_norm_by_level, level_keeping
from strucspars.core.learning import learn_permutations, refine_at_level
from strucspars.core.permutation import checked_permutation, connection_cost, inverse
from strucspars.nn.groupable import SelectedLayer
from strucspars.nn.names import bare_modules
from strucspars.sparsify.config import SparsifyConfig
from strucspars.sparsify.extensions import ORDERS, LayerToOrder, Orders, Solve, importance_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class LayerState:
    """Channel orders, kept norms and level of one layer at the end of an epoch."""

    out_perm: IntArray
    in_perm: IntArray
    cost: float
    kept_norm: tuple[float, ...]
    group_level: int

    @property
    def orders(self) -> Orders:
        """Both orders, `(out_perm, in_perm)`."""
        return self.out_perm, self.in_perm


class OneBlasThread:
    """A process-wide limit to one BLAS thread: the first user sets it, the last restores what was before.

    The channel orders are learned with many small matrix products: further threads gain little, and where other
    processes hold their cores they wait.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._limits: threadpool_limits | None = None

    def __enter__(self) -> None:
        with self._lock:
            if self._users == 0:
                self._limits = threadpool_limits(limits=1, user_api="blas")
            self._users += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0 and self._limits is not None:
                self._limits.restore_original_limits()


ONE_BLAS_THREAD = OneBlasThread()


def check_still_in_model(model: nn.Module, layers: Iterable[SelectedLayer]) -> None:
    """Raise a `ValueError` that names a layer which the model no longer has where it was selected.

    A wrapper may have come between, such as `torch.compile`: then the layer is still the same.
    """
    present = dict(bare_modules(model, remove_duplicate=False))
    for layer in layers:
        if layer.module not in _nearest(layer.name, present).modules():
            raise ValueError(
                f"layer {layer.name!r} has been replaced in the model or removed from it, and the Sparsifier would go "
                "on with the old module; make a new Sparsifier"
            )


def _nearest(name: str, present: Mapping[str, nn.Module]) -> nn.Module:
    """The module of this name, or of the longest part of it that exists."""
    while name not in present:
        name = name.rpartition(".")[0]
    return present[name]


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

    With an executor its workers solve the layers in parallel; the outcome is the same.
    """
    starts = [None] * len(layers) if previous is None else [state.orders for state in previous]
    problems = [
        LayerToOrder(layer.name, importance_of(layer, config.importance), start, layer.largest_level)
        for layer, start in zip(layers, starts, strict=True)
    ]

    def solve(chosen: Sequence[LayerToOrder]) -> list[Orders]:
        return _learned_by_workers(chosen, config, executor) if executor is not None else _learned_here(chosen, config)

    return [
        _state(layer, problem.importance, orders, config)
        for layer, problem, orders in zip(layers, problems, orders_of(problems, config, solve), strict=True)
    ]


def orders_of(layers: Sequence[LayerToOrder], config: SparsifyConfig, solve: Solve) -> list[Orders]:
    """The orders that the policy of the options gives the layers, checked."""
    found = list(ORDERS.find(config.orders)(layers, solve))
    if len(found) != len(layers):
        raise ValueError(f"orders {config.orders!r} returned orders of {len(found)} layers, expected {len(layers)}")
    checked = []
    for layer, (out_perm, in_perm) in zip(layers, found, strict=True):
        where = f"layer {layer.name!r}: orders {config.orders!r}: "
        out_channels, in_channels = layer.importance.shape
        checked.append(
            (
                checked_permutation(out_perm, out_channels, name=f"{where}out_perm"),
                checked_permutation(in_perm, in_channels, name=f"{where}in_perm"),
            )
        )
    return checked


def refined_orders(layers: Sequence[LayerToOrder]) -> list[Orders]:
    """The best orders found for the level of each layer, from the orders it has."""
    refined: list[Orders] = []
    with ONE_BLAS_THREAD:
        for layer in layers:
            assert layer.start is not None, "refined after they are learned"
            found = refine_at_level(layer.importance, layer.start, group_level=layer.level)
            refined.append((found.out_perm, found.in_perm))
    return refined


def _learned_here(layers: Sequence[LayerToOrder], config: SparsifyConfig) -> list[Orders]:
    with ONE_BLAS_THREAD:
        return [_learned(layer, config) for layer in layers]


def _learned_by_workers(layers: Sequence[LayerToOrder], config: SparsifyConfig, executor: Executor) -> list[Orders]:
    # The largest first: a long one that starts last keeps all others waiting.
    order = sorted(range(len(layers)), key=lambda index: -layers[index].importance.size)
    try:
        futures = {index: executor.submit(_learned, layers[index], config) for index in order}
        return [futures[index].result() for index in range(len(layers))]
    except BrokenExecutor:
        logger.warning(
            "a worker process died, perhaps for lack of memory; the channel orders are learned in this process"
        )
        return _learned_here(layers, config)


def _learned(layer: LayerToOrder, config: SparsifyConfig) -> Orders:
    learned = learn_permutations(
        layer.importance,
        config.method,
        decay=config.decay,
        max_group_level=layer.level,
        start=layer.start,
        seed=config.seed,
    )
    return learned.out_perm, learned.in_perm


def _state(layer: SelectedLayer, importance: FloatArray, orders: Orders, config: SparsifyConfig) -> LayerState:
    out_perm, in_perm = orders
    penalty = group_penalty(layer.largest_level - 1, decay=config.decay)
    cost = connection_cost(importance, penalty, out_perm, in_perm)
    kept_norm = tuple(kept_norm_by_level(importance[out_perm][:, in_perm]).tolist())
    level = layer.fixed_level
    if level is None:
        level = min(level_keeping(kept_norm, config.min_kept_norm), layer.largest_level)
    return LayerState(out_perm, in_perm, cost, kept_norm, level)


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
        for old, new in zip(before.orders, after.orders, strict=True)
    ]
    return float(np.concatenate(moved).mean())


def _group_of_channel(perm: IntArray, groups: int) -> IntArray:
    return inverse(perm) * groups // len(perm)
