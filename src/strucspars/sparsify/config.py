"""What a user decides about sparse training."""

from dataclasses import dataclass
from typing import get_args

from strucspars.core.budget import Budget
from strucspars.core.checks import checked_at_least, checked_fraction, make_plain_
from strucspars.core.controller import LambdaSchedule, default_lambda_step, longest_warmup
from strucspars.core.hierarchy import group_penalty
from strucspars.core.importance import Norm
from strucspars.core.learning import Method


@dataclass(frozen=True, kw_only=True)
class SparsifyConfig:
    """Options of sparse training. The defaults are the paper's, for CIFAR-10.

    Attributes:
        target: fraction of all the network's parameters (or MACs) to remove.
        epochs: how many times `end_epoch` will be called.
        budget: what the target counts, `"params"` or `"macs"`.
        min_kept_norm: share of a layer's norm that its groups must keep while training (p in the paper).
        decay: ratio of the penalties of successive halvings of the channels, in (0, 1].
        norm: `"l1"` as in the paper, or `"l2"` over each kernel.
        lambda_step: change of lambda, the strength of the penalty, per epoch; None scales the paper's 2e-6 to the
            epochs, their steps and the learning rate.
        steps_per_epoch: optimizer steps per epoch.
        lr: learning rate of the sparse training.
        lambda_warmup_epochs: epochs before lambda may rise.
        min_channels_per_group: no group narrower than this, on either side; 1, as in the paper, is no limit. CPU
            runtimes are slow below 16.
        method: solver of the channel orders.
        seed: of the solver's random starts.

    >>> SparsifyConfig(target=0.6, epochs=50).schedule.lambda_step
    8e-06
    """

    target: float
    epochs: int
    budget: Budget = "params"
    min_kept_norm: float = 0.9
    decay: float = 0.5
    norm: Norm = "l1"
    lambda_step: float | None = None
    steps_per_epoch: int = 782
    lr: float = 0.1
    lambda_warmup_epochs: int = 10
    min_channels_per_group: int = 1
    method: Method = "fast"
    seed: int = 0

    def __post_init__(self) -> None:
        make_plain_(self)
        for name, value, choices in (
            ("budget", self.budget, get_args(Budget)),
            ("norm", self.norm, get_args(Norm)),
            ("method", self.method, get_args(Method)),
        ):
            if value not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
        checked_fraction("min_kept_norm", self.min_kept_norm)
        checked_at_least("min_channels_per_group", self.min_channels_per_group, 1)
        checked_at_least("seed", self.seed, 0)
        group_penalty(0, decay=self.decay)
        checked_at_least("epochs", self.epochs, 1)
        if checked_at_least("lambda_warmup_epochs", self.lambda_warmup_epochs, 0) > longest_warmup(self.epochs):
            raise ValueError(
                f"lambda_warmup_epochs must be at most {longest_warmup(self.epochs)} of {self.epochs} epochs, got "
                f"{self.lambda_warmup_epochs}: nothing would be penalised"
            )
        _ = self.schedule  # checks the rest

    @property
    def schedule(self) -> LambdaSchedule:
        """The controller's part of the options."""
        step = self.lambda_step
        if step is None:
            step = default_lambda_step(self.epochs, steps_per_epoch=self.steps_per_epoch, lr=self.lr)
        return LambdaSchedule(
            target=self.target, epochs=self.epochs, lambda_step=step, warmup_epochs=self.lambda_warmup_epochs
        )
