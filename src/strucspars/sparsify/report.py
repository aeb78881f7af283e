"""What an epoch's decisions came to."""

from dataclasses import dataclass


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


@dataclass(frozen=True)
class EpochReport:
    """The network after an epoch.

    Attributes:
        epoch: epochs finished.
        lambda_value: strength of the penalty in the next epoch.
        removed_fraction: fraction of the budget that the present levels would remove.
        seconds: how long the decisions took.
        layers: layer by layer.
    """

    epoch: int
    lambda_value: float
    removed_fraction: float
    seconds: float
    layers: tuple[LayerReport, ...]
