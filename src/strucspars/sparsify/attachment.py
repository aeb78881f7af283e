"""The penalty inside the steps of any optimizer, by PyTorch's step hooks; no call per step is needed.

SGD adds up gradients, so the penalty's gradient joins those of the loss before the step. Other optimizers rescale
gradients until little of the penalty's size is left: there the weights shrink by the learning rate times the penalty's
strength after the step, as in a proximal gradient method. See `docs/decisions/0020-attached-sparsifier.md`.
"""

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


@dataclass
class StepCount:
    """What the optimizers have done to the layers since the epoch began.

    Attributes:
        steps: optimizer steps of every layer.
        reach: of every layer, how far its steps can move a weight per unit of force: the sum of the learning rates,
            with the momentum's share.
    """

    steps: list[int]
    reach: list[float]

    @classmethod
    def of_layers(cls, count: int) -> "StepCount":
        """Of so many layers, before the first step."""
        return cls([0] * count, [0.0] * count)


@final
class Attachment:
    """One optimizer that takes the penalty along in its steps, until `detach`, or until a layer is converted."""

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
        self._handles = (
            self.optimizer.register_step_pre_hook(self._before_step),
            self.optimizer.register_step_post_hook(self._after_step),
        )

    def detach(self) -> None:
        """Leave the optimizer as it was."""
        for handle in self._handles:
            handle.remove()

    def _before_step(self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if any(is_grouped(layer.module) or is_masked(layer.module) for layer in self._layers):
            self.detach()
            return None
        if not self._takes_gradient:
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
            sign = -1.0 if group.get("maximize") else 1.0
            self._penalty.add_gradient_of_(weights, own, sign if scale is None else scale * sign)

    def _after_step(self, *_: Any) -> None:
        weights = self._weights()
        # Set by a GradScaler that lets a fused optimizer skip its step.
        found_inf = getattr(self.optimizer, "found_inf", None)
        for group, own in self._own(weights):
            rate = float(group["lr"])  # waits for the device if it is a tensor there
            if not self._takes_gradient:
                self._penalty.shrink_(weights, own, rate if found_inf is None else rate * (found_inf == 0))
            reach = rate * _momentum_gain(group) if self._takes_gradient else rate
            count = self._count()
            for index in own:
                count.steps[index] += 1
                count.reach[index] += reach

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
