"""The options of sparsification, the same ones in Python, in recipes and on the command line."""

from dataclasses import dataclass, fields
from typing import Literal, get_args

from strucspars.core.checks import checked_at_least, checked_fraction, checked_seed, checked_target
from strucspars.core.controller import (
    PAPER_LR,
    PAPER_STEPS_PER_EPOCH,
    LambdaSchedule,
    SteadySchedule,
    default_lambda_step,
)
from strucspars.core.hierarchy import group_penalty
from strucspars.core.learning import Method
from strucspars.nn.groupable import LayerRules
from strucspars.sparsify.extensions import BUDGETS, DEFAULT_ORDERS, IMPORTANCES, LATENCY_BUDGET, ORDERS

Schedule = Literal["two-stage", "progressive"]
Controller = Literal["auto", "paper"]
Levels = Literal["threshold", "knapsack"]
Runtime = Literal["onnxruntime", "openvino"]
Narrow = Literal["none", "inside", "all"]
NARROW_BUDGETS = ("params", "macs")
USUAL_MOMENTUM = 0.9


@dataclass(frozen=True, kw_only=True)
class SparsifyOptions(LayerRules):
    """What to remove, of which layers, and how. The defaults are the paper's, for CIFAR-10.

    Attributes:
        target: fraction of the whole network to remove.
        target_ms: milliseconds that one call may take, in place of a target; with the budget `latency`.
        budget: what the target counts: `params`, `macs`, `latency` (milliseconds of a call with the example inputs, on
            this machine), or a registered budget.
        runtime: what the budget `latency` measures in, on one core: `onnxruntime` or `openvino`.
        levels: how group levels meet the target: `threshold`, one kept norm for all layers as in the paper; or
            `knapsack`, those that lose the least norm in all, each layer's on a logarithmic scale. The budget `latency`
            always takes `knapsack`, and so do plans with calibration images, where the loss is measured.
        importance: how much a connection matters: `l1`, the norm of its kernel as in the paper; `l2`; `activation` or
            `fisher`, which read calibration images; or a registered importance.
        orders: which layers share a channel order, so that no shuffle is left between them: `free`, none, as in the
            paper; `shared`, those along a residual stream or concatenation; `one-shuffle`, also all but one in between;
            or a registered policy. All but `free` need example inputs, to trace the network.
        pieces: where layers have orders of their own, these differ by whole pieces of so many neighbouring channels.
        narrow: which channels may go, beside groups: `none`, as in the paper; `inside`, those between layers, while
            residual streams stay; or `all`. So far in `one_shot_plan`, with the budgets `params` and `macs`; it needs
            example inputs, to trace the network, and always takes the levels of `knapsack`.
        width_multiple: numbers of channels that stay are multiples of it, where some go.
        min_kept_norm: share of a layer's norm that its groups must keep while training (p in the paper).
        decay: ratio of the penalties of successive halvings of the channels, in (0, 1].
        controller: how lambda, the strength of the penalty, moves: `auto` meets the target whatever the schedule, as
            far as the loss allows; `paper` moves it by a fixed step after every epoch.
        lambda_step: of the paper's controller, change of lambda per epoch; None scales the paper's 2e-6 to the epochs,
            their steps and the learning rate.
        lambda_warmup: fraction of the epochs before lambda may rise.
        method: how the channel orders are found: `fast`, better and faster than the others; `paper`, the paper's
            alternation; or `paper-pot`, the same by the package POT, as in the authors' code.
        schedule: `two-stage`, sparse training to the end, then conversion and finetuning as in the paper; or
            `progressive`, one training in which levels and orders are decided early and what they remove is then
            annealed to exact zero.
        decide_by: fraction of the epochs by which a progressive schedule decides; it decides earlier once the plan has
            settled. 0 decides from the weights it starts with, which should be trained ones.
        anneal: fraction of the epochs that the annealing takes.
    """

    target: float = 0.5
    target_ms: float | None = None
    budget: str = "params"
    runtime: Runtime = "onnxruntime"
    levels: Levels = "threshold"
    importance: str = "l1"
    orders: str = "free"
    pieces: int = 1
    narrow: Narrow = "none"
    width_multiple: int = 8
    min_kept_norm: float = 0.9
    decay: float = 0.5
    controller: Controller = "auto"
    lambda_step: float | None = None
    lambda_warmup: float = 0.1
    method: Method = "fast"
    schedule: Schedule = "two-stage"
    decide_by: float = 0.25
    anneal: float = 0.25

    def __post_init__(self) -> None:
        super().__post_init__()
        checked_target(self.target)
        BUDGETS.check(self.budget)
        IMPORTANCES.check(self.importance)
        ORDERS.check(self.orders)
        checked_at_least("pieces", self.pieces, 1)
        checked_at_least("width_multiple", self.width_multiple, 1)
        if self.narrow not in get_args(Narrow):
            raise ValueError(f"narrow must be one of {', '.join(get_args(Narrow))}, got {self.narrow!r}")
        if self.narrow != "none" and self.budget not in NARROW_BUDGETS:
            raise ValueError(
                f"narrow={self.narrow!r} works with the budgets {' and '.join(NARROW_BUDGETS)}, got {self.budget!r}: "
                "of others it is not known what fewer channels save"
            )
        checked_fraction("min_kept_norm", self.min_kept_norm)
        group_penalty(0, decay=self.decay)
        if self.runtime not in get_args(Runtime):
            raise ValueError(f"runtime must be one of {', '.join(get_args(Runtime))}, got {self.runtime!r}")
        if self.levels not in get_args(Levels):
            raise ValueError(f"levels must be one of {', '.join(get_args(Levels))}, got {self.levels!r}")
        if self.target_ms is not None and (not self.target_ms > 0 or self.budget != LATENCY_BUDGET):
            raise ValueError(
                f"target_ms must be positive milliseconds, with budget={LATENCY_BUDGET!r}; got {self.target_ms!r} and "
                f"budget={self.budget!r}"
            )
        if self.method not in get_args(Method):
            raise ValueError(f"method must be one of {', '.join(get_args(Method))}, got {self.method!r}")
        if self.schedule not in get_args(Schedule):
            raise ValueError(f"schedule must be one of {', '.join(get_args(Schedule))}, got {self.schedule!r}")
        if checked_fraction("decide_by", self.decide_by) + checked_fraction("anneal", self.anneal) > 1:
            raise ValueError(
                f"decide_by {self.decide_by:g} and anneal {self.anneal:g} are more than the whole training; lower one"
            )
        if self.controller not in get_args(Controller):
            raise ValueError(f"controller must be one of {', '.join(get_args(Controller))}, got {self.controller!r}")
        if self.controller == "auto" and self.lambda_step is not None:
            raise ValueError(
                f"lambda_step is of the paper's controller, got {self.lambda_step!r}; set controller='paper' or "
                "leave it out"
            )
        _ = self.lambda_schedule(epochs=1, steps_per_epoch=1, lr=1)  # checks the rest

    @property
    def has_free_orders(self) -> bool:
        """Whether every layer has channel orders of its own."""
        return self.orders == DEFAULT_ORDERS and self.pieces == 1

    @property
    def known_target(self) -> float | None:
        """The fraction to remove; None where milliseconds are named, until the network has been timed."""
        return self.target if self.target_ms is None else None

    @property
    def counts_latency(self) -> bool:
        """Whether the target is about milliseconds."""
        return self.budget == LATENCY_BUDGET

    def config(self, *, epochs: int = 1, steps_per_epoch: int = 1, lr: float = 0.1, seed: int = 0) -> "SparsifyConfig":
        """These options with those of a training."""
        options = {option.name: getattr(self, option.name) for option in fields(SparsifyOptions)}
        return SparsifyConfig(**options, epochs=epochs, steps_per_epoch=steps_per_epoch, lr=lr, seed=seed)

    def lambda_schedule(self, *, epochs: int, steps_per_epoch: int, lr: float) -> LambdaSchedule:
        """What the paper's controller aims at in a stage of so many epochs."""
        step = self.lambda_step
        if step is None:
            step = default_lambda_step(epochs, steps_per_epoch=steps_per_epoch, lr=lr)
        return LambdaSchedule(target=self.target, epochs=epochs, lambda_step=step, warmup=self.lambda_warmup)


@dataclass(frozen=True, kw_only=True)
class SparsifyConfig(SparsifyOptions):
    """All options of sparsification: those of `SparsifyOptions` and `LayerRules`, and of the training.

    Attributes:
        epochs: how many times `end_epoch` will be called.
        steps_per_epoch: optimizer steps per epoch; None counts those of attached optimizers, and takes the paper's 782
            without one.
        lr: learning rate of the sparse training; None reads that of attached optimizers at every step, and takes the
            paper's 0.1 without one.
        seed: of the solver's random starts.

    >>> config = SparsifyConfig(target=0.6, epochs=50, exclude=("*.shortcut",), controller="paper")
    >>> config.penalty_schedule.lambda_step, config.penalty_schedule.warmup_epochs
    (8e-06, 5)
    """

    epochs: int = 100
    steps_per_epoch: int | None = None
    lr: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        checked_seed("seed", self.seed)
        _ = self.penalty_schedule  # checks the rest

    @property
    def penalty_schedule(self) -> LambdaSchedule:
        """What the paper's controller aims at."""
        return self.lambda_schedule(epochs=self.penalty_epochs, steps_per_epoch=self._steps, lr=self._lr)

    @property
    def assumed_reach(self) -> float:
        """How far an epoch of SGD can move a weight per unit of force, where no optimizer is attached to ask."""
        return self._steps * self._lr / (1 - USUAL_MOMENTUM)

    @property
    def _steps(self) -> int:
        return PAPER_STEPS_PER_EPOCH if self.steps_per_epoch is None else self.steps_per_epoch

    @property
    def _lr(self) -> float:
        return PAPER_LR if self.lr is None else self.lr

    @property
    def steady_schedule(self) -> SteadySchedule:
        """What the controller for any schedule aims at."""
        return SteadySchedule(min_kept_norm=self.min_kept_norm, epochs=self.penalty_epochs, warmup=self.lambda_warmup)

    @property
    def penalty_epochs(self) -> int:
        """Epochs in which the penalty may act: all, or those before a progressive schedule decides.

        >>> SparsifyConfig(epochs=160).penalty_epochs, SparsifyConfig(epochs=160, schedule="progressive").penalty_epochs
        (160, 40)
        """
        return self.epochs if self.schedule == "two-stage" else max(1, self.decision_epoch)

    @property
    def decision_epoch(self) -> int:
        """After how many epochs a progressive schedule decides at the latest; the annealing has one at least."""
        wanted = round(self.decide_by * self.epochs)
        return min(max(wanted, 1 if self.decide_by else 0), self.epochs - 1)

    @property
    def annealing_epochs(self) -> int:
        """Epochs in which the removed connections go to zero; 0 for all at once."""
        return max(round(self.anneal * self.epochs), 1) if self.anneal else 0
