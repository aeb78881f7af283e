"""One step of training: loss, teacher, precision, rule, optimizer, averaged weights; and an epoch's learning rates."""

import math
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional

from strucspars.nn.layers import DENSE_AND_GROUPED_TYPES
from strucspars.nn.names import copied
from strucspars.train.engine import Engine
from strucspars.train.recipe import StageRecipe
from strucspars.train.rules import TrainingRule

# The `steps` schedule divides the rate by 10 at these shares of the epochs.
DECAY_AT = (0.5, 0.75)
DECAY_FACTOR = 0.1


@dataclass(frozen=True, eq=False, kw_only=True)
class StageLoss:
    """Cross-entropy, mixed with the distance from a teacher if there is one (Hinton et al., 2015).

    `shown` are the outputs whose classes the images show, None for all. The distance leaves out the others, about which
    a teacher would mostly say that they are absent.
    """

    label_smoothing: float = 0.0
    teacher: nn.Module | None = None
    shown: torch.Tensor | None = None
    weight: float = 0.5
    temperature: float = 4.0

    @torch.no_grad()
    def targets(self, images: torch.Tensor) -> torch.Tensor | None:
        """The teacher's softened predictions as log-probabilities `(B, shown classes)`; None without a teacher."""
        return None if self.teacher is None else self._softened(self.teacher(images))

    def __call__(self, scores: torch.Tensor, labels: torch.Tensor, targets: torch.Tensor | None) -> torch.Tensor:
        """Mean loss over the batch; `targets` are the teacher's for these images."""
        loss = functional.cross_entropy(scores, labels, label_smoothing=self.label_smoothing)
        if targets is None:
            return loss
        divergence = functional.kl_div(self._softened(scores), targets, reduction="batchmean", log_target=True)
        # Scaled so that its gradient does not depend on the temperature.
        return (1 - self.weight) * loss + self.weight * divergence * self.temperature**2

    def _softened(self, scores: torch.Tensor) -> torch.Tensor:
        compared = scores if self.shown is None else scores[:, self.shown]
        return functional.log_softmax(compared.float() / self.temperature, dim=1)


@final
class AveragedModel:
    """Exponential moving average (EMA) of a model's weights and floating-point buffers, updated on the device."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model = copied(model).requires_grad_(False).eval()
        self._decay = decay
        # As a dictionary: a tensor with several names would be averaged once for each of them.
        pairs = dict(zip(_tensors(self.model), _tensors(model), strict=True)).items()
        floating = [pair for pair in pairs if pair[0].is_floating_point()]
        self._averages, self._sources = [pair[0] for pair in floating], [pair[1] for pair in floating]
        self._counters = [pair for pair in pairs if not pair[0].is_floating_point()]

    @torch.no_grad()
    def update_(self) -> None:
        """Move a step towards the model."""
        torch._foreach_lerp_(self._averages, self._sources, 1 - self._decay)

    @torch.no_grad()
    def copy_counters_(self) -> None:
        """Copy the integer buffers, once per epoch: captured steps do not count batches."""
        for average, source in self._counters:
            average.copy_(source)


def _tensors(model: nn.Module) -> list[torch.Tensor]:
    """The values of `state_dict` as the model's own tensors: one with two names is the same object twice."""
    return list(model.state_dict(keep_vars=True).values())


@final
class CastAtOnce(nn.Module):
    """A model whose convolutions and linear layers compute with half-precision copies of their parameters.

    Everything else stays as in autocast; batch norms are in full precision. One kernel refreshes all copies before a
    forward pass; `collect_gradients_` brings their gradients to the parameters after the backward pass.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = model
        named = {
            parameter: f"{name}.{key}" if name else key
            for name, module in model.named_modules()
            # Exactly these types: a subclass may need its weight in full precision first.
            if type(module) in DENSE_AND_GROUPED_TYPES
            for key, parameter in module.named_parameters(recurse=False)
            if parameter.requires_grad
        }
        # One name per parameter: a replaced parameter takes effect under all its names.
        self._names = list(named.values())
        self._originals: list[torch.Tensor] = list(named)
        self._copies = [parameter.detach().to(dtype).requires_grad_() for parameter in self._originals]

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """The model's forward pass with its present parameters."""
        with torch.no_grad():
            torch._foreach_copy_(self._copies, self._originals)
        for copy in self._copies:
            copy.grad = None
        scores: torch.Tensor = functional_call(self.model, dict(zip(self._names, self._copies, strict=True)), images)
        return scores

    @torch.no_grad()
    def collect_gradients_(self) -> None:
        """Give the parameters the gradients of their copies, in full precision."""
        gradients, sources = [], []
        for parameter, copy in zip(self._originals, self._copies, strict=True):
            if copy.grad is not None:
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
                gradients.append(parameter.grad)
                sources.append(copy.grad)
        if sources:
            torch._foreach_copy_(gradients, sources)


@final
class TrainingStep:
    """Forward, backward, rule, optimizer and average; `sums` are those of the batches' losses and right answers."""

    def __init__(
        self, engine: Engine, model: nn.Module, options: StageRecipe, loss: StageLoss, rule: TrainingRule
    ) -> None:
        self.model = model
        self.optimizer = _optimizer(model, options, on_device=engine.captures_graphs, device=engine.device)
        self.average = None if options.ema is None else AveragedModel(model, options.ema)
        self.sums = torch.zeros(2, dtype=torch.float64, device=engine.device)
        self._engine, self._loss, self._rule = engine, loss, rule
        self._cast = CastAtOnce(model, torch.bfloat16) if engine.casts_at_once else None
        self._forward = engine.trainable(self._cast or model)
        self._fabric_optimizer: Any = engine.fabric.setup_optimizers(self.optimizer)

    def targets(self, images: torch.Tensor) -> torch.Tensor | None:
        """The teacher's targets for images, computed in the precision of training; None without a teacher."""
        with self._engine.fabric.autocast():
            return self._loss.targets(images)

    def __call__(self, images: torch.Tensor, labels: torch.Tensor, targets: torch.Tensor | None) -> None:
        """One step on one batch, with the teacher's `targets` for it if there is one."""
        self.optimizer.zero_grad(set_to_none=True)
        scores = self._forward(images)
        # Autocast computes the loss itself in full precision.
        with self._engine.fabric.autocast():
            loss = self._loss(scores, labels, targets)
        self._engine.backward(loss)
        if self._cast is not None:
            self._cast.collect_gradients_()
        # To their true scale, before the rule adds to them.
        self._engine.fabric.strategy.precision.unscale_gradients(self.optimizer)
        self._rule.add_gradient_()
        self._fabric_optimizer.step()
        if self.average is not None:
            self.average.update_()
        with torch.no_grad():
            right = (scores.argmax(dim=1) == labels).sum()
            self.sums += torch.stack([loss.detach(), right])

    def momenta(self) -> list[torch.Tensor]:
        """The optimizer's tensors in the order of the parameters; none for SGD without momentum."""
        return [value for state in self.optimizer.state.values() for value in state.values()]

    def tensors(self) -> list[torch.Tensor]:
        """Every tensor that a step changes."""
        averaged = [] if self.average is None else list(self.average.model.state_dict().values())
        return [*self.model.state_dict().values(), *self.momenta(), *averaged, self.sums, *self._rule.tensors()]


def _optimizer(
    model: nn.Module, options: StageRecipe, *, on_device: bool, device: torch.device
) -> torch.optim.Optimizer:
    """The optimizer of a stage, whose state exists from the start, at zero: checkpoints and graphs copy it in place."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # A learning rate on the device needs the fused form.
    lr = torch.tensor(options.lr, device=device) if on_device else options.lr
    fused = True if on_device else None
    decay = options.weight_decay
    optimizer: torch.optim.Optimizer
    if options.optimizer == "adamw":
        optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=decay, fused=fused, capturable=on_device)
        for parameter in parameters:
            # Steps are counted on the host, unless a graph counts them.
            counter = torch.zeros((), dtype=torch.float32, device=device if on_device else "cpu")
            moments = {key: torch.zeros_like(parameter, requires_grad=False) for key in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter].update({"step": counter, **moments})
        return optimizer
    optimizer = torch.optim.SGD(parameters, lr=lr, momentum=options.momentum, weight_decay=decay, fused=fused)
    if options.momentum > 0:
        for parameter in parameters:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


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
        # At the end of the step: a rate of zero would waste the first one.
        return stage.lr * (position + step) / stage.lr_warmup_epochs
    if stage.schedule == "cosine":
        progress = (position - stage.lr_warmup_epochs) / (stage.epochs - stage.lr_warmup_epochs)
        return stage.lr * (1 + math.cos(math.pi * progress)) / 2
    if stage.schedule == "steps":
        # At the middle of the step, so that a rounding error cannot miss the boundary.
        passed = sum(position + step / 2 > share * stage.epochs for share in DECAY_AT)
        return stage.lr * DECAY_FACTOR**passed
    return stage.lr
