"""Meeting a budget in two ways at once: how many groups every layer gets, and how many channels every class keeps.

The cost of a layer is a product, of its outputs, its inputs and one over its groups, so the choice is not a plain
knapsack. It is an integer program nevertheless: the share of a product that a combination of choices has is a variable
of its own, and sums of these are the choices themselves (the standard linearisation of products of binary variables).
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from strucspars.core.checks import FloatArray

# Of the whole cost, to save beyond the target: the solver meets a constraint only up to a tolerance.
MARGINS = (0.0, 1e-5, 1e-3)
# Of the whole cost, in sums of products: less than one parameter or multiply-accumulate.
ROUNDING = 1e-12
# Of the smallest sum of losses.
GAP = 1e-3
# Bounds the search the same way on every machine.
MOST_NODES = 2_000


@dataclass(frozen=True, kw_only=True)
class Option:
    """One of the values that a choice can take: a number of groups, or of channels.

    Attributes:
        value: the number itself.
        share: of the cost that is left, in (0, 1].
        loss: what it costs the network, not negative.
    """

    value: int
    share: float
    loss: float


@dataclass(frozen=True)
class Product:
    """A part of the whole cost: `cost` times the shares of these choices; one that is named twice counts squared."""

    cost: float
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Conflict:
    """Options that exclude each other: of all that are listed, `most` at most may be taken."""

    options: tuple[tuple[str, int], ...]
    most: int = 1


@dataclass(frozen=True, eq=False, kw_only=True)
class Choices:
    """What is to be chosen for a network: an option for every name.

    Attributes:
        options: by name of the layer or class; the names must differ.
        products: the whole cost is their sum.
        conflicts: combinations that cannot be.
    """

    options: Mapping[str, Sequence[Option]]
    products: Sequence[Product]
    conflicts: Sequence[Conflict] = ()

    def cost(self, chosen: Mapping[str, int]) -> float:
        """The whole cost with these values.

        >>> grouped = [Option(value=1, share=1, loss=0), Option(value=2, share=0.5, loss=1)]
        >>> Choices(options={"a": grouped}, products=[Product(8, ("a",)), Product(2)]).cost({"a": 2})
        6.0
        """
        shares = {(name, option.value): option.share for name, options in self.options.items() for option in options}
        return float(
            sum(
                product.cost * math.prod(shares[name, chosen[name]] for name in product.choices)
                for product in self.products
            )
        )

    @property
    def whole(self) -> float:
        """The cost with nothing saved."""
        return float(sum(product.cost for product in self.products))


def choose(choices: Choices, target: float) -> dict[str, int] | None:
    """The values with the smallest sum of losses that save at least `target` of the whole cost; None if none do.

    >>> grouped = [Option(value=1, share=1, loss=0), Option(value=2, share=0.5, loss=1)]
    >>> narrow = [Option(value=8, share=1, loss=0), Option(value=6, share=0.75, loss=0.3)]
    >>> choices = Choices(options={"groups": grouped, "width": narrow}, products=[Product(1, ("groups", "width"))])
    >>> choose(choices, 0.25), choose(choices, 0.6)
    ({'groups': 1, 'width': 6}, {'groups': 2, 'width': 6})
    """
    program = _Program.of(choices)
    losses = np.array([option.loss for _, option in program.columns])
    for margin in MARGINS:
        found = program.solved(losses, most=(1 - target - margin) * choices.whole)
        if found is None or choices.cost(found) <= (1 - target + ROUNDING) * choices.whole:
            return found
    return None


def cheapest(choices: Choices) -> dict[str, int]:
    """The values that save most."""
    program = _Program.of(choices)
    found = program.solved(None)
    assert found is not None, "nothing is asked of them"
    return found


@dataclass(frozen=True, eq=False)
class _Program:
    """The integer program: first a binary variable for each option, then one for each combination of a product.

    Attributes:
        columns: the options with the names of their choices.
        rows: constraints `low <= matrix @ x <= high` as (columns, coefficients, low, high).
        costs: of every variable.
    """

    columns: Sequence[tuple[str, Option]]
    rows: Sequence[tuple[Sequence[int], Sequence[float], float, float]]
    costs: FloatArray
    fixed: float

    @classmethod
    def of(cls, choices: Choices) -> "_Program":
        columns = [(name, option) for name, options in choices.options.items() for option in options]
        places: dict[str, list[int]] = {name: [] for name in choices.options}
        for column, (name, _) in enumerate(columns):
            places[name].append(column)
        rows: list[tuple[Sequence[int], Sequence[float], float, float]] = [
            (own, [1.0] * len(own), 1.0, 1.0) for own in places.values()
        ]
        by_option = {(name, option.value): column for column, (name, option) in enumerate(columns)}
        for conflict in choices.conflicts:
            own = [by_option[each] for each in conflict.options]
            rows.append((own, [1.0] * len(own), 0.0, float(conflict.most)))
        costs, fixed = [0.0] * len(columns), 0.0
        for product in _merged(choices.products):
            names = list(dict.fromkeys(product.choices))
            powers = [product.choices.count(name) for name in names]
            if not names:
                fixed += product.cost
                continue
            combinations = list(itertools.product(*(places[name] for name in names)))
            worth = [
                product.cost
                * math.prod(columns[column][1].share ** power for column, power in zip(each, powers, strict=True))
                for each in combinations
            ]
            if len(names) == 1:
                for (column,), cost in zip(combinations, worth, strict=True):
                    costs[column] += cost
                continue
            first = len(costs)
            costs += worth
            for place, name in enumerate(names):
                for column in places[name]:
                    own = [first + index for index, each in enumerate(combinations) if each[place] == column]
                    rows.append(([*own, column], [1.0] * len(own) + [-1.0], 0.0, 0.0))
        return cls(columns, rows, np.array(costs), fixed)

    def solved(self, losses: FloatArray | None, *, most: float = math.inf) -> dict[str, int] | None:
        """The options with the smallest sum of losses, or else of costs, that cost at most so much."""
        if not self.columns:
            return {} if self.fixed <= most else None
        objective = self.costs if losses is None else np.append(losses, np.zeros(len(self.costs) - len(losses)))
        unit = float(self.costs.sum()) or 1.0
        rows = [*self.rows]
        if most < math.inf:
            rows.append((range(len(self.costs)), (self.costs / unit).tolist(), -math.inf, (most - self.fixed) / unit))
        entries = [
            (row, column, value) for row, each in enumerate(rows) for column, value in zip(*each[:2], strict=True)
        ]
        at_rows, at_columns, values = (np.array(part) for part in zip(*entries, strict=True))
        matrix = coo_array((values, (at_rows, at_columns)), shape=(len(rows), len(self.costs))).tocsr()
        integrality = np.zeros(len(self.costs), dtype=np.int64)
        integrality[: len(self.columns)] = 1
        found = milp(
            # The solver's absolute tolerances suit numbers around 1.
            objective / (float(np.abs(objective).max()) or 1.0) * len(self.columns),
            integrality=integrality,
            bounds=Bounds(0, 1),
            constraints=LinearConstraint(matrix, [row[2] for row in rows], [row[3] for row in rows]),
            options={"mip_rel_gap": GAP, "node_limit": MOST_NODES},
        )
        if found.x is None:
            return None
        return {name: option.value for (name, option), taken in zip(self.columns, found.x, strict=False) if taken > 0.5}


def _merged(products: Sequence[Product]) -> list[Product]:
    """The products with one entry for each combination of choices, and without choices that cost nothing."""
    sums: dict[tuple[str, ...], float] = {}
    for product in products:
        key = tuple(sorted(product.choices))
        sums[key] = sums.get(key, 0.0) + product.cost
    return [Product(cost, choices) for choices, cost in sums.items() if cost]
