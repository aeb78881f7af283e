"""Counters of batch norms, kept out of captured steps: a kernel per norm and step, for a number that is known."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


def batch_norms_with_idle_counters(model: nn.Module) -> list[nn.modules.batchnorm._BatchNorm]:
    """The batch norms that count batches, but do not use the count: those with a momentum."""
    return [
        module
        for module in model.modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
        and module.momentum is not None
        and module.num_batches_tracked is not None
    ]


@contextmanager
def counters_set_aside(model: nn.Module) -> Iterator[list[torch.Tensor]]:
    """Let batch norms forget their counters for a while; they come back as the same tensors.

    Yields:
        The counters, for whoever counts instead.
    """
    norms = batch_norms_with_idle_counters(model)
    counters = [norm.get_buffer("num_batches_tracked") for norm in norms]
    for norm in norms:
        norm._buffers["num_batches_tracked"] = None
    try:
        yield counters
    finally:
        for norm, counter in zip(norms, counters, strict=True):
            norm._buffers["num_batches_tracked"] = counter
