"""Which layers share channel orders, by the order policy of the options, and the orders of layers that do."""

import logging
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
from threadpoolctl import threadpool_limits
from torch import nn

from strucspars.channels.sharing import (
    ChannelClass,
    NetworkChannels,
    OrderSharing,
    UntraceableNetwork,
    network_channels,
)
from strucspars.core.checks import FloatArray, IntArray
from strucspars.core.hierarchy import group_penalty, num_groups
from strucspars.core.plan import LayerPlan
from strucspars.core.shared_orders import (
    LayerBetweenOrders,
    NetworkOrders,
    OrdersInPieces,
    joined_order,
    learn_shared_orders,
)
from strucspars.cost.counting import ExampleInputs
from strucspars.nn.groupable import SelectedLayer, Selection
from strucspars.sparsify.config import SparsifyConfig
from strucspars.sparsify.extensions import DEFAULT_ORDERS, ORDERS, LayerToOrder, Orders, Solve

logger = logging.getLogger(__name__)

# Further halvings cost next to nothing in the sum, and would cost most of the time.
MOST_SHARED_HALVINGS = 5


def with_network_orders(
    selection: Selection, model: nn.Module, config: SparsifyConfig, example_inputs: ExampleInputs | None
) -> Selection:
    """The selection with the orders that its layers share; without any where every layer has its own.

    A network that cannot be traced has none, and a warning says so.
    """
    if config.has_free_orders:
        return selection
    if example_inputs is None:
        raise ValueError(
            f"orders={config.orders!r} and pieces={config.pieces} need example_inputs, to see which layers read the "
            f"same channels; give a batch of images, or set orders={DEFAULT_ORDERS!r} and pieces=1"
        )
    try:
        channels = network_channels(model, example_inputs)
    except UntraceableNetwork as error:
        logger.warning(
            "every layer keeps channel orders of its own, and the shuffles between them remain as copies: %s", error
        )
        return selection
    return replace(selection, orders=network_orders(channels, selection.layers, config))


def own_sides(
    channels: NetworkChannels, layers: Sequence[SelectedLayer], config: SparsifyConfig
) -> Iterator[tuple[ChannelClass, tuple[str, ...]]]:
    """The classes of channels on which layers have orders of their own, with a name for each such side."""
    sides = {} if config.has_free_orders else network_orders(channels, layers, config).sides
    names = {layer.name for layer in layers}
    for found in channels.classes.values():
        own = [
            name
            for place, users in enumerate((found.writers, found.readers))
            for name in users
            if name in names and (name not in sides or found.name not in sides[name][place])
        ]
        yield found, tuple(own)


def network_orders(channels: NetworkChannels, layers: Sequence[SelectedLayer], config: SparsifyConfig) -> NetworkOrders:
    """The orders that the policy of the options gives the sides of layers."""
    sharing = ORDERS.find(config.orders)(channels)
    for name in (*sharing.shared, *sharing.pieces):
        if name not in channels.classes:
            raise ValueError(f"orders {config.orders!r}: the network has no class of channels {name!r}")
    kept = {name for name, found in channels.classes.items() if name in sharing.shared or found.is_fixed}
    sides: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {}
    widths: dict[str, int] = {}
    own: dict[str, list[str]] = defaultdict(list)
    for layer in layers:
        known = channels.sides.get(layer.name)
        names = []
        for place, side in enumerate(("outputs", "inputs")):
            classes: tuple[str, ...] = () if known is None else getattr(known, side)
            if not classes or not kept.issuperset(classes):
                own_order = f"{layer.name}:{side}"
                widths[own_order] = layer.weight_shape[place]
                if len(classes) == 1:
                    own[classes[0]].append(own_order)
                classes = (own_order,)
            names.append(classes)
        sides[layer.name] = (names[0], names[1])
    used = {name for outs, ins in sides.values() for name in (*outs, *ins)}
    widths |= {name: found.width for name, found in channels.classes.items() if name in used}
    return NetworkOrders(
        sides=sides,
        widths=widths,
        in_pieces=tuple(_in_pieces(own, sharing, channels, config)),
        fixed=frozenset(name for name in used if name in channels.classes and channels.classes[name].is_fixed),
    )


def _in_pieces(
    own: Mapping[str, Sequence[str]], sharing: OrderSharing, channels: NetworkChannels, config: SparsifyConfig
) -> Iterator[OrdersInPieces]:
    """The classes that are not shared, where several layers have an order of their own."""
    for name, orders in own.items():
        piece, width = sharing.pieces.get(name, config.pieces), channels.classes[name].width
        if len(orders) == 1 or piece == 1:
            continue
        if piece < 1 or width % piece:
            raise ValueError(
                f"pieces={piece} does not divide the {width} channels that layer {name!r} writes; choose a divisor, or "
                "an order policy that shares their order"
            )
        yield OrdersInPieces(names=tuple(orders), piece=piece)


Penalty = Callable[[LayerToOrder], FloatArray]


def hierarchy_penalty(config: SparsifyConfig) -> Penalty:
    """R between groups, for orders that are to serve several levels."""
    return lambda layer: group_penalty(min(layer.level - 1, MOST_SHARED_HALVINGS), decay=config.decay)


def level_penalty(layer: LayerToOrder) -> FloatArray:
    """What lies outside the groups of the level, for orders that are to serve this level alone."""
    return 1 - np.eye(num_groups(layer.level))


def orders_of(
    layers: Sequence[LayerToOrder],
    network: NetworkOrders | None,
    config: SparsifyConfig,
    *,
    solve: Solve,
    penalty: Penalty,
) -> list[Orders]:
    """Orders that serve the level of each layer: by `solve` for those that share none, of the others together."""
    if network is None:
        return list(solve(layers))
    tied = {name for family in network.in_pieces for name in family.names} | network.fixed
    # The order of a side of several parts must not mix them, also where no other layer orders the parts.
    tied |= {name for sides in network.sides.values() for side in sides if len(side) > 1 for name in side}
    tied |= {name for name, count in network.uses().items() if count > 1}
    together = [layer for layer in layers if not tied.isdisjoint(network.names(layer.name))]
    alone = [layer for layer in layers if tied.isdisjoint(network.names(layer.name))]
    found = _orders_together(together, network, config, penalty) if together else {}
    found |= zip((layer.name for layer in alone), solve(alone), strict=True)
    return [found[layer.name] for layer in layers]


def _orders_together(
    layers: Sequence[LayerToOrder], network: NetworkOrders, config: SparsifyConfig, penalty: Penalty
) -> dict[str, Orders]:
    between = [
        LayerBetweenOrders(importance=layer.importance, penalty=penalty(layer), out_orders=outs, in_orders=ins)
        for layer, (outs, ins) in zip(layers, (network.sides[layer.name] for layer in layers), strict=True)
    ]
    names = {name for layer in layers for name in network.names(layer.name)}
    start: dict[str, IntArray] | None = {}
    for layer in layers:
        start = None if start is None or layer.start is None else start | network.split(layer.name, layer.start)
    with one_blas_thread():
        learned = learn_shared_orders(
            between,
            {name: width for name, width in network.widths.items() if name in names},
            in_pieces=[family for family in network.in_pieces if names.issuperset(family.names)],
            fixed=network.fixed & names,
            start=start,
            anneal=config.method == "fast",
            seed=config.seed,
        )
    return {
        layer.name: (joined_order(outs, learned.orders), joined_order(ins, learned.orders))
        for layer, (outs, ins) in zip(layers, (network.sides[layer.name] for layer in layers), strict=True)
    }


def planned_layers(
    layers: Sequence[SelectedLayer],
    levels: Mapping[str, int],
    orders: Sequence[Orders],
    network: NetworkOrders | None,
) -> tuple[dict[str, LayerPlan], dict[str, tuple[int, ...]]]:
    """The plan of every layer, and the orders that several of them share, by name."""
    planned: dict[str, LayerPlan] = {}
    shared: dict[str, tuple[int, ...]] = {}
    uses = Counter[str]() if network is None else network.uses()
    for layer, (out_perm, in_perm) in zip(layers, orders, strict=True):
        names: list[tuple[str, ...]] = [(), ()]
        if network is not None:
            names = [side if any(uses[name] > 1 for name in side) else () for side in network.sides[layer.name]]
            split = network.split(layer.name, (out_perm, in_perm))
            shared |= {name: tuple(split[name].tolist()) for side in names for name in side}
        planned[layer.name] = LayerPlan(
            group_level=levels[layer.name],
            out_perm=out_perm,
            in_perm=in_perm,
            weight_shape=layer.weight_shape,
            out_orders=names[0],
            in_orders=names[1],
            pieces=1 if network is None else network.pieces(layer.name),
        )
    return planned, shared


_BLAS_LOCK = threading.Lock()
_BLAS_LIMITS: list[threadpool_limits] = []


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """A process-wide limit to one BLAS thread: the first user sets it, the last restores what was before.

    The channel orders are learned with many small matrix products: further threads gain little, and where other
    processes hold their cores they wait.
    """
    with _BLAS_LOCK:
        _BLAS_LIMITS.append(_BLAS_LIMITS[0] if _BLAS_LIMITS else threadpool_limits(limits=1, user_api="blas"))
    try:
        yield
    finally:
        with _BLAS_LOCK:
            limits = _BLAS_LIMITS.pop()
            if not _BLAS_LIMITS:
                limits.restore_original_limits()
