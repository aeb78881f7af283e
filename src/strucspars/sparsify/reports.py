"""What the end of an epoch reports: layer by layer, and for the network."""

from dataclasses import dataclass

import numpy as np

from strucspars.core.checks import IntArray
from strucspars.core.hierarchy import num_groups
from strucspars.core.permutation import inverse
from strucspars.core.plan import group_counts
from strucspars.nn.groupable import SelectedLayer
from strucspars.sparsify.planning import LayerState


@dataclass(frozen=True)
class LayerReport:
    """One layer after an epoch.

    Attributes:
        name: the layer's name.
        group_level: level that its norms allow now.
        kept_norm: share of its norm that the levels 1, 2, ... keep.
        cost: `sum(S' * R)` of its channel orders.
        churn: share of its channels that the refresh moved to another group of the next level.
    """

    name: str
    group_level: int
    kept_norm: tuple[float, ...]
    cost: float
    churn: float


@dataclass(frozen=True, repr=False)
class EpochReport:
    """The network after an epoch.

    Attributes:
        epoch: epochs finished.
        lambda_value: strength of the penalty in the next epoch.
        removed_fraction: fraction of the budget that the present levels would remove.
        kept_norm: share of its norm that every layer keeps in groups that meet the target; it moves smoothly, where the
            removed fraction jumps once it passes `min_kept_norm`.
        seconds: how long the decisions took.
        layers: layer by layer.
        annealed: share of their size that the removed connections have lost, once a progressive schedule has decided.
    """

    epoch: int
    lambda_value: float
    removed_fraction: float
    kept_norm: float
    seconds: float
    layers: tuple[LayerReport, ...]
    annealed: float | None = None

    def __repr__(self) -> str:
        phase = f"lambda {self.lambda_value:.2g}" if self.annealed is None else f"{self.annealed:.1%} annealed"
        return (
            f"epoch {self.epoch}: {self.removed_fraction:.1%} removed, {self.kept_norm:.1%} kept at target, {phase}, "
            f"{self.seconds:.1f} s\n"
            f"{group_counts(num_groups(layer.group_level) for layer in self.layers)}"
        )


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
