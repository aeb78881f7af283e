"""Meeting a budget: the threshold whose group levels remove the wanted fraction of the network (Sec. 3.5, Appendix B).

The paper searches the threshold p by bisection. The removed fraction only jumps where p passes a kept norm of some
layer, so bisecting over these finitely many values finds the answer exactly.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from strucspars.core.criterion import level_keeping
from strucspars.core.hierarchy import num_groups

Budget = Literal["params", "macs"]


@dataclass(frozen=True)
class LayerBudget:
    """What one layer costs, and what each group level would keep of its norm.

    Attributes:
        name: the layer's name in the network.
        params: parameters that grouping divides by the number of groups (the weight, without the bias).
        macs: multiply-accumulates that grouping divides likewise.
        kept_norm: kept fraction of the norm for the levels 1, 2, ... as `kept_norm_by_level` gives it. One entry, the
            default, for what cannot be grouped: such entries only add to the whole.
        fixed_level: use this level whatever the threshold.
        largest_level: go no further than this level.
    """

    name: str
    params: int
    macs: int = 0
    kept_norm: Sequence[float] = (1.0,)
    fixed_level: int | None = None
    largest_level: int | None = None

    def __post_init__(self) -> None:
        if self.params < 0 or self.macs < 0:
            raise ValueError(f"layer {self.name!r}: params and macs must not be negative")
        kept = tuple(float(fraction) for fraction in self.kept_norm)
        if kept[:1] != (1.0,) or not all(0 <= deeper <= level for level, deeper in pairwise(kept)):
            raise ValueError(f"layer {self.name!r}: kept_norm must start at 1.0 and never rise, got {kept}")
        object.__setattr__(self, "kept_norm", kept)
        for option, level in (("fixed_level", self.fixed_level), ("largest_level", self.largest_level)):
            if level is not None and not 1 <= level <= len(kept):
                raise ValueError(
                    f"layer {self.name!r}: {option} must lie in 1..{len(kept)} "
                    f"(at most {num_groups(len(kept))} groups), got {level}; lower it or leave the layer out"
                )

    def level_at(self, min_kept_norm: float) -> int:
        """Group level at a threshold, with the layer's own limits respected."""
        if self.fixed_level is not None:
            return self.fixed_level
        level = level_keeping(self.kept_norm, min_kept_norm)
        return level if self.largest_level is None else min(level, self.largest_level)


@dataclass(frozen=True)
class ThresholdSearch:
    """Outcome of `search_threshold`: the threshold, the levels it gives, and the fraction of the budget they remove."""

    min_kept_norm: float
    group_levels: Mapping[str, int]
    removed_fraction: float


def removed_fraction(
    layers: Sequence[LayerBudget], group_levels: Mapping[str, int], budget: Budget = "params"
) -> float:
    """Fraction of all parameters (or MACs) that the given levels remove: `1 - r_t` of Appendix B.

    A layer of `G` groups keeps `1 / G`. Layers without an entry in `group_levels` stay whole.

    >>> layers = [LayerBudget("conv", 300, kept_norm=(1.0, 0.9)), LayerBudget("rest", 100)]
    >>> removed_fraction(layers, {"conv": 2})
    0.375
    """
    whole = [_cost(layer, budget) for layer in layers]
    if sum(whole) == 0:
        raise ValueError(
            f"the layers have no {budget} at all, so no fraction of them can be removed; fill in {budget}="
        )
    removed = (
        cost * (1 - 1 / num_groups(group_levels.get(layer.name, 1))) for cost, layer in zip(whole, layers, strict=True)
    )
    return sum(removed) / sum(whole)


def search_threshold(layers: Sequence[LayerBudget], target: float, budget: Budget = "params") -> ThresholdSearch:
    """Largest `min_kept_norm` whose group levels remove at least `target` of the whole network (Sec. 3.5).

    Args:
        layers: everything that counts towards the whole network; what cannot be grouped has a single level.
        target: fraction of all parameters (or MACs) to remove, in [0, 1).
        budget: `"params"` or `"macs"`.

    Raises:
        ValueError: the target cannot be reached; the message names the largest fraction that can.

    >>> layers = [LayerBudget("a", 400, kept_norm=(1.0, 0.95, 0.6)), LayerBudget("b", 400, kept_norm=(1.0, 0.8))]
    >>> search_threshold(layers, target=0.4)
    ThresholdSearch(min_kept_norm=0.8, group_levels={'a': 2, 'b': 2}, removed_fraction=0.5)
    """
    if not 0 <= target < 1:
        raise ValueError(f"target is the removed fraction of all {budget} and must lie in [0, 1), got {target!r}")
    names = [layer.name for layer in layers]
    if len(set(names)) < len(names):
        raise ValueError(f"layer names must differ, got {max(names, key=names.count)!r} more than once")

    def at(min_kept_norm: float) -> ThresholdSearch:
        levels = {layer.name: layer.level_at(min_kept_norm) for layer in layers}
        return ThresholdSearch(min_kept_norm, levels, removed_fraction(layers, levels, budget))

    thresholds = sorted({1.0, *(kept for layer in layers for kept in layer.kept_norm)}, reverse=True)
    most = at(thresholds[-1])
    if most.removed_fraction < target:
        raise ValueError(
            f"target {target:.4f} cannot be reached: with every layer at its largest level {most.removed_fraction:.4f} "
            f"of all {budget} would be removed; lower the target or lift fixed and largest levels"
        )
    first = bisect_left(thresholds, True, key=lambda threshold: at(threshold).removed_fraction >= target)
    return at(thresholds[first])


def _cost(layer: LayerBudget, budget: Budget) -> int:
    if budget == "params":
        return layer.params
    if budget == "macs":
        return layer.macs
    raise ValueError(f"budget must be 'params' or 'macs', got {budget!r}")
