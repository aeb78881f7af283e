"""An exponential moving average of a network's weights (EMA)."""

import torch
from torch import nn

from strucspars.nn.copying import copied


class AveragedModel:
    """A copy of a model that follows it slowly; updated on the device, all tensors at once.

    Floating-point buffers, such as batch-norm statistics, are averaged too.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model = copied(model).requires_grad_(False).eval()
        self._decay = decay
        # A tensor that has several names counts once: averaged under each of them, it would follow faster.
        pairs = list(dict(zip(_tensors(self.model), _tensors(model), strict=True)).items())
        floating = [pair for pair in pairs if pair[0].is_floating_point()]
        self._averages, self._sources = [pair[0] for pair in floating], [pair[1] for pair in floating]
        self._counters = [pair for pair in pairs if not pair[0].is_floating_point()]

    @torch.no_grad()
    def update_(self) -> None:
        """Move a step towards the model."""
        torch._foreach_lerp_(self._averages, self._sources, 1 - self._decay)

    @torch.no_grad()
    def copy_counters_(self) -> None:
        """Take over what cannot be averaged, once per epoch: captured steps do not count."""
        for average, source in self._counters:
            average.copy_(source)


def _tensors(model: nn.Module) -> list[torch.Tensor]:
    """What a model's `state_dict` holds, as the model's own tensors: one with two names is the same object twice."""
    return list(model.state_dict(keep_vars=True).values())
