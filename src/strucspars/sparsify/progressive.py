"""One training instead of two stages: what the plan removes is annealed to exact zero while the rest keeps learning.

Beyond the paper, whose future work it is; see `docs/decisions/0021-progressive.md`.
"""

import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from strucspars.core.hierarchy import group_penalty
from strucspars.core.importance import kept_norm_by_level
from strucspars.core.permutation import connection_cost
from strucspars.core.plan import GroupingPlan, LayerPlan
from strucspars.nn.groupable import SelectedLayer
from strucspars.nn.layers import kept_connections
from strucspars.sparsify.config import SparsifyConfig
from strucspars.sparsify.extensions import importance_of
from strucspars.sparsify.planning import LayerState

# A plan has settled when so many epochs in a row have each changed less than this share of what it removes, while the
# groups that meet the target kept `min_kept_norm`: orders alone settle long before the penalty has done its work.
SETTLED_EPOCHS = 3
SETTLED_CHANGE = 0.01


@dataclass(frozen=True)
class Decision:
    """What a progressive schedule knows between two epochs.

    Attributes:
        plan: what would be deployed now; fixed once `epoch` is not None. None before the first epoch ends.
        settled_epochs: how many epochs in a row have hardly changed it, at the target.
        epoch: after which it was fixed; None before.
    """

    plan: GroupingPlan | None = None
    settled_epochs: int = 0
    epoch: int | None = None

    def followed_by(self, plan: GroupingPlan, *, meets_target: bool) -> "Decision":
        """The state after an epoch that ended with this plan; `meets_target` at the threshold of training."""
        settled = meets_target and self.plan is not None and changed_fraction(self.plan, plan) < SETTLED_CHANGE
        return Decision(plan, self.settled_epochs + 1 if settled else 0)

    def is_due(self, config: SparsifyConfig, epoch: int) -> bool:
        """Whether to decide after this epoch: the plan has settled, or the rest of the training is due."""
        return self.settled_epochs >= SETTLED_EPOCHS or epoch >= config.decision_epoch

    def share_left(self, config: SparsifyConfig, epoch: int) -> float:
        """Share of the annealing that is to go after an epoch; all of it fits before the last one ends."""
        assert self.epoch is not None, "annealed after the decision"
        epochs = min(config.annealing_epochs, config.epochs - self.epoch)
        return max(0.0, 1 - (epoch - self.epoch) / epochs) if epochs > 0 else 0.0

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        plan = None if self.plan is None else self.plan.to_json()
        return {"plan": plan, "settled_epochs": self.settled_epochs, "epoch": self.epoch}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> "Decision":
        """What `state_dict` has returned."""
        plan = None if state["plan"] is None else GroupingPlan.from_json(state["plan"])
        return cls(plan, state["settled_epochs"], state["epoch"])


def planned_state(layer: SelectedLayer, planned: LayerPlan, config: SparsifyConfig) -> LayerState:
    """The state of a layer whose orders and level are decided, with its present norms."""
    importance = importance_of(layer, config.importance)
    penalty = group_penalty(layer.largest_level - 1, decay=config.decay)
    cost = connection_cost(importance, penalty, planned.out_perm, planned.in_perm)
    kept_norm = tuple(kept_norm_by_level(importance[planned.out_perm][:, planned.in_perm]).tolist())
    return LayerState(planned.out_perm, planned.in_perm, cost, kept_norm, planned.group_level)


def changed_fraction(before: GroupingPlan, after: GroupingPlan) -> float:
    """Share of the weights which one of the plans removes that the other keeps.

    >>> import numpy as np
    >>> def plan(*in_perm: int) -> GroupingPlan:
    ...     layer = {"group_level": 2, "out_perm": np.arange(2), "in_perm": np.array(in_perm), "weight_shape": (2, 4)}
    ...     return GroupingPlan({"fc": LayerPlan(**layer)})
    >>> from strucspars.core.plan import LayerPlan
    >>> changed_fraction(plan(0, 1, 2, 3), plan(1, 0, 2, 3)), changed_fraction(plan(0, 1, 2, 3), plan(2, 1, 0, 3))
    (0.0, 0.6666666666666666)
    """
    changed = removed = 0
    for name, layer in after.layers.items():
        area = int(torch.Size(layer.weight_shape[2:]).numel())
        kept, kept_before = kept_connections(layer), kept_connections(before.layers[name])
        changed += area * int((kept ^ kept_before).sum())
        removed += area * int((~(kept & kept_before)).sum())
    return changed / removed if removed else 0.0


class Annealing:
    """Multiplies removed connections towards zero after every optimizer step, and holds them there.

    With a share `left` of the annealing still to go, a removed weight has `left**3` of its value: it falls fast while
    the others can make up for it, and slowly at the end. Its gradient is masked, but only multiplying the weight after
    the step holds zeros whatever the optimizer's momentum, weight decay or adaptive rate.

    Every number that a step changes is on the device, so that a captured CUDA graph can hold the step. It follows the
    steps of all optimizers that hold one of the weights, by a hook of PyTorch's: a training loop needs no call for it.
    """

    def __init__(self, layers: Sequence[SelectedLayer]) -> None:
        self._layers = layers
        # The fused kernels want the memory format of the weights. 1 for what is removed, 0 for the rest.
        self._removed = [torch.zeros_like(layer.weight, requires_grad=False) for layer in layers]
        number = torch.ones((), dtype=torch.float32, device=self._removed[0].device)
        self._left, self._first, self._last = number.clone(), number.clone(), number.clone()
        # Steps of this epoch so far, and how many it will have.
        self._done, self._steps = torch.zeros_like(number), torch.full_like(number, torch.inf)
        _follow_optimizers(self)

    @property
    def annealed(self) -> float:
        """Share of their size that the removed connections have lost: 0 before, 1 when they are zero."""
        return 1 - float(self._left) ** 3

    @property
    def has_held(self) -> bool:
        """Whether the removed connections have been zero since the epoch began."""
        return float(self._first) == 0

    def tensors(self) -> list[torch.Tensor]:
        """Every tensor that a step changes, the weights apart."""
        return [self._left, self._done]

    def remove_(self, plan: GroupingPlan) -> None:
        """Take the connections that this plan removes."""
        for layer, removed in zip(self._layers, self._removed, strict=True):
            mask = ~kept_connections(plan.layers[layer.name]).to(removed.device)
            removed.copy_(mask.view(*mask.shape, *[1] * (removed.dim() - 2)).expand_as(removed))

    def begin_epoch_(self, *, first: float, last: float, steps: int | None) -> None:
        """Go from a share of the annealing that is left to another in the steps of the next epoch.

        Where the steps are not known or fewer, the end of the epoch goes the rest of the way; further steps wait there.
        """
        self._shrink_(torch.full_like(self._left, first))
        self._first.fill_(first)
        self._last.fill_(last)
        self._steps.fill_(torch.inf if steps is None else steps)
        self._done.zero_()

    def steps_done(self) -> int:
        """Steps since the epoch began; waits for the device."""
        return int(self._done)

    @torch.no_grad()
    def step_(self) -> None:
        """Follow one optimizer step, without waiting for the device."""
        self._done.add_(1)
        progress = (self._done / self._steps).clamp(max=1)
        # Exact at both ends: zero must be zero.
        self._shrink_(torch.where(progress < 1, self._first + (self._last - self._first) * progress, self._last))

    @torch.no_grad()
    def mask_gradients_(self) -> None:
        """Keep an optimizer step from moving what is removed: the loss would win it back as fast as it shrinks."""
        pairs = [
            (layer.weight.grad, removed.to(layer.weight.device))
            for layer, removed in zip(self._layers, self._removed, strict=True)
            if layer.weight.grad is not None and layer.weight.shape == removed.shape
        ]
        if pairs:
            gradients = [gradient for gradient, _ in pairs]
            torch._foreach_addcmul_(gradients, gradients, [removed for _, removed in pairs], value=-1)

    @torch.no_grad()
    def _shrink_(self, left: torch.Tensor) -> None:
        lost = 1 - torch.where(left > 0, (left / self._left) ** 3, 0.0)
        self._left.copy_(left)
        pairs = [
            (layer.weight, removed.to(layer.weight.device))
            for layer, removed in zip(self._layers, self._removed, strict=True)
            # Once converted, a layer holds nothing but what is kept.
            if layer.weight.shape == removed.shape
        ]
        for device in {weight.device for weight, _ in pairs}:
            here = [pair for pair in pairs if pair[0].device == device]
            factors = torch._foreach_mul([removed for _, removed in here], -lost.to(device))
            torch._foreach_add_(factors, 1)
            torch._foreach_mul_([weight for weight, _ in here], factors)

    def belongs_to(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer holds one of the weights."""
        weights = {id(layer.weight) for layer in self._layers}
        return any(id(parameter) in weights for group in optimizer.param_groups for parameter in group["params"])

    def state_dict(self) -> dict[str, float]:
        """Where in the epoch the annealing is."""
        return {name: float(number) for name, number in self._numbers.items()}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue there, in place; the weights are those of that time."""
        for name, number in self._numbers.items():
            number.fill_(state[name])

    @property
    def _numbers(self) -> dict[str, torch.Tensor]:
        return {
            "left": self._left,
            "first": self._first,
            "last": self._last,
            "done": self._done,
            "steps": self._steps,
        }


_followers: "weakref.WeakSet[Annealing]" = weakref.WeakSet()
_hook_lock = threading.Lock()
_is_hooked = False


def _follow_optimizers(annealing: Annealing) -> None:
    """One hook for the whole process, which stays: runs in other threads may be going through the hooks."""
    global _is_hooked
    with _hook_lock:
        _followers.add(annealing)
        if not _is_hooked:
            register_optimizer_step_pre_hook(_before_step)
            register_optimizer_step_post_hook(_after_step)
            _is_hooked = True


def _before_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    for annealing in _followers_of(optimizer):
        annealing.mask_gradients_()


def _after_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    for annealing in _followers_of(optimizer):
        annealing.step_()


def _followers_of(optimizer: Optimizer) -> list[Annealing]:
    with _hook_lock:
        followers = list(_followers)
    return [annealing for annealing in followers if annealing.belongs_to(optimizer)]
