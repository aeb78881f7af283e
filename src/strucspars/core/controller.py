"""Dynamic penalty adjustment: lambda rises while sparsity lags, and falls once it overshoots (Appendix B).

`next_lambda` is the paper's rule. `next_steady_lambda` works for any number of epochs and steps, rate and optimizer:
`docs/decisions/0020-attached-sparsifier.md`.
"""

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

    Attributes:
        epoch: epochs finished.
        lambda_value: strength of the penalty in the next one.
        removed_fraction: what the levels removed at the end of the last one.
        outside_norm: share of its norm that the layer furthest from the target's groups has outside them.
        first_outside_norm: the same when the penalty began.
        reach: that of the last epoch's steps, as in `ObservedEpoch`.
        force: as there, a running mean over the epochs.
        resistance: strength that the loss's pull against the penalty made up for in the epochs so far.
        is_bounded: whether lambda would have to be stronger than the loss allows.

    >>> LambdaState(epoch=3, lambda_value=4e-6).removed_fraction
    0.0
    """

    epoch: int = 0
    lambda_value: float = 0.0
    removed_fraction: float = 0.0
    outside_norm: float | None = None
    first_outside_norm: float | None = None
    reach: float = 0.0
    force: float | None = None
    resistance: float = 0.0
    is_bounded: bool = False


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


# In units of the mean gradient of single batches, most of which is noise that averages out. Only schedules that are too
# short come near this; a tighter bound missed targets that could be met.
LARGEST_SHARE_OF_FORCE = 10.0
# A later epoch is needed where the loss pulls back more than foreseen.
ARRIVAL = 0.8
# Of the share of the norm that may stay outside: at the threshold itself, half of the layers would fall short.
MARGIN = 0.8
# How much of a new estimate of the resistance counts: orders and levels move too, which looks like resistance.
SMOOTHING = 0.5
LARGEST_RISE = 2.0
# Of all weights in an epoch, times their mean size: weights that do not move, such as frozen ones, need no more.
LARGEST_SHRINKAGE = 30.0
# Before there is an estimate: what the loss leaves of the shrinkage.
USUAL_EFFICIENCY = 0.5


@dataclass(frozen=True, kw_only=True)
class SteadySchedule:
    """What the controller for any schedule aims at: to keep the share p of the norm, `min_kept_norm`."""

    min_kept_norm: float
    epochs: int
    warmup: float = 0.1

    @property
    def goal(self) -> float:
        """The share of the norm outside the groups that is aimed at.

        >>> round(SteadySchedule(min_kept_norm=0.9, epochs=10).goal, 3)
        0.08
        """
        return max(MARGIN * (1 - self.min_kept_norm), 1e-3)

    @property
    def warmup_epochs(self) -> int:
        """Epochs without a penalty: the first one at least, which is needed to measure."""
        return max(1, min(round(self.warmup * self.epochs), self.epochs - 2))

    @property
    def arrival(self) -> int:
        """Epochs after which the goal should be met; the others hold it.

        >>> [SteadySchedule(min_kept_norm=0.9, epochs=epochs).arrival for epochs in (100, 10, 3, 1)]
        [80, 8, 3, 2]
        """
        return max(math.ceil(ARRIVAL * self.epochs), min(self.epochs, self.warmup_epochs + 2), 2)


@dataclass(frozen=True, kw_only=True)
class ObservedEpoch:
    """What an epoch did.

    Attributes:
        reach: how far its steps can move a weight per unit of force: the sum of the learning rates, with the share of
            the momentum.
        force: the loss's own force on the weights, relative to their size; None where it was not measured.
    """

    removed_fraction: float
    outside_norm: float
    reach: float
    force: float | None = None


def next_steady_lambda(schedule: SteadySchedule, state: LambdaState, observed: ObservedEpoch) -> LambdaState:
    """Just enough strength to meet the goal in the epochs left until the arrival, and to hold it afterwards.

    Lambda is relative to the size of a layer's weights. Steps that reach s shrink the norm outside the groups by
    `exp(-s * lambda)` where the sizes of the weights are spread exponentially and the loss does not resist. By what an
    epoch falls short of this, the loss resists; lambda is this resistance, plus what has to shrink over what can.

    >>> schedule = SteadySchedule(min_kept_norm=0.9, epochs=10)
    >>> observed = ObservedEpoch(removed_fraction=0.0, outside_norm=0.4, reach=5.0)
    >>> state = next_steady_lambda(schedule, LambdaState(), observed)
    >>> round(0.5 * state.lambda_value * 5.0 * 7, 2) == round(math.log(0.4 / 0.08), 2)  # seven epochs of reach 5
    True
    """
    removed = checked_fraction("removed_fraction", observed.removed_fraction)
    epoch, before, resistance = state.epoch + 1, state.lambda_value, state.resistance
    outside, reach = max(observed.outside_norm, 1e-6), max(observed.reach, 1e-12)
    achieved = 0.0 if state.outside_norm is None else math.log(state.outside_norm / outside)
    if before > 0:
        resistance += SMOOTHING * (before - achieved / reach - resistance)
    force = state.force if observed.force is None else observed.force
    if state.force is not None and observed.force is not None:
        force = state.force + SMOOTHING * (observed.force - state.force)
    lambda_value, is_bounded = 0.0, False
    first = state.first_outside_norm
    if epoch >= schedule.warmup_epochs:
        first = outside if first is None else first
        due, epochs_left = math.log(outside / schedule.goal), max(1, schedule.arrival - epoch)
        needed = resistance + due / _reach_ahead(reach, state.reach, epochs_left)
        if before == 0:
            needed = max(needed, 0.0) / USUAL_EFFICIENCY
        else:
            # Near an equilibrium with the loss an epoch achieves little, whatever its reach; less strength would lose
            # it again. Nor is there a reason to let go at the goal: nothing beyond the target is penalised.
            lag = math.sqrt(max(due, 0.0) / epochs_left / max(achieved, 1e-6))
            held = before * min(1.0, state.reach / reach)  # less only while learning rates rise
            risen = min(max(needed, before * lag if lag > 1 else held, held), LARGEST_RISE * before)
            needed = risen if due > 0 else held
        largest = LARGEST_SHRINKAGE / reach
        largest = largest if force is None else min(largest, LARGEST_SHARE_OF_FORCE * force)
        lambda_value, is_bounded = min(needed, largest), needed > largest
    return LambdaState(epoch, lambda_value, removed, outside, first, reach, force, resistance, is_bounded)


def _reach_ahead(reach: float, before: float, epochs: int) -> float:
    """Reach of the next epochs together, if it falls on as it did from the one before, to a quarter at most."""
    fall = max(before - reach, 0.0)
    return sum(max(reach - fall * ahead, reach / 4) for ahead in range(1, epochs + 1))
