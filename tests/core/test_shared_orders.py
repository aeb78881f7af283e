"""Orders that several layers share: compared with all orders there are on small networks."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strucspars.core.checks import FloatArray, IntArray
from strucspars.core.hierarchy import group_penalty
from strucspars.core.importance import kept_norm_by_level
from strucspars.core.learning import learn_permutations
from strucspars.core.shared_orders import (
    LayerBetweenOrders,
    OrdersInPieces,
    SharedOrders,
    joined_order,
    learn_shared_orders,
)

Layers = list[LayerBetweenOrders]
Build = Callable[[int], Layers]


def layer(importance: object, outs: str, ins: str, *, halvings: int = 1) -> LayerBetweenOrders:
    """Orders are single letters."""
    return LayerBetweenOrders(
        importance=np.asarray(importance, dtype=float),
        penalty=group_penalty(halvings),
        out_orders=tuple(outs),
        in_orders=tuple(ins),
    )


def cost(layers: Layers, orders: dict[str, IntArray]) -> float:
    """The definition of Sec. 3.2, entry by entry."""
    total = 0.0
    for each in layers:
        importance, groups = each.importance / each.importance.sum(), len(each.penalty)
        rows, columns = joined_order(each.out_orders, orders), joined_order(each.in_orders, orders)
        for j, i in np.ndindex(*importance.shape):
            price = each.penalty[j * groups // len(rows), i * groups // len(columns)]
            total += importance[rows[j], columns[i]] * price
    return total / len(layers)


ORDERS = {width: [np.array(each) for each in itertools.permutations(range(width))] for width in (2, 4)}


def random(seed: int, *shape: int) -> FloatArray:
    # Heavy tails: some connections matter much more than others, as in trained networks.
    return np.asarray(np.random.default_rng(seed).standard_normal(shape) ** 4)


RESIDUAL = {"s": 4, "n": 4}
CHAIN = {"a": 4, "b": 4, "c": 2}
PARTS = {"a": 2, "b": 4, "c": 6}


def residual(seed: int) -> Layers:
    """Two blocks that read and write one stream."""
    return [layer(random(seed + 100 * k, 4, 4), *sides) for k, sides in enumerate(["ns", "sn", "ns", "sn"])]


def chain(seed: int) -> Layers:
    return [layer(random(seed, 4, 4), "b", "a"), layer(random(seed + 1, 2, 4), "c", "b")]


def concatenation(seed: int) -> Layers:
    """The third layer reads the outputs of the first two."""
    return [layer(random(seed, 4, 2), "b", "a"), layer(random(seed + 1, 6, 6), "c", "ab")]


def halves(width: int) -> list[IntArray]:
    """Every order that puts other channels into the first half."""
    first_halves = itertools.combinations(range(width), width // 2)
    return [np.array([*first, *(set(range(width)) - set(first))]) for first in first_halves]


NETWORKS = [(residual, RESIDUAL), (chain, CHAIN), (concatenation, PARTS)]


@pytest.mark.parametrize(("build", "widths"), NETWORKS)
def test_small_networks_come_near_the_best_of_all_orders(build: Build, widths: dict[str, int]) -> None:
    gained = possible = 0.0
    for seed in range(5):
        layers = build(seed)
        # Nothing but the reader of a concatenation has six channels, and two groups.
        orders = [halves(width) if width == 6 else ORDERS[width] for width in widths.values()]
        best = min(cost(layers, dict(zip(widths, each, strict=True))) for each in itertools.product(*orders))
        mean = float(np.mean([each.penalty.mean() for each in layers]))
        learned = learn_shared_orders(layers, widths)
        assert learned.cost >= best - 1e-12
        gained, possible = gained + mean - learned.cost, possible + mean - best
    assert gained > 0.95 * possible


@pytest.mark.parametrize(("build", "widths"), NETWORKS)
@given(seed=st.integers(0, 1000))
@settings(max_examples=10)
def test_the_cost_is_that_of_the_definition_and_never_above_the_start(
    build: Build, widths: dict[str, int], seed: int
) -> None:
    layers, generator = build(seed), np.random.default_rng(seed)
    start = {name: generator.permutation(width) for name, width in widths.items()}
    learned = learn_shared_orders(layers, widths, start=start)
    assert learned.converged
    assert learned.cost == pytest.approx(cost(layers, dict(learned.orders)))
    assert learned.cost <= cost(layers, start) + 1e-12
    assert all(sorted(learned.orders[name]) == list(range(width)) for name, width in widths.items())
    cold = learn_shared_orders(layers, widths, seed=seed)
    assert cold.cost <= cost(layers, {name: np.arange(width) for name, width in widths.items()}) + 1e-12


def test_the_outcome_depends_on_nothing_but_its_arguments() -> None:
    layers = [layer(random(k, 32, 32), *sides, halvings=3) for k, sides in enumerate(["ns", "sn", "ms", "sm"])]
    widths = dict.fromkeys("snm", 32)
    first, again = (learn_shared_orders(layers, widths, seed=3) for _ in range(2))
    assert all((first.orders[name] == again.orders[name]).all() for name in widths)


def test_no_single_order_of_a_converged_outcome_can_be_better() -> None:
    layers = residual(7)
    learned = learn_shared_orders(layers, RESIDUAL)
    for name in RESIDUAL:
        for order in itertools.permutations(range(4)):
            assert cost(layers, {**learned.orders, name: np.array(order)}) >= learned.cost - 1e-12


def test_a_layer_with_orders_of_its_own_is_grouped_about_as_well_as_alone() -> None:
    importance = random(0, 64, 128)
    alone = learn_permutations(importance, max_group_level=5)
    (between,) = [layer(importance, "a", "b", halvings=4)]
    together = learn_shared_orders([between], {"a": 64, "b": 128})
    kept = [
        kept_norm_by_level(importance[rows][:, columns])[3]
        for rows, columns in ((alone.out_perm, alone.in_perm), (together.orders["a"], together.orders["b"]))
    ]
    assert kept[1] > 0.95 * kept[0]


def test_planted_groups_along_a_stream_are_found() -> None:
    generator = np.random.default_rng(0)
    hidden = {name: generator.permutation(32) for name in "snm"}
    blocks = np.kron(np.eye(4), np.ones((8, 8)))

    def planted(outs: str, ins: str) -> LayerBetweenOrders:
        importance = np.zeros((32, 32))
        importance[np.ix_(hidden[outs], hidden[ins])] = blocks
        return layer(importance, outs, ins, halvings=2)

    learned = learn_shared_orders([planted(*sides) for sides in ("ns", "sn", "ms", "sm")], dict.fromkeys("snm", 32))
    assert learned.cost == 0


def test_fixed_orders_stay_natural() -> None:
    learned = learn_shared_orders(concatenation(0), PARTS, fixed=frozenset("a"))
    assert learned.orders["a"].tolist() == [0, 1]


def pieced(seed: int) -> tuple[Layers, dict[str, int], OrdersInPieces]:
    """One layer writes a tensor in order w, another reads it in order r, which differs by pieces of two channels."""
    layers = [layer(random(seed, 8, 4), "w", "a", halvings=2), layer(random(seed + 1, 4, 8), "c", "r", halvings=2)]
    return layers, {"a": 4, "w": 8, "r": 8, "c": 4}, OrdersInPieces(names=("w", "r"), piece=2)


def is_in_pieces(orders: SharedOrders, family: OrdersInPieces) -> bool:
    first, second = (orders.orders[name].reshape(-1, family.piece).tolist() for name in family.names)
    return sorted(first) == sorted(second)


@given(seed=st.integers(0, 1000))
@settings(max_examples=20)
def test_orders_in_pieces_differ_by_whole_pieces_and_lie_between_one_order_and_two(seed: int) -> None:
    layers, widths, family = pieced(seed)
    learned = learn_shared_orders(layers, widths, in_pieces=[family])
    assert is_in_pieces(learned, family)
    assert learned.cost == pytest.approx(cost(layers, dict(learned.orders)))
    again = learn_shared_orders(layers, widths, in_pieces=[family], start=learned.orders)
    assert again.cost == pytest.approx(learned.cost)
    free = learn_shared_orders(layers, widths, start=learned.orders)
    assert free.cost <= learned.cost + 1e-12


def test_pieces_of_all_channels_are_one_order_and_pieces_of_one_are_free() -> None:
    layers, widths, family = pieced(1)
    whole = learn_shared_orders(layers, widths, in_pieces=[OrdersInPieces(names=family.names, piece=8)])
    assert whole.orders["w"].tolist() == whole.orders["r"].tolist()
    single = learn_shared_orders(layers, widths, in_pieces=[OrdersInPieces(names=family.names, piece=1)])
    assert single.cost <= whole.cost


def test_an_order_on_both_sides_of_a_layer_never_gets_worse() -> None:
    for seed in range(20):
        layers = [layer(random(seed, 8, 8), "s", "s", halvings=2)]
        identity = {"s": np.arange(8)}
        assert learn_shared_orders(layers, {"s": 8}).cost <= cost(layers, identity) + 1e-12
        start = {"s": np.random.default_rng(seed).permutation(8)}
        assert learn_shared_orders(layers, {"s": 8}, start=start).cost <= cost(layers, start) + 1e-12


def test_layers_of_zeros_decide_nothing() -> None:
    layers = [layer(np.zeros((4, 4)), "n", "s"), layer(random(0, 4, 4), "s", "n")]
    learned = learn_shared_orders(layers, RESIDUAL)
    assert np.isfinite(learned.cost)
