"""Meeting a budget: the group levels that remove the wanted fraction of the network.

The paper searches one threshold p for all layers by bisection (Sec. 3.5, Appendix B). The removed fraction only jumps
where p passes a kept norm of some layer, so bisecting over these finitely many values finds the answer exactly.

Where every level of every layer has a loss, the levels are a multiple-choice knapsack (`levels_by_loss`). It also knows
costs between layers: channels that are copied because two layers want them in different orders.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import pairwise

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import lil_array

from strucspars.core.checks import FloatArray, checked_at_least, checked_target, is_number
from strucspars.core.hierarchy import num_groups
from strucspars.core.importance import level_keeping

# Fractions of the whole cost to save beyond the target: the solver meets a constraint only up to a tolerance.
MARGINS = (0.0, 1e-5, 1e-3)
# Of the smallest sum of losses.
GAP = 1e-4
# Bounds the search the same way on every machine.
MOST_NODES = 10_000


@dataclass(frozen=True)
class LayerBudget:
    """What one layer costs, and what each group level would keep of its norm.

    Attributes:
        cost: of the ungrouped layer, in the unit of the target: parameters, multiply-accumulates, ...
        kept_norm: kept fraction of the norm for the levels 1, 2, ... as `kept_norm_by_level` gives it. The default, one
            entry, is for layers that cannot be grouped and only count towards the total.
        cost_by_level: cost at the levels 1, 2, ..., never rising; None divides `cost` by the number of groups.
        fixed_level: use this level, regardless of the threshold and the largest level.
        largest_level: highest level allowed, such as the one up to which `max_group_level` keeps groups wide.

    >>> LayerBudget("conv", 4096, kept_norm=(1.0, 0.95, 0.7)).level_at(min_kept_norm=0.9)
    2
    """

    name: str
    cost: float
    _: KW_ONLY
    kept_norm: Sequence[float] = (1.0,)
    cost_by_level: Sequence[float] | None = None
    fixed_level: int | None = None
    largest_level: int | None = None

    def __post_init__(self) -> None:
        where = f"layer {self.name!r}: "
        if not is_number(self.cost) or not 0 <= self.cost < math.inf:
            raise ValueError(f"{where}cost must be finite and not negative, got {self.cost!r}")
        if not _falls(self.kept_norm) or self.kept_norm[0] != 1:
            raise ValueError(f"{where}kept_norm must be numbers from 1.0 on that never rise, got {self.kept_norm!r}")
        object.__setattr__(self, "kept_norm", tuple(float(fraction) for fraction in self.kept_norm))
        object.__setattr__(self, "cost", float(self.cost))
        costs = self.cost_by_level
        if costs is None:
            costs = [self.cost / num_groups(level) for level in range(1, len(self.kept_norm) + 1)]
        if not _falls(costs) or costs[0] != self.cost or len(costs) != len(self.kept_norm):
            raise ValueError(
                f"{where}cost_by_level must have {len(self.kept_norm)} costs from {self.cost} on that never rise, "
                f"got {costs!r}"
            )
        object.__setattr__(self, "cost_by_level", tuple(float(cost) for cost in costs))
        for option, level in (("fixed_level", self.fixed_level), ("largest_level", self.largest_level)):
            if level is not None:
                self._check_level(option, level)

    def _check_level(self, option: str, level: int) -> None:
        limit = len(self.kept_norm)
        if checked_at_least(f"layer {self.name!r}: {option}", level, 1) > limit:
            raise ValueError(
                f"layer {self.name!r}: {option} must lie in 1..{limit} (at most {num_groups(limit)} groups), "
                f"got {level}; lower it or leave the layer out"
            )

    def level_at(self, min_kept_norm: float) -> int:
        """Group level at a threshold, within the layer's own limits."""
        if self.fixed_level is not None:
            return self.fixed_level
        level = level_keeping(self.kept_norm, min_kept_norm)
        return level if self.largest_level is None else min(level, self.largest_level)

    def saved_at(self, group_level: int) -> float:
        """Cost that a group level saves."""
        assert self.cost_by_level is not None
        return self.cost_by_level[0] - self.cost_by_level[group_level - 1]


def _falls(values: object) -> bool:
    """Whether these are numbers from 0 on that never rise, at least one."""
    return (
        isinstance(values, Sequence)
        and len(values) > 0
        and all(is_number(value) for value in values)
        and all(0 <= low <= high for high, low in pairwise((math.inf, *values)))
    )


@dataclass(frozen=True)
class Shuffle:
    """Channels that layers see in orders of their own, where each further order is a copy of the channels.

    Attributes:
        cost: of one copy, in the unit of the target.
        layers: the layer of every side that sees them; one that stays ungrouped can use any order.
        free_sides: how many grouped sides need no copy: one, whose order the others are compared with, or none where
            the channels must stay in their natural order.

    >>> Shuffle(0.5, ("conv1", "conv2", "conv3")).num_copies({"conv1": 2, "conv2": 1, "conv3": 2})
    1
    """

    cost: float
    layers: tuple[str, ...]
    free_sides: int = 1

    def num_copies(self, group_levels: Mapping[str, int]) -> int:
        """How many copies these levels need."""
        return max(0, sum(group_levels.get(name, 1) > 1 for name in self.layers) - self.free_sides)


@dataclass(frozen=True)
class ThresholdSearch:
    """Outcome of `search_threshold`: the threshold, the levels it gives, and the fraction of the budget they remove.

    >>> search_threshold([LayerBudget("conv", 8, kept_norm=(1.0, 0.7))], target=0.5).group_levels
    {'conv': 2}
    """

    min_kept_norm: float
    group_levels: Mapping[str, int]
    removed_fraction: float


def removed_fraction(
    layers: Sequence[LayerBudget], group_levels: Mapping[str, int], shuffles: Sequence[Shuffle] = ()
) -> float:
    """Fraction of the whole cost that the given levels remove: `1 - r_t` of Appendix B.

    Layers without an entry in `group_levels` stay whole. Copies of channels can cost more than the groups save: the
    fraction is negative then.

    >>> layers = [LayerBudget("conv", 300, kept_norm=(1.0, 0.9)), LayerBudget("rest", 100)]
    >>> removed_fraction(layers, {"conv": 2})
    0.375
    """
    by_name = {layer.name: layer for layer in layers}
    if len(by_name) < len(layers):
        names = [layer.name for layer in layers]
        raise ValueError(f"layer names must differ, got {max(names, key=names.count)!r} more than once")
    for name, level in group_levels.items():
        if name not in by_name:
            raise ValueError(f"group_levels: there is no layer {name!r}")
        by_name[name]._check_level("group level", level)
    whole = sum(layer.cost for layer in layers)
    if whole == 0:
        raise ValueError("the layers cost nothing, so no fraction of it can be removed; fill in their costs")
    # Parameters divided by a power of two, and their sum up to 2**53, are exact.
    saved = sum(by_name[name].saved_at(level) for name, level in group_levels.items())
    return (saved - sum(shuffle.cost * shuffle.num_copies(group_levels) for shuffle in shuffles)) / whole


def largest_removed_fraction(layers: Sequence[LayerBudget]) -> float:
    """Fraction of the whole cost that is removed with every layer at the largest level it may have."""
    return removed_fraction(layers, {layer.name: layer.level_at(min_kept_norm=0.0) for layer in layers})


def search_threshold(layers: Sequence[LayerBudget], target: float) -> ThresholdSearch:
    """Largest `min_kept_norm` whose group levels remove at least `target` of the whole network (Sec. 3.5).

    Args:
        layers: everything that counts towards the whole network; what cannot be grouped has a single level.
        target: fraction of the whole cost to remove, in [0, 1).

    >>> layers = [LayerBudget("a", 400, kept_norm=(1.0, 0.95, 0.6)), LayerBudget("b", 400, kept_norm=(1.0, 0.8))]
    >>> search_threshold(layers, target=0.4)
    ThresholdSearch(min_kept_norm=0.8, group_levels={'a': 2, 'b': 2}, removed_fraction=0.5)
    """
    target = checked_target(target)

    def at(min_kept_norm: float) -> ThresholdSearch:
        levels = {layer.name: layer.level_at(min_kept_norm) for layer in layers}
        return ThresholdSearch(min_kept_norm, levels, removed_fraction(layers, levels))

    most = largest_removed_fraction(layers)
    if most < target:
        raise ValueError(
            f"target {target:g} cannot be reached: with every layer at its largest level, {reachable_target(most)} of "
            "the whole cost would be removed; lower the target, or lift fixed and largest levels"
        )
    thresholds = sorted({1.0, *(kept for layer in layers for kept in layer.kept_norm)}, reverse=True)
    first = bisect_left(thresholds, True, key=lambda threshold: at(threshold).removed_fraction >= target)
    return at(thresholds[first])


def reachable_target(fraction: float) -> str:
    """A fraction with four decimals, rounded down, so that the named target can be reached."""
    return f"{math.floor(fraction * 1e4) / 1e4:.4f}"


def without_surplus(layers: Sequence[LayerBudget], found: ThresholdSearch, target: float) -> ThresholdSearch:
    """Undo grouping that the target does not need, starting with the layers that keep the least norm.

    One threshold for all layers overshoots by up to the last layer's share. The layers are visited by kept norm, lowest
    first, and each is lowered by one level if the target is still met; this repeats until nothing can be lowered.

    Differs from the paper, which stops at the threshold; see `docs/decisions/0008-surplus.md`.

    >>> layers = [LayerBudget("a", 90, kept_norm=(1.0, 0.8)), LayerBudget("b", 10, kept_norm=(1.0, 0.9))]
    >>> found = search_threshold(layers, target=0.45)
    >>> found.removed_fraction, without_surplus(layers, found, target=0.45).group_levels
    (0.5, {'a': 2, 'b': 1})
    """
    levels = dict(found.group_levels)
    lowered = True
    while lowered:
        lowered = False
        grouped = [layer for layer in layers if layer.fixed_level is None and levels[layer.name] > 1]
        for layer in sorted(grouped, key=lambda layer: layer.kept_norm[levels[layer.name] - 1]):
            trial = levels | {layer.name: levels[layer.name] - 1}
            if removed_fraction(layers, trial) >= target:
                levels, lowered = trial, True
    return ThresholdSearch(found.min_kept_norm, levels, removed_fraction(layers, levels))


def levels_by_loss(
    layers: Sequence[LayerBudget],
    losses: Mapping[str, Sequence[float]],
    target: float,
    shuffles: Sequence[Shuffle] = (),
) -> dict[str, int]:
    """Group levels that remove at least `target` of the whole cost, with the smallest sum of losses.

    The losses are, for every layer that may be grouped, those at its levels 1, 2, ..., up to its largest; kept norms
    are not used. Where the target is out of reach, the levels are those that cost least.

    >>> layers = [LayerBudget("a", 90, kept_norm=(1.0, 0.8)), LayerBudget("b", 10, kept_norm=(1.0, 0.9, 0.8))]
    >>> levels_by_loss(layers, {"a": (0.0, 0.9), "b": (0.0, 0.2, 0.3)}, target=0.05)
    {'a': 1, 'b': 2}
    """
    choice = _LevelChoice.of(layers, {name: len(values) for name, values in losses.items()}, shuffles)
    total = np.array([losses[name][level - 1] for name, level in choice.options])
    whole = sum(layer.cost for layer in layers)
    for margin in MARGINS:
        found = choice.solved(np.append(total, np.zeros(len(shuffles))), at_least=(target + margin) * whole)
        if found is None:
            break
        if removed_fraction(layers, found, shuffles) >= target:
            return found
    return choice.cheapest()


def cheapest_levels(layers: Sequence[LayerBudget], shuffles: Sequence[Shuffle] = ()) -> dict[str, int]:
    """The group levels that cost least: the largest ones, but where shuffles cost more than these save.

    >>> layers = [LayerBudget("a", 90, kept_norm=(1.0, 0.8)), LayerBudget("b", 10, kept_norm=(1.0, 0.9))]
    >>> cheapest_levels(layers, [Shuffle(8, ("a", "b"))])
    {'a': 2, 'b': 1}
    """
    num_levels = {layer.name: layer.level_at(0.0) for layer in layers if len(layer.kept_norm) > 1}
    if not shuffles:
        return num_levels
    return _LevelChoice.of(layers, num_levels, shuffles).cheapest()


@dataclass(frozen=True, eq=False)
class _LevelChoice:
    """One level for every layer, as an integer program.

    Attributes:
        options: every level that some layer may get, with its name: a binary variable each.
        saved: what each option saves.
        shuffles: the number of copies is a variable each.
    """

    options: Sequence[tuple[str, int]]
    saved: FloatArray
    shuffles: Sequence[Shuffle]

    @classmethod
    def of(
        cls, layers: Sequence[LayerBudget], num_levels: Mapping[str, int], shuffles: Sequence[Shuffle]
    ) -> "_LevelChoice":
        by_name = {layer.name: layer for layer in layers if layer.name in num_levels}
        options = [
            (name, level)
            for name, layer in by_name.items()
            for level in ([layer.fixed_level] if layer.fixed_level else range(1, num_levels[name] + 1))
        ]
        return cls(options, np.array([by_name[name].saved_at(level) for name, level in options]), shuffles)

    def cheapest(self) -> dict[str, int]:
        """The levels that save most."""
        found = self.solved(np.append(-self.saved, [shuffle.cost for shuffle in self.shuffles]))
        assert found is not None, "nothing is asked of them"
        return found

    def solved(self, objective: FloatArray, *, at_least: float = -math.inf) -> dict[str, int] | None:
        """The levels with the smallest sum of the objective that save at least so much; None where nothing does.

        The objective has an entry for every option and one for every copy.
        """
        if not self.options:
            return {} if at_least <= 0 else None
        most = np.append(np.ones(len(self.options)), [len(shuffle.layers) for shuffle in self.shuffles])
        found = milp(
            # The solver's absolute tolerances suit numbers around 1.
            objective / (float(np.abs(objective).max()) or 1.0) * len(self.options),
            integrality=np.ones(len(objective), dtype=np.int64),
            bounds=Bounds(0, most),
            constraints=self._constraints(at_least),
            options={"mip_rel_gap": GAP, "node_limit": MOST_NODES},
        )
        if found.x is None:
            return None
        return {name: level for (name, level), taken in zip(self.options, found.x, strict=False) if taken > 0.5}

    def _constraints(self, at_least: float) -> LinearConstraint:
        """One level per layer, enough copies, and last what is saved."""
        names = list(dict.fromkeys(name for name, _ in self.options))
        costs = np.array([shuffle.cost for shuffle in self.shuffles])
        unit = float(self.saved.sum() + costs.sum()) or 1.0
        matrix = lil_array((len(names) + len(self.shuffles) + 1, len(self.options) + len(self.shuffles)))
        low, high = np.full(matrix.shape[0], -math.inf), np.full(matrix.shape[0], math.inf)
        for column, (name, _) in enumerate(self.options):
            matrix[names.index(name), column] = 1
        low[: len(names)] = high[: len(names)] = 1
        for row, shuffle in enumerate(self.shuffles, start=len(names)):
            # The grouped sides beyond the free ones are copies.
            for column, (name, level) in enumerate(self.options):
                if level > 1 and name in shuffle.layers:
                    matrix[row, column] = shuffle.layers.count(name)
            matrix[row, len(self.options) + row - len(names)] = -1
            high[row] = shuffle.free_sides
        matrix[-1, :] = np.append(self.saved, -costs) / unit
        low[-1] = at_least / unit
        return LinearConstraint(matrix.tocsr(), low, high)
