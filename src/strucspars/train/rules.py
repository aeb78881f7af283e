"""What training does besides minimising the loss: the structured penalty, held zeros, or the slimming penalty."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

import numpy as np
import torch
from torch import nn
from typing_extensions import override

from strucspars.convert.conversion import check_fits
from strucspars.core.checks import FloatArray
from strucspars.core.plan import GroupingPlan
from strucspars.nn.layers import kept_connections
from strucspars.sparsify.reports import EpochReport
from strucspars.sparsify.sparsifier import Sparsifier
from strucspars.train.slimming import SlimmingPenalty

# How many layers TensorBoard shows.
PICTURED_LAYERS = 4


class TrainingRule:
    """Changes gradients in every step and decides something after every epoch; this one leaves the loss alone."""

    def add_gradient_(self) -> None:
        """Change gradients after the backward pass, without waiting for the device: a CUDA graph may capture it."""

    def end_epoch(self) -> Mapping[str, Any]:
        """Decide after an epoch; returns entries for its row of the metrics."""
        return {}

    def plan_to_cut(self) -> GroupingPlan | None:
        """What a network deployed after this epoch would still lose; None where it stays as it is."""
        return None

    def tensors(self) -> list[torch.Tensor]:
        """Every tensor that a step changes for this rule, besides the model and its gradients."""
        return []

    def arrays(self) -> Mapping[str, np.ndarray[Any, Any]]:
        """State of the layers after the epoch, for a report."""
        return {}

    def matrices(self) -> Mapping[str, FloatArray]:
        """Importance matrices of some layers in their present orders, for pictures."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """What training needs to resume."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state."""


@final
class SparsifyRule(TrainingRule):
    """The structured penalty, and the decisions of Algorithm 1 after every epoch; a plan is passed to `on_decision`."""

    def __init__(self, sparsifier: Sparsifier, on_decision: Callable[[GroupingPlan], None] = lambda plan: None) -> None:
        self._sparsifier, self._on_decision = sparsifier, on_decision
        self._report: EpochReport | None = None
        self._plan_to_cut: GroupingPlan | None = None

    @override
    def add_gradient_(self) -> None:
        self._sparsifier.regularize_()

    @override
    def end_epoch(self) -> Mapping[str, Any]:
        before, decided = self._sparsifier.lambda_value, self._sparsifier.decided_plan
        has_held = self._sparsifier.has_held_zeros
        self._report = self._sparsifier.end_epoch()
        self._plan_to_cut = None if has_held else self._sparsifier.present_plan
        row: dict[str, float | None] = {
            "lambda": before,
            "removed_fraction": self._report.removed_fraction,
            "mean_churn": float(np.mean([layer.churn for layer in self._report.layers])),
            "solver_seconds": self._report.seconds,
        }
        if self._sparsifier.present_plan is not None:
            row["annealed"] = self._report.annealed or 0.0
        if decided is not None:
            row["min_kept_norm"] = decided.min_kept_norm
        elif self._sparsifier.decided_plan is not None:
            self._on_decision(self._sparsifier.decided_plan)
        return row

    @override
    def plan_to_cut(self) -> GroupingPlan | None:
        return self._plan_to_cut

    @override
    def tensors(self) -> list[torch.Tensor]:
        return self._sparsifier.annealing_tensors()

    @override
    def arrays(self) -> Mapping[str, np.ndarray[Any, Any]]:
        if self._report is None:
            return {}
        layers = self._report.layers
        orders = self._sparsifier.state_dict()["layers"].values()
        depth = max(len(layer.kept_norm) for layer in layers)
        kept_norm = [layer.kept_norm + (np.nan,) * (depth - len(layer.kept_norm)) for layer in layers]
        return {
            "group_level": np.array([layer.group_level for layer in layers], dtype=np.uint8),
            "kept_norm": np.array(kept_norm, dtype=np.float32),
            "cost": np.array([layer.cost for layer in layers]),
            "churn": np.array([layer.churn for layer in layers], dtype=np.float32),
            "out_perm": np.concatenate([np.asarray(order["out_perm"], dtype=np.uint16) for order in orders]),
            "in_perm": np.concatenate([np.asarray(order["in_perm"], dtype=np.uint16) for order in orders]),
        }

    @override
    def matrices(self) -> Mapping[str, FloatArray]:
        layers, orders = self._sparsifier.selection.layers, self._sparsifier.state_dict()["layers"]
        importances = self._sparsifier.importances()
        # Spread over the depth of the network.
        shown = sorted({round(place) for place in np.linspace(0, len(layers) - 1, PICTURED_LAYERS)})
        found = {}
        for layer in (layers[place] for place in shown):
            order = orders[layer.name]
            found[layer.name] = importances[layer.name][order["out_perm"]][:, order["in_perm"]]
        return found

    @override
    def state_dict(self) -> dict[str, Any]:
        return self._sparsifier.state_dict()

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._sparsifier.load_state_dict(state)


@final
class HeldZerosRule(TrainingRule):
    """Zeroes the pruned weights of dense convolutions, then their gradients: the masked form of a compressed network.

    Equal to `mask_` with a fresh optimizer, but without a product per layer in the forward pass.
    """

    def __init__(self, model: nn.Module, plan: GroupingPlan) -> None:
        check_fits(model, plan)
        self._weights: list[torch.Tensor] = []
        self._masks: list[torch.Tensor] = []
        for name, layer in plan.layers.items():
            if layer.group_level > 1:
                weight = model.get_submodule(name).get_parameter("weight")
                kept = kept_connections(layer).to(weight.device)
                mask = kept.view(*kept.shape, *[1] * (weight.dim() - 2)).expand_as(weight)
                # The fused product needs the memory layout of the weight.
                self._masks.append(torch.empty_like(weight, requires_grad=False).copy_(mask))
                self._weights.append(weight)
        if self._weights:
            with torch.no_grad():
                torch._foreach_mul_(self._weights, self._masks)

    @override
    @torch.no_grad()
    def add_gradient_(self) -> None:
        pairs = zip(self._weights, self._masks, strict=True)
        # An unused layer has no gradient.
        present = [(weight.grad, mask) for weight, mask in pairs if weight.grad is not None]
        if present:
            torch._foreach_mul_([gradient for gradient, _ in present], [mask for _, mask in present])


@contextmanager
def cut(model: nn.Module, plan: GroupingPlan, *, for_good: bool) -> Iterator[None]:
    """Zero what the plan removes, in place; restore the weights at the end of the block unless `for_good`."""
    weights: list[torch.Tensor] = [model.get_submodule(name).get_parameter("weight") for name in plan.layers]
    before = [weight.detach().clone() for weight in weights]
    HeldZerosRule(model, plan)
    yield
    if not for_good:
        with torch.no_grad():
            torch._foreach_copy_(weights, before)


@final
class SlimmingRule(TrainingRule):
    """The L1 penalty of Network Slimming on the scales of batch norms."""

    def __init__(self, model: nn.Module, strength: float) -> None:
        self._penalty = SlimmingPenalty(model, strength)

    @override
    def add_gradient_(self) -> None:
        self._penalty.add_gradient_()
