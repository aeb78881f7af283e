"""Sparse training of any model: the penalty for every step, the decisions after every epoch (Algorithm 1)."""

import copy
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from strucspars.core.budget import ThresholdSearch
from strucspars.core.checks import FloatArray
from strucspars.core.controller import LambdaState, ObservedEpoch, next_lambda, next_steady_lambda
from strucspars.core.hierarchy import checked_group_level, connection_mask, num_groups, penalty_matrix
from strucspars.core.permutation import checked_permutation, inverse
from strucspars.core.plan import GroupingPlan, group_counts
from strucspars.cost.counting import ExampleInputs, uncompiled
from strucspars.cost.latency import LatencyTable
from strucspars.io.records import as_record, plain
from strucspars.nn.groupable import FilterFn, SelectedLayer, Selection, select_layers
from strucspars.nn.layers import is_grouped
from strucspars.sparsify.advice import Advice
from strucspars.sparsify.agreement import agreed
from strucspars.sparsify.attachment import Attachment, StepCount, bare_optimizer
from strucspars.sparsify.calibration import Calibration, CalibrationBatch
from strucspars.sparsify.config import SparsifyConfig
from strucspars.sparsify.extensions import WholeNetwork, find_importance, importance_of
from strucspars.sparsify.levels import with_statistics
from strucspars.sparsify.one_shot import one_shot_plan
from strucspars.sparsify.orders import planned_layers, with_network_orders
from strucspars.sparsify.penalty import StructuredPenalty
from strucspars.sparsify.planning import (
    LayerState,
    check_values,
    learned_states,
    levels_for_target,
    measured_latency,
    network_size,
    plan_for_target,
    removed_by,
    with_known_target,
)
from strucspars.sparsify.progressive import Annealing, Decision, planned_state
from strucspars.sparsify.reports import EpochReport, LayerReport, churn


@dataclass(frozen=True)
class LayerAim:
    """The groups that the controller `auto` trains a layer for, and the mean size of its weights."""

    group_level: int
    mean_size: float


STATE_VERSION = 2


class Sparsifier:
    """Holds the training state of structured sparsification for one model.

    The model does not change: no module is replaced, no key of its `state_dict` changes. The layers to group must stay
    in it, though `torch.compile` and the like may wrap them later; the end of an epoch checks that. Their weights may
    be replaced (`load_state_dict(assign=True)`), but then a CUDA graph must be captured again. Other modules, such as
    the classifier, may be replaced: `target` is a fraction of the network at that time. In distributed training every
    process makes a Sparsifier, and all call `end_epoch` and `plan`: they agree on what is learned.

    >>> import strucspars as ss
    >>> model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
    >>> sparsifier = ss.Sparsifier(model, ss.SparsifyConfig(target=0.4, epochs=20))
    >>> loss = model(torch.zeros(1, 4, 8, 8)).sum() + sparsifier.penalty()
    >>> sparsifier.end_epoch().epoch
    1
    >>> sorted(sparsifier.plan().layers)
    ['0', '2']
    """

    def __init__(
        self,
        model: nn.Module,
        config: SparsifyConfig,
        filter_fn: FilterFn | None = None,
        *,
        calibration: Iterable[CalibrationBatch] | Calibration | None = None,
        example_inputs: ExampleInputs | None = None,
        executor: Executor | None = None,
    ) -> None:
        """Learn the channel orders of every selected layer from its initial weight (Algorithm 1, line 1).

        Args:
            model: any module.
            config: the options.
            filter_fn: called as `filter_fn(module, name)`; False leaves a layer alone.
            calibration: for an importance that reads data, such as `activation`: tensors of images, or pairs of images
                and labels; at most the first 1,024 are used, anew at the end of every epoch. It then also scales the
                penalty: the less a connection matters, the stronger. A resumed training needs the same images. A
                progressive schedule that decides before the first epoch decides as `one_shot_plan` does with them.
            example_inputs: a tensor or a tuple of them to count MACs with and to trace the network; needed for
                `budget="macs"`, for `budget="latency"`, whose milliseconds are those of a call with these, and for
                shared orders.
            executor: worker processes that learn the channel orders; None learns them here.
        """
        if config.narrow != "none":
            raise ValueError(
                f"sparse training keeps all channels, got narrow={config.narrow!r}; prune them with one_shot_plan and "
                "convert_ before it, or leave narrow out"
            )
        self._asked, self._latency = config, measured_latency(model, example_inputs, config)
        self.config = config = with_known_target(config, self._latency)
        self._model = model
        self._executor = executor
        selection = select_layers(model, config, filter_fn=filter_fn)
        selection.check_not_empty()
        check_values(selection.layers)
        self.selection: Selection = with_network_orders(selection, model, config, example_inputs)
        self._example_inputs = example_inputs
        importance = find_importance(config.importance)
        decides_now = config.schedule == "progressive" and config.decision_epoch == 0
        if calibration is not None and not importance.needs and not decides_now:
            raise ValueError(
                f"importance {config.importance!r} reads no calibration images; set importance='activation', or leave "
                "calibration out"
            )
        self._needs = importance.needs
        data = None if calibration is None else Calibration.of(calibration)
        self._calibration = data if importance.needs else None
        self._penalty = StructuredPenalty(self._present_weights(), importance.penalty)
        self._controller = LambdaState()
        self._attachments: list[Attachment] = []
        self._advice = Advice()
        self._count = StepCount.of_layers(len(self.selection.layers))
        self._states = agreed(lambda: self._learned_states(None))
        # Fail now, not after the training, if the target is out of reach.
        found = levels_for_target(self.selection, self._states, self._size(), config)
        self._aims = self._aims_at(found)
        self._decision = Decision()
        self._annealing = Annealing(self.selection.layers) if config.schedule == "progressive" else None
        self._set_strengths_()
        if decides_now:
            plan = None
            if data is not None:
                plan = one_shot_plan(
                    model, config, calibration=data, filter_fn=filter_fn, example_inputs=example_inputs
                )
            self.decide(plan)

    def __repr__(self) -> str:
        config, layers = self.config, self.selection.layers
        return (
            f"Sparsifier of {len(layers)} layers ({len(self.selection.skipped)} left out), to remove "
            f"{config.target:.1%} of all {config.budget}\n"
            f"epoch {self._controller.epoch} of {config.epochs}: {self._controller.removed_fraction:.1%} removed, "
            f"lambda {self.lambda_value:.2g}\n"
            f"{group_counts(num_groups(state.group_level) for state in self._states)}"
        )

    @property
    def lambda_value(self) -> float:
        """Strength of the penalty in the present epoch."""
        return self._controller.lambda_value

    def attach(self, optimizer: Optimizer) -> "Sparsifier":
        """Let every step of the optimizer that trains the layers take the penalty along; returns this Sparsifier.

        No call per step is needed then, under any trainer: gradient accumulation, a `GradScaler`, closures and
        wrappers of the optimizer are accounted for. SGD gets the penalty's gradient; other optimizers shrink the
        weights after their step, by learning rate times strength. Attach each of several optimizers. It ends with
        `detach`, or when the layers are converted. Hooks are not part of a copied or pickled optimizer.

        >>> import strucspars as ss
        >>> model = nn.Sequential(nn.Conv2d(4, 8, 3))
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> sparsifier = ss.Sparsifier(model, ss.SparsifyConfig(target=0.4, epochs=20)).attach(optimizer)
        """
        if any(attached.optimizer is bare_optimizer(optimizer) for attached in self._attachments):
            raise ValueError("this optimizer is attached already; attach it once")
        self._attachments.append(Attachment(optimizer, self.selection.layers, self._penalty, lambda: self._count))
        return self

    def detach(self) -> None:
        """Leave the attached optimizers as they were."""
        for attached in self._attachments:
            attached.detach()
        self._attachments = []

    def penalty(self) -> torch.Tensor:
        """lambda * sum(S' * R_g) over all layers, to be added to the loss (Sec. 3.3).

        Not for a loss whose optimizer is attached: the penalty would act twice.

        With `DistributedDataParallel(find_unused_parameters=True)` use `regularize_`: a gradient for a layer that the
        step does not use would be an error there.
        """
        try:
            return self._penalty.value(self._present_weights())
        except RuntimeError:
            self._check_layers()
            raise

    def regularize_(self) -> None:
        """Add the penalty's gradient to the gradients instead: once per optimizer step, after `backward()`.

        With a `GradScaler` call it after `scaler.unscale_(optimizer)`: the penalty is not scaled.

        Raises:
            ValueError: an optimizer is attached, whose steps do this already.
        """
        if self._attachments:
            raise ValueError(
                "an attached optimizer adds the penalty by itself; remove regularize_() from the loop, or call detach()"
            )
        try:
            self._penalty.add_gradient_(self._present_weights())
        except RuntimeError:
            self._check_layers()
            raise

    def _size(self) -> WholeNetwork:
        """The size of the network now: parts that hold no layer to group may have been replaced."""
        return network_size(self._model, self._example_inputs, self._latency)

    def end_epoch(self) -> EpochReport:
        """Refresh the orders, read off the levels, move lambda (Algorithm 1, lines 4 to 7).

        Once a progressive schedule has decided, only the annealing goes on.
        """
        begin = time.perf_counter()
        self._check_layers()
        if self._annealing is not None and self.decided_plan is not None:
            return self._end_annealing_epoch(self._annealing, self.decided_plan, begin)
        before = self._states
        # With lambda's state, so that a rank that resumed from another checkpoint follows rank 0.
        self._states, self._controller, self._count = agreed(
            lambda: (self._learned_states(before), self._controller, self._count)
        )
        size = self._size()
        removed = removed_by(self.selection, self._states, size, self.config)
        found = levels_for_target(self.selection, self._states, size, self.config)
        self._move_lambda_(removed, found)
        self._advice.after_epoch(
            self.config, self._controller, steps=max(self._count.steps) if self._attachments else None
        )
        self._count = StepCount.of_layers(len(before))
        if self._annealing is not None:
            self._prepare_decision_(self._annealing, meets_target=removed >= self.config.target)
        layers = [
            LayerReport(layer.name, new.group_level, new.kept_norm, new.cost, churn(layer, old, new))
            for layer, old, new in zip(self.selection.layers, before, self._states, strict=True)
        ]
        seconds = time.perf_counter() - begin
        annealed = None if self._annealing is None or self.decided_plan is None else self._annealing.annealed
        return EpochReport(
            self._controller.epoch, self.lambda_value, removed, found.min_kept_norm, seconds, tuple(layers), annealed
        )

    def _move_lambda_(self, removed: float, found: ThresholdSearch) -> None:
        if self.config.controller == "paper":
            first = self._controller.first_outside_norm
            moved = next_lambda(self.config.penalty_schedule, self._controller, removed)
            outside = 1 - found.min_kept_norm
            self._controller = replace(
                moved, outside_norm=outside, first_outside_norm=outside if first is None else first
            )
        else:
            observed = ObservedEpoch(
                removed_fraction=removed,
                outside_norm=1 - found.min_kept_norm,
                reach=self._reach(),
                force=self._count.mean_force,
            )
            self._controller = next_steady_lambda(self.config.steady_schedule, self._controller, observed)
            self._aims = self._aims_at(found)
        self._set_strengths_()

    def _reach(self) -> float:
        """How far the epoch's steps could move a weight per unit of force."""
        return float(np.mean(self._count.reach)) if self._attachments else self.config.assumed_reach

    def _aims_at(self, found: ThresholdSearch) -> list[LayerAim]:
        sizes = self._penalty.mean_sizes(self._present_weights())
        return [
            LayerAim(found.group_levels[layer.name], size)
            for layer, size in zip(self.selection.layers, sizes, strict=True)
        ]

    def plan(self) -> GroupingPlan:
        """The grouping that meets the target from the present weights; the fixed one once a schedule has decided.

        Raises:
            ValueError: the target cannot be reached; the message names what can.
        """
        self._check_layers()
        if self.decided_plan is not None:
            return self.decided_plan

        def decide() -> GroupingPlan:
            selection = self._measured()
            states = learned_states(
                selection.layers, self.config, self._states, self._executor, network=selection.orders
            )
            return plan_for_target(selection, states, self._size(), self.config)

        return agreed(decide)

    @property
    def decided_plan(self) -> GroupingPlan | None:
        """The plan that a progressive schedule has decided on; None before."""
        return None if self._decision.epoch is None else self._decision.plan

    @property
    def present_plan(self) -> GroupingPlan | None:
        """What a progressive schedule would deploy after the last epoch; None before the first, and of two stages."""
        return self._decision.plan

    @property
    def has_held_zeros(self) -> bool:
        """Whether what a progressive schedule removes has been zero since the epoch began."""
        return self._annealing is not None and self._annealing.has_held

    def annealing_tensors(self) -> list[torch.Tensor]:
        """What the annealing changes in an optimizer step besides the weights, for capturing a CUDA graph."""
        return [] if self._annealing is None else self._annealing.tensors()

    def decide(self, plan: GroupingPlan | None = None) -> GroupingPlan:
        """Fix the plan of a progressive schedule now: the one given, or that of the present weights; returns it.

        `end_epoch` decides by itself. From trained weights a plan may be known before the first epoch, for instance
        that of `one_shot_plan`.

        >>> import strucspars as ss
        >>> model = nn.Sequential(nn.Conv2d(4, 8, 3))
        >>> plan = ss.one_shot_plan(model, target=0.5)
        >>> sparsifier = ss.Sparsifier(model, ss.SparsifyConfig(target=0.5, epochs=4, schedule="progressive"))
        >>> sparsifier.decide(plan) == sparsifier.plan() == plan
        True
        """
        self._check_layers()
        if self._annealing is None:
            raise ValueError("only a progressive schedule decides early; set SparsifyConfig(schedule='progressive')")
        if self._decision.epoch is not None:
            raise ValueError(
                f"the plan was decided after epoch {self._decision.epoch}; make a new Sparsifier for another"
            )
        found = agreed(lambda: plan or plan_for_target(self._measured(), self._states, self._size(), self.config))
        found.check_matches({layer.name: layer.weight_shape for layer in self.selection.layers})
        for layer in self.selection.layers:
            if layer.name not in found.layers:
                raise ValueError(f"the plan lacks layer {layer.name!r}; make it with the options of this Sparsifier")
        steps = self._annealing.steps_done() if self._controller.epoch else self.config.steps_per_epoch
        self._decision = Decision(found, epoch=self._controller.epoch)
        self._controller = replace(self._controller, lambda_value=0.0)
        self._annealing.remove_(found)
        self._begin_annealing_epoch_(self._annealing, steps)
        self._set_strengths_()
        return found

    def _prepare_decision_(self, annealing: Annealing, *, meets_target: bool) -> None:
        """See whether the plan has settled, and decide if so or if it is time."""
        found = levels_for_target(self.selection, self._states, self._size(), self.config)
        orders = [state.orders for state in self._states]
        layers, shared = planned_layers(self.selection.layers, found.group_levels, orders, self.selection.orders)
        self._decision = self._decision.followed_by(
            GroupingPlan(layers, shared_orders=shared), meets_target=meets_target
        )
        if self._decision.is_due(self.config, self._controller.epoch):
            self.decide()
        else:
            annealing.begin_epoch_(first=1.0, last=1.0, steps=None)

    def _begin_annealing_epoch_(self, annealing: Annealing, steps: int | None) -> None:
        first, last = (self._decision.share_left(self.config, self._controller.epoch + more) for more in (0, 1))
        annealing.begin_epoch_(first=first, last=last, steps=steps or None)

    def _end_annealing_epoch(self, annealing: Annealing, plan: GroupingPlan, begin: float) -> EpochReport:
        self._states = agreed(
            lambda: [planned_state(layer, plan.layers[layer.name], self.config) for layer in self._measured().layers]
        )
        removed = removed_by(self.selection, self._states, self._size(), self.config)
        self._controller = replace(self._controller, epoch=self._controller.epoch + 1, removed_fraction=removed)
        self._begin_annealing_epoch_(annealing, annealing.steps_done())
        layers = [
            LayerReport(layer.name, state.group_level, state.kept_norm, state.cost, churn=0.0)
            for layer, state in zip(self.selection.layers, self._states, strict=True)
        ]
        seconds = time.perf_counter() - begin
        kept = min(state.kept_norm[state.group_level - 1] for state in self._states)
        self._count = StepCount.of_layers(len(layers))
        return EpochReport(self._controller.epoch, 0.0, removed, kept, seconds, tuple(layers), annealing.annealed)

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides the future, in plain numbers and tensors that `weights_only=True` loads."""
        layers = {
            layer.name: {
                "out_perm": torch.tensor(state.out_perm, device="cpu"),
                "in_perm": torch.tensor(state.in_perm, device="cpu"),
                "group_level": state.group_level,
                "aim": asdict(aim),
                "penalty_scale": None if state.penalty_scale is None else torch.tensor(state.penalty_scale),
            }
            for layer, state, aim in zip(self.selection.layers, self._states, self._aims, strict=True)
        }
        return {
            "version": STATE_VERSION,
            "config": asdict(self.config),
            "controller": asdict(self._controller),
            "count": asdict(self._count),
            "layers": layers,
            "decision": self._decision.state_dict(),
            "annealing": None if self._annealing is None else self._annealing.state_dict(),
            # Another measurement, on another machine perhaps, would lead to another plan.
            "latency": None if self._latency is None else plain(self._latency, "latency"),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where another `Sparsifier` of the same model and options stopped."""
        if state.get("version") != STATE_VERSION:
            raise ValueError(
                f"cannot read sparsifier state of version {state.get('version')!r}, only of {STATE_VERSION}; give what "
                "state_dict() of a Sparsifier returned"
            )
        latency = self._latency
        if state.get("latency") is not None:
            latency = as_record(LatencyTable, state["latency"], "sparsifier state", "latency")
        config = with_known_target(self._asked, latency)
        before, now = state["config"], asdict(config)
        if before != now:
            different = sorted(name for name in {*before, *now} if before.get(name, ...) != now.get(name, ...))
            raise ValueError(f"the state was saved with other options: {', '.join(different)}; use the same config")
        names, saved = [layer.name for layer in self.selection.layers], state["layers"]
        if list(saved) != names:
            raise ValueError(
                f"the state belongs to the layers {list(saved)}, the model has {names}; give that of the same network"
            )
        self.config, self._latency = config, latency
        self._states = [self._restored_state(index, layer) for index, layer in enumerate(saved.values())]
        self._controller = LambdaState(**state["controller"])
        self._aims = [LayerAim(**layer["aim"]) for layer in saved.values()]
        self._count = StepCount(**copy.deepcopy(state["count"]))
        self._decision = Decision.from_state_dict(state["decision"])
        if self._annealing is not None:
            if self.decided_plan is not None:
                self._annealing.remove_(self.decided_plan)
            self._annealing.load_state_dict(state["annealing"])
        self._set_strengths_()

    def _restored_state(self, index: int, saved: Mapping[str, Any]) -> LayerState:
        layer = self.selection.layers[index]
        out_channels, in_channels = layer.weight_shape[:2]
        # A checkpoint may have been loaded to a GPU.
        out_perm, in_perm = saved["out_perm"].cpu(), saved["in_perm"].cpu()
        scale = saved.get("penalty_scale")  # older checkpoints lack it
        return replace(
            self._states[index],
            out_perm=checked_permutation(out_perm, out_channels, name=f"layer {layer.name!r}: out_perm"),
            in_perm=checked_permutation(in_perm, in_channels, name=f"layer {layer.name!r}: in_perm"),
            group_level=checked_group_level(saved["group_level"], out_channels, in_channels),
            penalty_scale=None if scale is None else scale.cpu().numpy(),
        )

    def _present_weights(self) -> list[torch.Tensor]:
        # Read them every time: `load_state_dict(assign=True)` replaces the parameters.
        return [layer.weight for layer in self.selection.layers]

    def _check_layers(self) -> None:
        """Raise a `ValueError` if a layer was replaced or converted."""
        present = set(self._model.modules())
        for layer in self.selection.layers:
            if layer.module not in present:
                raise ValueError(
                    f"layer {layer.name!r} has been replaced in the model or removed from it; make a new Sparsifier"
                )
            if is_grouped(layer.module):
                raise ValueError(
                    f"layer {layer.name!r} has been converted: sparse training ends with plan(); leave the Sparsifier "
                    "out of finetuning"
                )

    def _learned_states(self, previous: list[LayerState] | None) -> list[LayerState]:
        layers, network = self._measured().layers, self.selection.orders
        return learned_states(layers, self.config, previous, self._executor, network=network)

    def _measured(self) -> Selection:
        """The selection, with what the importance reads of the calibration images at the present weights."""
        if self._calibration is None:
            return self.selection
        with uncompiled(self._model):
            layers = with_statistics(self._model, self.selection.layers, self._needs, self._calibration)
        return replace(self.selection, layers=tuple(layers))

    def importances(self) -> dict[str, FloatArray]:
        """How much every connection matters at the present weights, by layer: S of Sec. 3.2, in the original orders."""
        return {layer.name: importance_of(layer, self.config.importance) for layer in self._measured().layers}

    def _set_strengths_(self) -> None:
        for index, (layer, state, aim) in enumerate(zip(self.selection.layers, self._states, self._aims, strict=True)):
            if self.config.controller == "paper":
                strength = penalty_strength(layer, state, decay=self.config.decay, lambda_value=self.lambda_value)
            else:
                out_channels, in_channels = layer.weight_shape[:2]
                kept = connection_mask(out_channels, in_channels, aim.group_level).astype(np.float64)
                strength = in_channel_order(self.lambda_value * aim.mean_size * (1 - kept), state)
            if state.penalty_scale is not None:
                strength = strength * state.penalty_scale
            self._penalty.set_strength_(index, strength)


def penalty_strength(layer: SelectedLayer, state: LayerState, *, decay: float, lambda_value: float) -> FloatArray:
    """lambda * R_g in the original channel order, `(C_out, C_in)`, within the layer's largest level (Sec. 3.3)."""
    out_channels, in_channels = layer.weight_shape[:2]
    penalty = penalty_matrix(
        out_channels, in_channels, state.group_level, decay=decay, largest_level=layer.largest_level
    )
    return in_channel_order(lambda_value * penalty, state)


def in_channel_order(permuted: FloatArray, state: LayerState) -> FloatArray:
    """A matrix in the layer's learned orders, in the original ones."""
    return permuted[inverse(state.out_perm)][:, inverse(state.in_perm)]
