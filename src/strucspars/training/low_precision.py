"""Mixed precision with few kernels: all weights are cast at once, instead of one by one where they are used.

Autocast casts every weight in the forward pass and every gradient in the backward pass, a kernel each. For small
networks these kernels are a good part of a step. The copies hold what autocast would compute.
"""

import torch
from torch import nn
from torch.func import functional_call

from strucspars.nn.shuffled import DENSE_AND_GROUPED_TYPES


class CastAtOnce(nn.Module):
    """A model whose convolutions and linear layers compute with half-precision copies of their parameters.

    Everything else stays as autocast has it, batch norms in full precision above all. The copies are refreshed before
    every forward pass; after the backward pass `collect_gradients_` brings their gradients to the parameters.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = model
        named = {
            parameter: f"{name}.{key}" if name else key
            for name, module in model.named_modules()
            # Exactly these: a subclass may compute something with its weight first, and that in full precision.
            if type(module) in DENSE_AND_GROUPED_TYPES
            for key, parameter in module.named_parameters(recurse=False)
            if parameter.requires_grad
        }
        # A shared parameter has one of its names here, and takes effect under all of them.
        self._names = list(named.values())
        self._parameters_in_full: list[torch.Tensor] = list(named)
        self._copies: list[torch.Tensor] = [
            parameter.detach().to(dtype).requires_grad_() for parameter in self._parameters_in_full
        ]

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """The model's forward pass, with its parameters as they are now."""
        with torch.no_grad():
            torch._foreach_copy_(self._copies, self._parameters_in_full)
        for copy in self._copies:
            copy.grad = None
        scores: torch.Tensor = functional_call(self.model, dict(zip(self._names, self._copies, strict=True)), images)
        return scores

    @torch.no_grad()
    def collect_gradients_(self) -> None:
        """Give the parameters the gradients of their copies, in full precision."""
        used = [pair for pair in zip(self._parameters_in_full, self._copies, strict=True) if pair[1].grad is not None]
        for parameter, _ in used:
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
        if used:
            gradients = [parameter.grad for parameter, _ in used if parameter.grad is not None]
            torch._foreach_copy_(gradients, [copy.grad for _, copy in used if copy.grad is not None])
