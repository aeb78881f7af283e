"""Channel orders that several layers share: the problem of Sec. 3.2 for a whole network, with shared variables.

Layers that look at one tensor can agree on the order of its channels; then no shuffle is left there. The sum of
S' (x) R over all layers, each S divided by its sum, is minimised over the orders, some of which several layers use.
Given all others, the best value of one order is still an exact transport problem, its cost summed over the layers that
use it. So the alternation becomes a coordinate descent over the orders, after an annealed start of the whole network.

Differs from the paper, where every layer has two orders of its own; see `docs/decisions/0022-shared-orders.md`.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from strucspars.core.checks import FloatArray, IntArray
from strucspars.core.permutation import connection_cost, inverse
from strucspars.core.transport import assign_by_group_cycles, saves

Orders = Mapping[str, IntArray]


@dataclass(frozen=True, eq=False, kw_only=True)
class LayerBetweenOrders:
    """A layer and the names of the orders of its channels.

    Attributes:
        importance: S, `(C_out, C_in)`.
        penalty: R between groups, symmetric `(G, G)`; G divides both widths.
        out_orders: of the output channels: one name, or several for parts that follow each other, as concatenated.
        in_orders: of the input channels, likewise.
    """

    importance: FloatArray
    penalty: FloatArray
    out_orders: tuple[str, ...]
    in_orders: tuple[str, ...]

    def side(self, side: int) -> tuple[str, ...]:
        """The orders of the output channels (0) or of the input channels (1)."""
        return (self.out_orders, self.in_orders)[side]


@dataclass(frozen=True, kw_only=True)
class OrdersInPieces:
    """Orders of the same channels that differ by whole pieces of so many consecutive channels."""

    names: tuple[str, ...]
    piece: int = 1


@dataclass(frozen=True, kw_only=True)
class NetworkOrders:
    """Which orders the channels of a network's layers have; several sides of layers may name the same one.

    Attributes:
        sides: layer name to the names of the orders of its output and its input channels, several of a side where its
            channels consist of parts.
        widths: number of channels of every order.
        in_pieces: orders that may differ by whole pieces only.
        fixed: orders that stay natural.
    """

    sides: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]]
    widths: Mapping[str, int]
    in_pieces: tuple[OrdersInPieces, ...] = ()
    fixed: frozenset[str] = frozenset()

    def split(self, layer: str, perms: tuple[IntArray, IntArray]) -> dict[str, IntArray]:
        """The orders of a layer's sides by name, from those of all its output and input channels."""
        orders = {}
        for names, perm in zip(self.sides[layer], perms, strict=True):
            start = 0
            for name in names:
                orders[name] = perm[start : start + self.widths[name]] - start
                start += self.widths[name]
        return orders

    def names(self, layer: str) -> set[str]:
        """The orders of both sides of a layer."""
        return {name for side in self.sides[layer] for name in side}

    def uses(self) -> Counter[str]:
        """How many sides of layers have each order."""
        return Counter(name for sides in self.sides.values() for names in sides for name in names)

    def pieces(self, layer: str) -> int:
        """The smallest number of channels in which a layer's orders may differ from those of its neighbours."""
        names = self.names(layer)
        return min((family.piece for family in self.in_pieces if names.intersection(family.names)), default=1)


@dataclass(frozen=True, eq=False)
class SharedOrders:
    """Learned orders by name, `perm[new] = old`, and the mean over the layers of `sum(S' * R) / sum(S)`."""

    orders: Orders
    cost: float
    converged: bool


def joined_order(names: Sequence[str], orders: Orders) -> IntArray:
    """The order of channels that consist of several parts, one behind the other.

    >>> joined_order(["a", "b"], {"a": np.array([1, 0]), "b": np.array([0, 2, 1])})
    array([1, 0, 2, 4, 3])
    """
    starts = itertools.accumulate((len(orders[name]) for name in names[:-1]), initial=0)
    return np.concatenate([orders[name] + start for name, start in zip(names, starts, strict=True)])


def learn_shared_orders(
    layers: Sequence[LayerBetweenOrders],
    widths: Mapping[str, int],
    *,
    in_pieces: Sequence[OrdersInPieces] = (),
    fixed: frozenset[str] = frozenset(),
    start: Orders | None = None,
    anneal: bool = True,
    seed: int = 0,
) -> SharedOrders:
    """Minimise the layers' `sum(S[P][:, Q] * R) / sum(S)` over all orders that they name.

    A local search: never worse than its start, which is the identity unless given, and not always the global optimum.

    Args:
        layers: all layers whose orders are learned.
        widths: number of channels of every order.
        in_pieces: orders that may differ by whole pieces only; a start must be so too.
        fixed: orders that stay natural.
        start: an order for every name to improve on, without random starts. Channels then move only where that lowers
            the cost.
        anneal: without a start, begin with annealed ones. False begins with the identity, as the paper does.
        seed: decides the annealed starts.

    >>> importances = np.random.default_rng(0).random((2, 8, 8))
    >>> chain = [
    ...     LayerBetweenOrders(importance=S, penalty=1 - np.eye(2), out_orders=(out,), in_orders=(source,))
    ...     for S, out, source in zip(importances, "bc", "ab")
    ... ]
    >>> learned = learn_shared_orders(chain, {"a": 8, "b": 8, "c": 8})
    >>> learned.cost < 0.5, learned.converged
    (True, True)
    """
    network = _Network(layers, widths)
    together = {name for family in in_pieces for name in family.names}
    alone = [OrdersInPieces(names=(name,)) for name in network.uses if name not in together | fixed]
    families = [*alone, *in_pieces]
    if start is not None:
        return _Descent(network, families, start).outcome()
    identity = {name: np.arange(width) for name, width in widths.items()}
    starts = [identity]
    if anneal:
        annealing, generator = _Annealing(network, families), np.random.default_rng(seed)
        starts = [annealing.orders(generator) for _ in range(network.num_starts)]
    best = min((_Descent(network, families, each).outcome() for each in starts), key=lambda each: each.cost)
    identity_cost = network.cost(identity)
    return best if best.cost < identity_cost else SharedOrders(identity, identity_cost, converged=True)


@dataclass(frozen=True)
class _Use:
    """One side of a layer that an order belongs to; its channels begin at `offset` there."""

    layer: int
    side: int
    offset: int


@dataclass(frozen=True, eq=False)
class _Cells:
    """Positions of an order that are alike for all its users: the cell of each, and by user the group of each cell."""

    of_position: IntArray
    groups: tuple[IntArray, ...]


# A large network takes about a second per annealed start, and hardly gains from a second one.
MOST_STARTS, CONNECTIONS_OF_ONE_START = 8, 2_000_000
MOST_SWEEPS = 100


class _Network:
    """The layers, every S divided by its sum, and who uses which order."""

    def __init__(self, layers: Sequence[LayerBetweenOrders], widths: Mapping[str, int]) -> None:
        self.layers, self.widths = layers, widths
        self.scaled = [layer.importance / (layer.importance.sum() or 1.0) for layer in layers]
        uses: dict[str, list[_Use]] = defaultdict(list)
        for place, layer in enumerate(layers):
            for side in (0, 1):
                names = layer.side(side)
                offsets = itertools.accumulate((widths[name] for name in names[:-1]), initial=0)
                for name, offset in zip(names, offsets, strict=True):
                    uses[name].append(_Use(place, side, offset))
        self.uses = dict(uses)
        self.cells = {name: self.cells_of(name, self.uses[name]) for name in self.uses}
        connections = sum(importance.size for importance in self.scaled)
        self.num_starts = min(MOST_STARTS, 1 + CONNECTIONS_OF_ONE_START // max(1, connections))

    def cells_of(self, name: str, uses: Sequence[_Use], *, most_groups: int | None = None) -> _Cells:
        """The cells of an order between the boundaries of its users' groups, of at most so many groups."""
        positions = np.arange(self.widths[name])
        by_use = []
        for use in uses:
            layer = self.layers[use.layer]
            groups = min(len(layer.penalty), most_groups or len(layer.penalty))
            by_use.append((positions + use.offset) // (layer.importance.shape[use.side] // groups))
        begins = np.any([np.diff(groups, prepend=-1) != 0 for groups in by_use], axis=0)
        return _Cells(np.cumsum(begins) - 1, tuple(groups[begins] for groups in by_use))

    def cost(self, orders: Orders, places: Sequence[int] | None = None) -> float:
        """The mean cost of the layers, or the share that some of them have in it."""
        total = 0.0
        for place in range(len(self.layers)) if places is None else places:
            layer = self.layers[place]
            perms = (joined_order(layer.side(side), orders) for side in (0, 1))
            total += connection_cost(self.scaled[place], layer.penalty, *perms)
        return total / max(1, len(self.layers))

    def connections(self, use: _Use, width: int) -> FloatArray:
        """The importance of the connections of some channels of a layer's side: these channels are the rows."""
        matrix = self.scaled[use.layer] if use.side == 0 else self.scaled[use.layer].T
        return matrix[use.offset : use.offset + width]


class _Descent:
    """Coordinate descent: exact steps over the orders in turn. The cost never rises."""

    def __init__(self, network: _Network, families: Sequence[OrdersInPieces], start: Orders) -> None:
        self.network, self.families = network, families
        self.orders = dict(start)
        family_of = {name: place for place, family in enumerate(families) for name in family.names}
        self.neighbours: list[set[int]] = [set() for _ in families]
        for layer in network.layers:
            outs, ins = ({family_of[name] for name in layer.side(side) if name in family_of} for side in (0, 1))
            for place in outs:
                self.neighbours[place] |= ins
            for place in ins:
                self.neighbours[place] |= outs
        # By use, what its channels cost in the groups of its layer, and the order of the other side that this is for.
        self.known: dict[_Use, tuple[IntArray, FloatArray]] = {}

    def outcome(self) -> SharedOrders:
        """Descend until no step over any order can gain."""
        waiting = set(range(len(self.families)))
        for _ in range(MOST_SWEEPS):
            if not waiting:
                break
            for place in range(len(self.families)):
                if place in waiting:
                    waiting.discard(place)
                    if self._improve_(place):
                        waiting |= self.neighbours[place]
                        # After a step over pieces, one over their channels may gain again.
                        waiting |= {place} if len(self.families[place].names) > 1 else set()
        return SharedOrders(self.orders, self.network.cost(self.orders), converged=not waiting)

    def _improve_(self, place: int) -> bool:
        """Take the steps over one family that gain; returns whether there was one."""
        family, has_gained = self.families[place], False
        users = sorted({use.layer for name in family.names for use in self.network.uses[name]})
        # With the family on both sides of a layer the cost is not linear in it, and an exact step may lose.
        is_linear = place not in self.neighbours[place]
        for better in self._steps(family):
            trial = {**self.orders, **better}
            if is_linear or self.network.cost(trial, users) < self.network.cost(self.orders, users):
                self.orders, has_gained = trial, True
        return has_gained

    def _steps(self, family: OrdersInPieces) -> Iterator[dict[str, IntArray]]:
        """Exact steps over the orders of a family: exchange channels in all of them, then whole pieces in each."""
        first, cells = self.orders[family.names[0]], self.network.cells
        # The places of a channel in all orders of the family go together.
        places = [cells[name].of_position[inverse(self.orders[name])[first]] for name in family.names]
        kinds, kind_of_slot = np.unique(np.stack(places, axis=1), axis=0, return_inverse=True)
        cost = np.zeros((len(first), len(kinds)))
        for name, cell_of_kind in zip(family.names, kinds.T, strict=True):
            cost += self._placing_cost(name)[:, cell_of_kind]
        found = _exchanged(cost, kind_of_slot.ravel(), first)
        if found is not None:
            replaced = np.empty_like(first)
            replaced[first] = found
            yield {name: replaced[self.orders[name]] for name in family.names}
        for name in family.names if len(family.names) > 1 else ():
            pieces = self.orders[name].reshape(-1, family.piece)
            cell_of_position = cells[name].of_position.reshape(pieces.shape)
            patterns, kind_of_place = np.unique(cell_of_position, axis=0, return_inverse=True)
            cost = self._placing_cost(name)
            by_piece = np.stack([cost[pieces, pattern].sum(axis=1) for pattern in patterns], axis=1)
            moved = _exchanged(by_piece, kind_of_place.ravel(), np.arange(len(pieces)))
            if moved is not None:
                yield {name: pieces[moved].ravel()}

    def _placing_cost(self, name: str) -> FloatArray:
        """What each channel of an order costs in each of its cells while all other orders stay, `(width, cells)`."""
        cells = self.network.cells[name]
        cost = np.zeros((len(cells.of_position), cells.of_position[-1] + 1))
        for use, groups in zip(self.network.uses[name], cells.groups, strict=True):
            layer = self.network.layers[use.layer]
            other = joined_order(layer.side(1 - use.side), self.orders)
            known = self.known.get(use)
            # Along a residual stream most neighbours stay as they were.
            if known is None or not np.array_equal(known[0], other):
                penalty_of_other = np.empty((len(other), len(layer.penalty)))
                penalty_of_other[other] = layer.penalty.repeat(len(other) // len(layer.penalty), axis=0)
                known = self.known[use] = other, self.network.connections(use, len(cost)) @ penalty_of_other
            cost += known[1][:, groups]
        return cost


def _exchanged(cost: FloatArray, kind_of_slot: IntArray, present: IntArray) -> IntArray | None:
    """What is best put into each slot, `cost[thing, kind of slot]`; None if what is there is as good."""
    slots = np.argsort(kind_of_slot, kind="stable")
    rows = cost[present[slots]]
    order = assign_by_group_cycles(rows, np.bincount(kind_of_slot))
    if not saves(rows, order, kind_of_slot[slots]):
        return None
    found = np.empty_like(present)
    found[slots] = present[slots][order]
    return found


# Single precision halves the time of an annealed start, and is enough for it.
Float32Array = npt.NDArray[np.float32]

# The first halvings cost most. Finer groups are left to the descent, which also moves channels between these.
ANNEALED_GROUPS = 8
ANNEALING_STEPS, FIRST_BETA, LAST_BETA = 30, 0.5, 15.0
BALANCING_STEPS = 4


class _Annealing:
    """Mean-field annealing of the whole network: soft members of cells, random at first, that harden.

    The members of the cells of an order are the softmax of their placing costs times a rising beta, balanced to the
    sizes of the cells. Splits that cost most take shape first. Orders of one family are one meanwhile.
    """

    def __init__(self, network: _Network, families: Sequence[OrdersInPieces]) -> None:
        self.network = network
        self.scaled = [importance.astype(np.float32) for importance in network.scaled]
        self.root = {name: name for name in network.uses}
        self.root |= {name: family.names[0] for family in families for name in family.names}
        self.families = families
        self.free = [family.names[0] for family in families]
        self.uses: dict[str, list[_Use]] = defaultdict(list)
        for name, uses in network.uses.items():
            self.uses[self.root[name]] += uses
        self.cells = {
            root: network.cells_of(root, uses, most_groups=ANNEALED_GROUPS) for root, uses in self.uses.items()
        }
        self.penalties = [_first_halvings(layer.penalty) for layer in network.layers]
        # By use, the group of every cell, one-hot.
        self.groups: dict[_Use, Float32Array] = {
            use: np.eye(len(self.penalties[use.layer]), dtype=np.float32)[groups]
            for root, uses in self.uses.items()
            for use, groups in zip(uses, self.cells[root].groups, strict=True)
        }
        self.scales = {root: self._scale(root) for root in self.free}

    def orders(self, generator: np.random.Generator) -> dict[str, IntArray]:
        """The orders of one annealed start."""
        sizes = {root: np.bincount(cells.of_position).astype(np.float32) for root, cells in self.cells.items()}
        members = {root: np.eye(len(sizes[root]), dtype=np.float32)[self.cells[root].of_position] for root in sizes}
        for root in self.free:
            noise = generator.standard_normal(members[root].shape, dtype=np.float32)
            members[root] = _balanced(noise, sizes[root])
        for beta in np.geomspace(FIRST_BETA, LAST_BETA, ANNEALING_STEPS, dtype=np.float32):
            for root in self.free:
                cost = self._placing_cost(root, members)
                # What all channels, or all cells, have in common does not decide.
                cost -= cost.mean(axis=0)
                cost -= cost.mean(axis=1, keepdims=True)
                members[root] = _balanced(cost * (-beta / self.scales[root]), sizes[root])
        orders = {root: np.arange(len(members[root])) for root in members}
        for root in self.free:
            found = _exchanged(-members[root].astype(np.float64), self.cells[root].of_position, orders[root])
            orders[root] = orders[root] if found is None else found
        by_name = {name: orders[root].copy() for name, root in self.root.items()}
        return by_name | {name: order for family in self.families for name, order in _interleaved(family, by_name)}

    def _placing_cost(self, root: str, members: Mapping[str, Float32Array]) -> Float32Array:
        """What each channel costs in each cell, for soft members of all other cells."""
        cost = np.zeros_like(members[root])
        for use in self.uses[root]:
            rows = self.scaled[use.layer] if use.side == 0 else self.scaled[use.layer].T
            rows = rows[use.offset : use.offset + len(cost)]
            others = self._group_members(use.layer, 1 - use.side, members)
            cost += rows @ (others @ self.penalties[use.layer]) @ self.groups[use].T
        return cost

    def _group_members(self, layer: int, side: int, members: Mapping[str, Float32Array]) -> Float32Array:
        """The soft members of the groups on one side of a layer, `(channels, groups)`."""
        parts, offset = [], 0
        for name in self.network.layers[layer].side(side):
            root = self.root[name]
            parts.append(members[root] @ self.groups[_Use(layer, side, offset)])
            offset += len(members[root])
        return np.concatenate(parts)

    def _scale(self, root: str) -> np.float32:
        """The deviation of placing costs where all other channels are in random groups."""
        variance = 0.0
        for use in self.uses[root]:
            importance, penalty = self.network.scaled[use.layer], self.penalties[use.layer]
            variance += importance.var() * importance.shape[1 - use.side] * float(penalty.var())
        # Constant importances have none; any scale leaves their costs equal.
        return np.float32(max(np.sqrt(variance), 1e-30))


def _interleaved(family: OrdersInPieces, orders: Orders) -> Iterator[tuple[str, IntArray]]:
    """All orders of a family but the first, with the first's pieces dealt out in turn.

    Equal orders are a good start for the cost, but few steps lead away from them, and layers behind each other would
    then connect the same groups of channels.
    """
    for name in family.names[1:]:
        pieces = orders[family.names[0]].reshape(-1, family.piece)
        hands = 1 << (len(pieces).bit_length() - 1) // 2
        dealt = np.argsort(np.arange(len(pieces)) % hands, kind="stable")
        yield name, pieces[dealt].ravel()


def _first_halvings(penalty: FloatArray) -> Float32Array:
    """The penalty between groups of the first halvings: that of the first finer group in each."""
    finer = max(1, len(penalty) // ANNEALED_GROUPS)
    return penalty[::finer, ::finer].astype(np.float32)


def _balanced(logits: Float32Array, sizes: Float32Array) -> Float32Array:
    """Softmax over the cells, then scaled in turn until the members of each cell add up to about its size."""
    members: Float32Array = np.exp(logits - logits.max(axis=1, keepdims=True))
    for _ in range(BALANCING_STEPS):
        members *= sizes / np.maximum(members.sum(axis=0), np.float32(1e-30))
        members /= np.maximum(members.sum(axis=1, keepdims=True), np.float32(1e-30))
    return members
