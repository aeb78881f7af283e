"""What can be exchanged without an edit here: importances, budgets and order policies, by registered name.

Options name them. `package.module:function` names one that is not registered.
"""

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from torch import nn

from strucspars.channels.sharing import NetworkChannels, OrderSharing, one_shuffle, share_streams
from strucspars.core.budget import Shuffle
from strucspars.core.checks import FloatArray, IntArray
from strucspars.core.hierarchy import num_groups
from strucspars.core.importance import Norm, checked_importance
from strucspars.core.registry import Registry
from strucspars.cost.latency import LatencyTable
from strucspars.nn.batch_norms import is_batch_norm
from strucspars.nn.groupable import SelectedLayer
from strucspars.nn.importance import importance_matrix

# What an importance may read of calibration images.
Need = Literal["inputs", "gradients"]
# Of the weights alone, as in the paper. Planning with calibration images replaces it: it knows what the inputs are.
DEFAULT_IMPORTANCE = "l1"
ImportanceFunction = Callable[[SelectedLayer], FloatArray]


@dataclass(frozen=True, kw_only=True)
class ClassMembers:
    """The modules that see a class of channels, each with the places of these channels among its outputs.

    Attributes:
        name, width: of the class, and its number of channels.
        writers: the layers whose outputs they are.
        norms: norms and depthwise convolutions that the channels pass.
    """

    name: str
    width: int
    writers: Sequence[tuple[SelectedLayer, slice]]
    norms: Sequence[tuple[nn.Module, slice]]


ChannelScores = Callable[[ClassMembers], FloatArray | None]


@dataclass(frozen=True)
class Importance:
    """How much each connection of a layer matters, S of Sec. 3.2, as `register_importance` describes it."""

    function: ImportanceFunction
    penalty: Norm = "l1"
    needs: frozenset[Need] = frozenset()
    channel_scores: ChannelScores | None = None


def _by_activation(layer: SelectedLayer) -> FloatArray:
    """Weight norm times the root mean square of the input channel."""
    assert layer.input_second_moment is not None
    return importance_matrix(layer.weight, "l2") * np.sqrt(layer.input_second_moment)


def _by_fisher(layer: SelectedLayer) -> FloatArray:
    """By how much the divergence of the predictions grows without the connection: the diagonal of the Fisher matrix."""
    assert layer.squared_gradient is not None
    squares = layer.weight.detach().double().square().cpu().numpy() * layer.squared_gradient
    return np.asarray(squares.reshape(*squares.shape[:2], -1).sum(2)) / 2


def _by_batch_norm(members: ClassMembers) -> FloatArray | None:
    """The absolute scales of the batch norms that a channel passes (Network Slimming, Liu et al., 2017)."""
    scales = [
        module.get_parameter("weight").detach()[place].abs().double().cpu().numpy()
        for module, place in members.norms
        if is_batch_norm(module) and module._parameters.get("weight") is not None
    ]
    return np.asarray(np.sum(scales, axis=0)) if scales else None


IMPORTANCES: Registry[Importance | ImportanceFunction] = Registry(
    "importance",
    {
        DEFAULT_IMPORTANCE: Importance(lambda layer: importance_matrix(layer.weight, "l1")),
        "l2": Importance(lambda layer: importance_matrix(layer.weight, "l2"), penalty="l2"),
        "activation": Importance(_by_activation, penalty="l2", needs=frozenset({"inputs"})),
        "fisher": Importance(_by_fisher, penalty="l2", needs=frozenset({"gradients"})),
        "batch-norm": Importance(lambda layer: importance_matrix(layer.weight, "l1"), channel_scores=_by_batch_norm),
    },
)


def register_importance(
    name: str,
    function: ImportanceFunction,
    *,
    penalty: Norm = "l1",
    needs: Collection[Need] = (),
    channel_scores: ChannelScores | None = None,
) -> None:
    """Make an importance available as `SparsifyConfig(importance=name)`, in recipes and on the command line.

    Args:
        name: how options call it.
        function: `function(layer) -> S`, a non-negative array `(C_out, C_in)`; the layer has `name`, `module` and
            `weight`. With `narrow` it is asked about all convolutions and linear layers of one group.
        penalty: the norm of the kernels that sparse training shrinks.
        needs: what it reads of calibration images: with `"inputs"` the layer has `input_second_moment`, with
            `"gradients"` it has `gradient` and `squared_gradient`. Such an importance works where images are given, as
            `calibration=` of `one_shot_plan`, `compress` and `Sparsifier`; the latter then penalises connections the
            less, the more they matter.
        channel_scores: `channel_scores(members)` returns how much each channel of a class matters, not negative, or
            None where it cannot tell; those stay. Without it, these are the sums of the writers' S over the inputs.

    >>> import strucspars as ss
    >>> ss.register_importance("largest", lambda layer: layer.weight.detach().abs().amax((2, 3)).numpy())
    >>> model = nn.Sequential(nn.Conv2d(4, 8, 3, bias=False))
    >>> ss.one_shot_plan(model, ss.SparsifyConfig(target=0.5, importance="largest")).removed_param_fraction
    0.5
    """
    if unknown := set(needs) - set(get_args(Need)):
        raise ValueError(f"importance {name!r}: needs may hold {', '.join(get_args(Need))}; got {sorted(unknown)}")
    IMPORTANCES.register(name, Importance(function, penalty, frozenset(needs), channel_scores))


def find_importance(name: str) -> Importance:
    """The importance of this name."""
    found = IMPORTANCES.find(name)
    return found if isinstance(found, Importance) else Importance(found)


def importance_of(layer: SelectedLayer, name: str) -> FloatArray:
    """The importance matrix of a layer, checked; errors name the layer."""
    importance = find_importance(name)
    if ("inputs" in importance.needs and layer.input_second_moment is None) or (
        "gradients" in importance.needs and layer.squared_gradient is None
    ):
        raise ValueError(
            f"layer {layer.name!r}: importance {name!r} needs calibration images; give calibration=batches "
            "(sparsify.calibration in a recipe), exclude the layer if they do not reach it, or name an importance of "
            "the weights alone"
        )
    try:
        matrix = checked_importance(importance.function(layer), name=f"importance {name!r}")
    except ValueError as error:
        raise ValueError(f"layer {layer.name!r}: {error}") from error
    if matrix.shape != layer.weight_shape[:2]:
        raise ValueError(
            f"layer {layer.name!r}: importance {name!r} must have shape {layer.weight_shape[:2]}, got {matrix.shape}"
        )
    return matrix


@dataclass(frozen=True)
class WholeNetwork:
    """Parameters and multiply-accumulates of the whole network, MACs only where an input was given.

    `latency` has the times of its layers where the budget asks for them.
    """

    params: int
    macs: int | None
    layer_macs: Mapping[nn.Module, int]
    latency: LatencyTable | None = None


@dataclass(frozen=True)
class CountedLayer:
    """A layer as a budget sees it.

    Attributes:
        name, module: the layer.
        weight_params: parameters of its weight.
        macs: its multiply-accumulates; None where no input was given to count them with.
        num_levels: how many group levels it can have; 1 for a layer that is not grouped.
        ms_by_level: milliseconds at these levels; None unless they are measured.
    """

    name: str
    module: nn.Module
    weight_params: int
    macs: int | None
    num_levels: int
    ms_by_level: Sequence[float] | None = None


CostFunction = Callable[[CountedLayer, Sequence[CountedLayer]], Sequence[float]]


@dataclass(frozen=True)
class Budget:
    """What a target is a fraction of, as `register_budget` describes it.

    `shuffles` gives the costs of copies of channels between layers.
    """

    cost_by_level: CostFunction
    whole: Callable[[WholeNetwork], float] | None = None
    shuffles: Callable[[WholeNetwork], Sequence[Shuffle]] = lambda size: ()


def _divided(cost: float, num_levels: int) -> list[float]:
    return [cost / num_groups(level) for level in range(1, num_levels + 1)]


def _all_macs(size: WholeNetwork) -> float:
    if size.macs is None:
        raise ValueError("budget='macs' needs example_inputs to count the multiply-accumulates with")
    return size.macs


def _measured(size: WholeNetwork) -> LatencyTable:
    assert size.latency is not None, "measured before the network is planned"
    return size.latency


def _never_rising(layer: CountedLayer, neighbours: Sequence[CountedLayer]) -> Sequence[float]:
    """A level that takes longer than a lower one counts as that one: it can only be a worse choice."""
    return list(itertools.accumulate(layer.ms_by_level or [0.0] * layer.num_levels, min))


LATENCY_BUDGET = "latency"
PARAMS = Budget(lambda layer, _: _divided(layer.weight_params, layer.num_levels), whole=lambda size: size.params)
MACS = Budget(lambda layer, _: _divided(layer.macs or 0, layer.num_levels), whole=_all_macs)
LATENCY = Budget(
    _never_rising, whole=lambda size: _measured(size).dense_ms, shuffles=lambda size: _measured(size).shuffles
)
BUDGETS: Registry[Budget | CostFunction] = Registry("budget", {"params": PARAMS, "macs": MACS, LATENCY_BUDGET: LATENCY})


def register_budget(
    name: str, cost_by_level: CostFunction, *, whole: Callable[[WholeNetwork], float] | None = None
) -> None:
    """Make a budget available as `SparsifyConfig(budget=name)`, in recipes and on the command line.

    Args:
        name: how options call it.
        cost_by_level: `cost_by_level(layer, neighbours)` returns the layer's cost at the group levels 1, 2, ...,
            `layer.num_levels` numbers that never rise. The neighbours are the layers before and after it in the order
            of the network.
        whole: cost of the whole dense network, of which the target is a fraction, from its `WholeNetwork`; None adds up
            all convolutions and linear layers.

    >>> import strucspars as ss
    >>> def square_root_of_params(layer, neighbours):
    ...     return [(layer.weight_params / 2**halvings) ** 0.5 for halvings in range(layer.num_levels)]
    >>> ss.register_budget("root", square_root_of_params)
    >>> model = nn.Sequential(nn.Conv2d(4, 8, 3, bias=False))
    >>> ss.one_shot_plan(model, ss.SparsifyConfig(target=0.5, budget="root")).layers["0"].num_groups
    4
    """
    BUDGETS.register(name, Budget(cost_by_level, whole))


def find_budget(name: str) -> Budget:
    """The budget of this name."""
    found = BUDGETS.find(name)
    return found if isinstance(found, Budget) else Budget(found)


Orders = tuple[IntArray, IntArray]


@dataclass(frozen=True, eq=False)
class LayerToOrder:
    """A layer whose channels are to be ordered.

    Attributes:
        name: of the layer.
        importance: S, `(C_out, C_in)`.
        start: the orders it has so far, `(out_perm, in_perm)`; None at the beginning.
        level: the deepest group level that the orders have to serve.
    """

    name: str
    importance: FloatArray
    start: Orders | None
    level: int


Solve = Callable[[Sequence[LayerToOrder]], Sequence[Orders]]
OrderPolicy = Callable[[NetworkChannels], OrderSharing]

DEFAULT_ORDERS = "free"
ORDERS: Registry[OrderPolicy] = Registry(
    "orders",
    {
        DEFAULT_ORDERS: lambda channels: OrderSharing(frozenset()),
        "shared": share_streams,
        "one-shuffle": one_shuffle,
    },
)


def register_orders(name: str, policy: OrderPolicy) -> None:
    """Make an order policy available as `SparsifyConfig(orders=name)`, in recipes and on the command line.

    Args:
        name: how options call it.
        policy: `policy(channels)` returns an `OrderSharing`: the names of the classes of channels that have one order
            for all their layers, and in pieces of how many channels the orders of others differ. The channels have
            `classes`, by name with their writers, readers, width and bytes, and the `sides` of every layer.

    >>> import torch
    >>> import strucspars as ss
    >>> from strucspars.channels import OrderSharing
    >>> ss.register_orders("one-order", lambda channels: OrderSharing(frozenset(channels.classes)))
    >>> model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.ReLU(), nn.Conv2d(8, 4, 1))
    >>> config = ss.SparsifyConfig(target=0.4, orders="one-order")
    >>> plan = ss.one_shot_plan(model, config, example_inputs=torch.zeros(1, 4, 8, 8))
    >>> (plan.layers["0"].out_perm == plan.layers["2"].in_perm).all()
    np.True_
    """
    ORDERS.register(name, policy)
