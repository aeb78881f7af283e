"""Between the stages: from a plan to the network that is finetuned, and from the finetuned one to the small one."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from strucspars.convert.ablation import reordered_plan, rescale_fresh_weights_
from strucspars.convert.conversion import check_fits, convert_
from strucspars.core.plan import GroupingPlan
from strucspars.data.batches import Batches
from strucspars.nn.copying import copied
from strucspars.train.engine import Engine
from strucspars.train.loss import StageLoss
from strucspars.train.recipe import Ablation, Form, StageRecipe
from strucspars.train.rules import HeldZerosRule, PlainRule, TrainingRule
from strucspars.train.steps import EpochRunner, TrainingStep, epoch_runner

TIMED_STEPS = 10


@dataclass(frozen=True, eq=False)
class TrainableForm:
    """A compressed network as it is trained: its modules, and the rule that keeps it compressed."""

    model: nn.Module
    rule: TrainingRule


def grouped_form(model: nn.Module, plan: GroupingPlan) -> TrainableForm:
    """Real group convolutions."""
    return TrainableForm(convert_(model, plan), PlainRule())


def masked_form(model: nn.Module, plan: GroupingPlan) -> TrainableForm:
    """Dense convolutions with the pruned weights at zero: the same function, often faster on a GPU."""
    check_fits(model, plan)
    return TrainableForm(model, HeldZerosRule(model, plan))


FORMS: dict[Form, Callable[[nn.Module, GroupingPlan], TrainableForm]] = {
    "masked": masked_form,
    "grouped": grouped_form,
}


def ablation_plan(plan: GroupingPlan, ablation: Ablation, *, seed: int) -> GroupingPlan:
    """The learned plan, or its levels with the orders of Table 3."""
    if ablation == "finetune" or ablation == "from-scratch":
        return plan
    return reordered_plan(plan, ablation, seed=seed)


def with_fresh_weights(build: Callable[[], nn.Module], plan: GroupingPlan) -> nn.Module:
    """A network with new weights, at the scale that the plan's groups need."""
    model = build()
    rescale_fresh_weights_(model, plan)
    return model


def form_milliseconds(
    engine: Engine, model: nn.Module, plan: GroupingPlan, options: StageRecipe, batches: Batches
) -> dict[Form, float]:
    """How long a training step takes in either form, on copies of the model."""
    times: dict[Form, float] = {}
    precision_state = engine.precision_state()
    for form, build in FORMS.items():
        trainable = build(copied(model), plan)
        step = TrainingStep(engine, trainable.model.train(), replace(options, ema=None), StageLoss(), trainable.rule)
        runner = epoch_runner(engine, step, batches)
        _milliseconds(runner, engine, steps=2, rates=[0.0] * batches.steps)
        times[form] = _milliseconds(runner, engine, steps=TIMED_STEPS, rates=[0.0] * batches.steps)
    engine.load_precision_state(precision_state)
    return times


def _milliseconds(runner: EpochRunner, engine: Engine, *, steps: int, rates: list[float]) -> float:
    """Time per step over some steps, of one epoch or of several short ones."""
    asked = 0

    def enough() -> bool:
        nonlocal asked
        asked += 1
        return asked >= steps

    begin = time.perf_counter()
    while asked < steps:
        # The same epoch again and again, if it is short: its images are there already.
        runner.run(1, rates, start_step=0, should_stop=enough, on_step=lambda step: None)
    if engine.device.type == "cuda":
        torch.cuda.current_stream().synchronize()
    return 1000 * (time.perf_counter() - begin) / asked


@torch.no_grad()
def recalibrate_(model: nn.Module, batches: Batches, engine: Engine) -> None:
    """Recompute all batch-norm statistics over one epoch of training images: the compressed network has others.

    All else runs as in evaluation: dropout would add variance that is not there later, and draw random numbers.
    """
    training = model.training
    model.eval()
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.train().reset_running_stats()
        norm.momentum = None  # the plain mean of all batches
    with engine.with_precision():
        for batch in batches.epoch(1):
            model(batch.images)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    model.train(training)
    _average_statistics_(norms, engine)


def _average_statistics_(norms: Sequence[nn.modules.batchnorm._BatchNorm], engine: Engine) -> None:
    """Over all processes, each of which has seen other images: their variances, and that of their means."""
    if engine.world_size == 1:
        return
    for norm in norms:
        if norm.running_mean is not None and norm.running_var is not None:
            # Not the mean square less the square of the mean: a small variance beside a large mean would be lost.
            own_mean = norm.running_mean.double()
            mean = engine.mean(own_mean.clone())  # adds up in place
            norm.running_var.copy_(engine.mean(norm.running_var.double() + (own_mean - mean) ** 2))
            norm.running_mean.copy_(mean)
