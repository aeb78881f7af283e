"""Batch-norm statistics of a compressed network: removing weights changes what every later layer sees."""

import itertools
from collections.abc import Iterable, Sequence

import torch
from torch import distributed, nn
from torch.nn.modules.batchnorm import _BatchNorm

# Images, or a pair of images and labels, as a `DataLoader` yields them.
CalibrationBatch = torch.Tensor | Sequence[torch.Tensor]


@torch.no_grad()
def recalibrate_(model: nn.Module, batches: Iterable[CalibrationBatch]) -> None:
    """Recompute the statistics of all batch norms as the plain mean over some batches.

    Everything else runs as in evaluation, so dropout neither adds variance nor draws random numbers. Where
    `torch.distributed` is in use, each process brings its own batches and all get the same statistics.

    Args:
        model: changed in place; parameters and mode stay.
        batches: tensors of images, or pairs of images and labels; moved to the model's device.

    Raises:
        ValueError: there are no batches.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    >>> recalibrate_(model, [torch.randn(16, 3, 8, 8) for _ in range(4)])
    >>> int(model[1].num_batches_tracked)
    4
    """
    norms = [norm for norm in model.modules() if isinstance(norm, _BatchNorm) and norm.running_mean is not None]
    if not norms:
        return
    tensor = next(itertools.chain(model.parameters(), model.buffers()))
    batches = iter(batches)
    first = next(batches, None)
    if first is None:
        raise ValueError("recalibrate_ needs at least one batch of images, got none")
    modes = {module: module.training for module in model.modules()}
    momenta = [norm.momentum for norm in norms]
    model.eval()
    for norm in norms:
        norm.train().reset_running_stats()
        norm.momentum = None  # the plain mean of all batches
    try:
        for batch in itertools.chain([first], batches):
            images = batch if isinstance(batch, torch.Tensor) else batch[0]
            model(images.to(tensor.device))
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
        for module, training in modes.items():
            module.training = training
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        for norm in norms:
            _average_over_processes_(norm)


def _average_over_processes_(norm: _BatchNorm) -> None:
    """Mean of the means; variance within the processes plus that of their means."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    # Not the mean square minus the squared mean: a small variance beside a large mean would be lost.
    own_mean = norm.running_mean.double()
    mean = _mean_over_processes(own_mean)
    norm.running_var.copy_(_mean_over_processes(norm.running_var.double() + (own_mean - mean) ** 2))
    norm.running_mean.copy_(mean)


def _mean_over_processes(values: torch.Tensor) -> torch.Tensor:
    total = values.clone()
    distributed.all_reduce(total)
    return total / distributed.get_world_size()
