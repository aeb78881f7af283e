"""Momenta that follow their weights when the weights change shape or order."""

import logging
from collections.abc import Callable

import torch
from torch import nn

logger = logging.getLogger(__name__)


def check_optimizer(optimizer: torch.optim.Optimizer | None, model: nn.Module) -> None:
    """Refuse an optimizer of another model, and one whose memory is not kept parameter by parameter."""
    if optimizer is None:
        return
    held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    if held.isdisjoint(model.parameters()):
        raise ValueError(
            "the optimizer holds no parameter of this model; give the one that trains it (a copy of a model has "
            "parameters of its own), or leave it out"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("LBFGS remembers all parameters as one vector; make a new optimizer after the change")


def remembers_shape(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, shape: tuple[int, ...]) -> bool:
    """Whether an optimizer remembers anything about a parameter in this shape."""
    state = optimizer.state.get(parameter, {})
    return any(isinstance(value, torch.Tensor) and tuple(value.shape) == shape for value in state.values())


def change_optimizer_state_(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Apply a change to everything an optimizer remembers in the shape of a parameter.

    Counters stay. What has another shape (factored moments, lists of preconditioners) cannot follow: the parameter then
    starts without a memory, as it did at the very beginning.
    """
    state = optimizer.state.get(parameter)
    if not state:
        return
    remembered = {key: value for key, value in state.items() if isinstance(value, torch.Tensor) and value.numel() > 1}
    foreign = [key for key, value in remembered.items() if value.shape != parameter.shape]
    foreign += [key for key, value in state.items() if isinstance(value, list | tuple | dict)]
    if foreign:
        logger.warning(
            "%s cannot carry %s over to a grouped weight of former shape %s; its memory is cleared",
            type(optimizer).__name__,
            ", ".join(map(repr, foreign)),
            tuple(parameter.shape),
        )
        del optimizer.state[parameter]
        return
    for key, value in remembered.items():
        state[key] = change(value)
