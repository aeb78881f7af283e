"""Dynamic penalty adjustment: lambda rises while sparsity lags, and falls once it overshoots (Appendix B)."""

import math
from dataclasses import dataclass

from strucspars.core.checks import checked_at_least, checked_fraction, checked_target, is_number

# The paper's step, for its CIFAR-10 schedule of 100 epochs of 782 steps at learning rate 0.1.
PAPER_LAMBDA_STEP = 2e-6
PAPER_EPOCHS = 100
PAPER_STEPS_PER_EPOCH = 782
PAPER_LR = 0.1


@dataclass(frozen=True, kw_only=True)
class LambdaSchedule:
    """What the controller aims at.

    Attributes:
        target: fraction of all parameters (or MACs) to remove, r in the paper.
        epochs: N, the epochs of sparse training.
        lambda_step: by how much lambda changes after an epoch, Delta in the paper; `default_lambda_step` gives one.
        warmup: fraction of the epochs after which lambda stays 0, rounded to whole ones. The paper's code does so for
            10 of 100. At least one epoch is left in which lambda acts.

    >>> LambdaSchedule(target=0.6, epochs=100, lambda_step=default_lambda_step(100, steps_per_epoch=782, lr=0.1))
    LambdaSchedule(target=0.6, epochs=100, lambda_step=2e-06, warmup=0.1)
    """

    target: float
    epochs: int
    lambda_step: float
    warmup: float = 0.1

    def __post_init__(self) -> None:
        checked_target(self.target)
        checked_at_least("epochs", self.epochs, 1)
        if not is_number(self.lambda_step) or not 0 < self.lambda_step < math.inf:
            raise ValueError(f"lambda_step must be positive and finite, got {self.lambda_step!r}")
        if checked_fraction("lambda_warmup", self.warmup) == 1:
            raise ValueError("lambda_warmup must be below 1, got 1: lambda would stay 0 throughout")

    @property
    def warmup_epochs(self) -> int:
        """Epochs after which lambda stays 0; it rises after the next one, for the one after that.

        >>> [LambdaSchedule(target=0.6, epochs=epochs, lambda_step=0.1).warmup_epochs for epochs in (100, 6, 1)]
        [10, 1, 0]
        """
        return min(round(self.warmup * self.epochs), max(0, self.epochs - 2))


@dataclass(frozen=True)
class LambdaState:
    """State of the controller after `epoch` epochs; `lambda_value` holds for the next one.

    >>> LambdaState(epoch=3, lambda_value=4e-6).removed_fraction
    0.0
    """

    epoch: int = 0
    lambda_value: float = 0.0
    removed_fraction: float = 0.0


def next_lambda(schedule: LambdaSchedule, state: LambdaState, removed_fraction: float) -> LambdaState:
    """One step of the algorithm of Appendix B, after an epoch that ended at this removed fraction r_t.

    The gain `r_t - r_{t-1}` should be at least `(r - r_{t-1}) / (N - t + 1)`: a straight line from here to the target.
    If it is not, lambda rises by a step; if the target is exceeded, it falls by one, never below 0.

    Differs from the paper: sparsity is the removed fraction (the formula there gives the kept one), and lambda is not
    raised above the target; see `docs/decisions/0007-lambda.md`.

    >>> schedule = LambdaSchedule(target=0.5, epochs=10, lambda_step=0.1, warmup=0)
    >>> state = next_lambda(schedule, LambdaState(), removed_fraction=0.0)  # lags: raise
    >>> state = next_lambda(schedule, state, removed_fraction=0.3)  # well ahead: hold
    >>> state.lambda_value
    0.1
    >>> next_lambda(schedule, state, removed_fraction=0.6).lambda_value  # too much: lower
    0.0
    """
    removed_fraction = checked_fraction("removed_fraction", removed_fraction)
    epoch = state.epoch + 1
    lambda_value = state.lambda_value
    if epoch > schedule.warmup_epochs:
        # Past the schedule the rest of the way is due at once.
        epochs_left = max(1, schedule.epochs - epoch + 1)
        expected_gain = (schedule.target - state.removed_fraction) / epochs_left
        lags = removed_fraction - state.removed_fraction < expected_gain
        if lags and removed_fraction < schedule.target:
            lambda_value += schedule.lambda_step
        elif removed_fraction > schedule.target:
            lambda_value = max(0.0, lambda_value - schedule.lambda_step)
    return LambdaState(epoch, lambda_value, removed_fraction)


def default_lambda_step(epochs: int, *, steps_per_epoch: int, lr: float) -> float:
    """The paper's step, rescaled so that another schedule shrinks the weights as much in total.

    While lambda rises by a step per epoch, a penalised weight shrinks by about `lr * steps_per_epoch * step * N**2 / 2`
    over N epochs. Keeping this constant gives `2e-6 * (100 / N)**2 * (782 / steps_per_epoch) * (0.1 / lr)`.

    >>> default_lambda_step(100, steps_per_epoch=782, lr=0.1)
    2e-06
    >>> round(default_lambda_step(10, steps_per_epoch=782, lr=0.1), 6)
    0.0002
    """
    checked_at_least("epochs", epochs, 1)
    checked_at_least("steps_per_epoch", steps_per_epoch, 1)
    if not is_number(lr) or not 1e-12 <= lr < math.inf:
        raise ValueError(f"lr must be positive and finite, got {lr!r}")
    schedule_ratio = (PAPER_EPOCHS / epochs) ** 2 * (PAPER_STEPS_PER_EPOCH / steps_per_epoch) * (PAPER_LR / lr)
    return PAPER_LAMBDA_STEP * schedule_ratio
