"""What to tell whoever trains: a schedule that is too short, a penalty that does nothing or would harm the loss."""

import logging
import math
from typing import final

from strucspars.core.controller import LambdaState
from strucspars.sparsify.config import SparsifyConfig

logger = logging.getLogger(__name__)

# Fewer meet the target too, but the loss has no time to make up for it: `results/short_schedules.json`.
ENOUGH_STEPS = 500
# Of the way to the goal, on a logarithmic scale, by half of the schedule.
LEAST_PROGRESS = 0.1
# Of the whole network: the target counts as met.
NEAR = 0.05

REMEDY = (
    "train for more epochs or at a higher rate, lower the target, or group trained weights without sparse training, by "
    "ss.compress(model, target, calibration=batches), then finetune"
)


@final
class Advice:
    """Logs a warning where the penalty cannot do what it is for, each kind once."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def after_epoch(self, config: SparsifyConfig, state: LambdaState, *, steps: int | None) -> None:
        """Look at the state after an epoch of so many steps; None where no optimizer is attached that counts them."""
        left = f"{config.epochs - state.epoch} of {config.epochs} epochs left"
        if steps == 0:
            self._warn_once(
                "unreached",
                f"no optimizer step of epoch {state.epoch} reached the layers to sparsify, so nothing was penalised; "
                "attach the optimizer that trains them",
            )
        elif steps is not None and state.epoch == 1 and steps * config.epochs < ENOUGH_STEPS:
            self._warn_once(
                "short",
                f"the schedule is short: {config.epochs} epochs of {steps} steps, where training needs about "
                f"{ENOUGH_STEPS} steps in all to make up for what its groups lose; {REMEDY}",
            )
        outside, first = state.outside_norm, state.first_outside_norm
        if outside is None or first is None or config.target == 0:
            return
        kept, needed = f"{100 * (1 - outside):.0f} %", f"{100 * config.min_kept_norm:.0f} %"
        if state.epoch == config.epochs and state.removed_fraction < config.target - NEAR:
            self._warn_once(
                "missed",
                f"the target was not reached: the groups that remove {100 * config.target:.0f} % keep {kept} of a "
                f"layer's norm, not {needed}, so the conversion will cost accuracy; {REMEDY}",
            )
        elif 2 * state.epoch < config.epochs:
            return
        elif state.is_bounded:
            self._warn_once(
                "bounded",
                f"the target is out of reach with {left}: the penalty is as strong as the loss itself, beyond which it "
                f"harms the loss, and the target's groups keep {kept} of a layer's norm, not {needed}; {REMEDY}",
            )
        elif outside > 1 - config.min_kept_norm and _progress(config, outside, first) < LEAST_PROGRESS:
            self._warn_once(
                "idle",
                f"the penalty does nothing so far: with {left}, the target's groups keep {kept} of a layer's norm, "
                f"{100 * (1 - first):.0f} % at the beginning; {REMEDY}",
            )

    def _warn_once(self, kind: str, message: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            logger.warning(message)


def _progress(config: SparsifyConfig, outside: float, first: float) -> float:
    """Share of the way from the first norm outside the groups to the goal."""
    way = math.log(max(first, 1e-6) / config.steady_schedule.goal)
    return math.log(max(first, 1e-6) / max(outside, 1e-6)) / way if way > 0 else 1.0
