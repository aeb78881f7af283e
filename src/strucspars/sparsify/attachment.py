"""The penalty inside the steps of any optimizer, by PyTorch's step hooks; no call per step is needed.

SGD adds up gradients, so the penalty's gradient joins those of the loss before the step. Other optimizers rescale
gradients until little of the penalty's size is left: there the weights shrink by the learning rate times the penalty's
strength after the step, as in a proximal gradient method. See `docs/decisions/0020-attached-sparsifier.md`.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch.optim import ASGD, LBFGS, SGD, Optimizer

from strucspars.nn.groupable import SelectedLayer
from strucspars.nn.layers import is_grouped, is_masked
from strucspars.sparsify.penalty import StructuredPenalty

# Whose step is a sum of gradients times the rate. The proximal step suits all others, those of other packages included.
GRADIENT_OPTIMIZERS = (SGD, ASGD)
# Steps from one sample of the loss's force to the next; each waits for the device.
SAMPLE_EVERY = 10
# Running averages have no history in the first steps, which are larger for it.
FIRST_SAMPLE = 3
# Adaptive steps follow a running average, usually of decay 0.9, in which the noise of gradients is 4.4 times smaller;
# multiplied by this, they compare with the single gradients of SGD.
NOISE_OF_AVERAGES = 4.4


@dataclass
class StepCount:
    """What the optimizers have done to the layers since the epoch began.

    Attributes:
        steps: optimizer steps of every layer.
        reach: of every layer, how far its steps can move a weight per unit of force: the sum of the learning rates,
            with the momentum's share.
        force: sum of the samples of the loss's own force on the weights of a layer, relative to their size.
        samples: how many these are.
    """

    steps: list[int]
    reach: list[float]
    force: float = 0.0
    samples: int = 0

    @classmethod
    def of_layers(cls, count: int) -> "StepCount":
        """Of so many layers, before the first step."""
        return cls([0] * count, [0.0] * count)

    @property
    def mean_force(self) -> float | None:
        """The mean sample; None without any."""
        return self.force / self.samples if self.samples else None


@final
class Attachment:
    """One optimizer that takes the penalty along in its steps until `detach`, or while no layer is converted."""

    def __init__(
        self,
        optimizer: Optimizer,
        layers: Sequence[SelectedLayer],
        penalty: StructuredPenalty,
        count: Callable[[], StepCount],
    ) -> None:
        self.optimizer = bare_optimizer(optimizer)
        if isinstance(self.optimizer, LBFGS):
            raise ValueError(
                "LBFGS compares values of the loss, which must contain the penalty: add sparsifier.penalty() to the "
                "loss instead of attaching the optimizer"
            )
        self._layers = layers
        self._penalty = penalty
        self._count = count
        self._takes_gradient = isinstance(self.optimizer, GRADIENT_OPTIMIZERS)
        # Of a step whose force is being sampled.
        self._weights_before: list[torch.Tensor] | None = None
        self._handles = (
            self.optimizer.register_step_pre_hook(self._before_step),
            self.optimizer.register_step_post_hook(self._after_step),
        )

    def detach(self) -> None:
        """Leave the optimizer as it was."""
        for handle in self._handles:
            handle.remove()

    def _before_step(self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._is_over():
            return None
        if not self._takes_gradient:
            is_sampled = max(self._count().steps) % SAMPLE_EVERY == FIRST_SAMPLE
            self._weights_before = [weight.detach().clone() for weight in self._weights()] if is_sampled else None
            return None
        # The arguments begin with the optimizer itself. A closure computes new gradients within the step.
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._add_gradients_()
            return None
        return args[:1], kwargs | {"closure": partial(self._closure_with_gradients, closure)}

    def _closure_with_gradients(self, closure: Callable[[], Any]) -> Any:
        loss = closure()
        self._add_gradients_()
        return loss

    def _add_gradients_(self) -> None:
        # Fused optimizers divide by the scale of a GradScaler within their step.
        scale = getattr(self.optimizer, "grad_scale", None)
        weights = self._weights()
        for group, own in self._own(weights):
            if max(self._count().steps) % SAMPLE_EVERY == FIRST_SAMPLE:
                gain = 1.0 if scale is None else 1.0 / float(scale)
                self._sample_force(weights, own, [weights[index].grad for index in own], gain)
            sign = -1.0 if group.get("maximize") else 1.0
            self._penalty.add_gradient_of_(weights, own, sign if scale is None else scale * sign)

    def _after_step(self, *_: Any) -> None:
        if self._is_over():
            return
        weights = self._weights()
        # Set by a GradScaler that lets a fused optimizer skip its step.
        found_inf = getattr(self.optimizer, "found_inf", None)
        for group, own in self._own(weights):
            rate = float(group["lr"])  # waits for the device if it is a tensor there
            if self._weights_before is not None and rate > 0:
                moved = [weights[index].detach() - self._weights_before[index] for index in own]
                self._sample_force(weights, own, moved, NOISE_OF_AVERAGES / rate)
            if not self._takes_gradient:
                self._penalty.shrink_(weights, own, rate if found_inf is None else rate * (found_inf == 0))
            reach = rate * _momentum_gain(group) if self._takes_gradient else rate
            count = self._count()
            for index in own:
                count.steps[index] += 1
                count.reach[index] += reach

    def _is_over(self) -> bool:
        """Whether a layer has been converted. The hooks stay: removing them here would disturb others in their turn."""
        return any(is_grouped(layer.module) or is_masked(layer.module) for layer in self._layers)

    @torch.no_grad()
    def _sample_force(
        self, weights: Sequence[torch.Tensor], own: Sequence[int], moves: Sequence[torch.Tensor | None], gain: float
    ) -> None:
        if not own:
            return
        ratios = [
            move.abs().mean().float() / weights[index].detach().abs().mean().float().clamp(min=1e-12)
            for index, move in zip(own, moves, strict=True)
            if move is not None
        ]
        sample, count = gain * torch.stack(ratios).mean().item(), self._count()
        # Gradients overflow before a scaler has found its scale.
        if math.isfinite(sample):
            count.force += sample
            count.samples += 1

    def _weights(self) -> list[torch.Tensor]:
        return [layer.weight for layer in self._layers]

    def _own(self, weights: Sequence[torch.Tensor]) -> Iterator[tuple[dict[str, Any], list[int]]]:
        """Every group of parameters, and which weights with a gradient belong to it: others are not stepped either."""
        # Read every time: groups are added, and weights frozen or replaced, while training goes on.
        index_of = {id(weight): index for index, weight in enumerate(weights)}
        for group in self.optimizer.param_groups:
            found = (index_of.get(id(parameter)) for parameter in group["params"] if parameter.grad is not None)
            yield group, [index for index in found if index is not None]


def bare_optimizer(optimizer: Optimizer) -> Optimizer:
    """The optimizer inside wrappers such as those of accelerate and Lightning, which have no hooks of their own."""
    inner = getattr(optimizer, "optimizer", None)
    return bare_optimizer(inner) if isinstance(inner, Optimizer) else optimizer


def _momentum_gain(group: dict[str, Any]) -> float:
    """How much farther a constant gradient moves a weight with momentum."""
    momentum = float(group.get("momentum", 0.0))
    return (1 - float(group.get("dampening", 0.0))) / (1 - momentum) if momentum < 1 else 1.0
