"""The learning rate of every step (Sec. 4, training and finetune protocol)."""

import math

from strucspars.training.recipe import StageRecipe

DECAY_AT = (0.5, 0.75)
DECAY_FACTOR = 0.1


def learning_rates(stage: StageRecipe, epoch: int, steps: int) -> list[float]:
    """The rates of all steps of an epoch, counted from 1: warm-up first, then the schedule.

    >>> stage = StageRecipe(epochs=4, lr=1.0, schedule="steps")
    >>> [round(learning_rates(stage, epoch, steps=1)[0], 3) for epoch in (1, 2, 3, 4)]
    [1.0, 1.0, 0.1, 0.01]
    """
    return [_rate(stage, epoch - 1 + step / steps, 1 / steps) for step in range(steps)]


def _rate(stage: StageRecipe, position: float, step: float) -> float:
    """The rate at a position in epochs; `step` is the length of one step in epochs."""
    if position < stage.lr_warmup_epochs:
        # The end of the step counts: a rate of zero would waste the first one.
        return stage.lr * (position + step) / stage.lr_warmup_epochs
    if stage.schedule == "cosine":
        progress = (position - stage.lr_warmup_epochs) / (stage.epochs - stage.lr_warmup_epochs)
        return stage.lr * (1 + math.cos(math.pi * progress)) / 2
    if stage.schedule == "steps":
        # Compared in whole steps: 0.75 of the epochs must not be missed by a rounding error.
        passed = sum(position + step / 2 > share * stage.epochs for share in DECAY_AT)
        return stage.lr * DECAY_FACTOR**passed
    return stage.lr
