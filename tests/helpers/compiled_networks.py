"""Networks as TorchScript keeps them; tests that make some are marked with `SCRIPTING_WARNS`."""

import torch
from torch import nn


def scripted(model: nn.Module, images: torch.Tensor) -> nn.Module:
    """Compiled from its source; the images are for calls like `traced`."""
    module: nn.Module = torch.jit.script(model)
    return module


def traced(model: nn.Module, images: torch.Tensor) -> nn.Module:
    """Recorded while it computes."""
    module: nn.Module = torch.jit.trace(model, images)  # type: ignore[no-untyped-call]  # untyped in torch
    return module
