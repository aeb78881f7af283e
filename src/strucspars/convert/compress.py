"""Grouping a trained network in one call, and the batch-norm statistics that no longer fit it then."""

import itertools
from collections.abc import Iterable, Iterator

import torch
from torch import distributed, nn
from torch.nn.modules.batchnorm import _BatchNorm

from strucspars.convert.conversion import convert_
from strucspars.convert.reconstruction import reconstruct_
from strucspars.core.plan import GroupingPlan
from strucspars.cost.counting import ExampleInputs, undisturbed
from strucspars.nn.groupable import FilterFn
from strucspars.nn.names import copied, unwrapped
from strucspars.sparsify.calibration import Calibration, CalibrationBatch, OnProgress
from strucspars.sparsify.config import SparsifyConfig
from strucspars.sparsify.one_shot import one_shot_plan


def compress(
    model: nn.Module,
    target: float | SparsifyConfig | GroupingPlan,
    *,
    calibration: Iterable[CalibrationBatch] | Calibration | None = None,
    filter_fn: FilterFn | None = None,
    example_inputs: ExampleInputs | None = None,
    on_progress: OnProgress | None = None,
) -> GroupingPlan:
    """Group the layers of a trained model in place, one-shot, and return the plan.

    With calibration images this takes minutes and needs no labels and no training: `one_shot_plan` chooses the group
    levels that cost the predictions least, and `reconstruct_` refits all layers to the dense network's outputs. Without
    images the network is not usable before it is trained.

    Args:
        model: any module; its layers are replaced by grouped ones.
        target: fraction of all parameters to remove, or all options, of which those of the training are not used; or a
            plan that `one_shot_plan` has made for this network.
        calibration: 256 to 1,024 training images: tensors, or pairs of images and labels, such as a `DataLoader`; at
            most the first 1,024 images are used.
        filter_fn: called as `filter_fn(module, name)`; False leaves a layer alone.
        example_inputs: a tensor or a tuple of them to count MACs with and to trace the network; needed for
            `budget="macs"` and for shared orders, unless there are calibration images.
        on_progress: called as `on_progress(what, done, total)`, such as `("reconstruction", 12, 53)`, during long work.

    Raises:
        ValueError: the target cannot be reached, or `calibration` holds no batch; the model is unchanged then.

    >>> model = nn.Sequential(nn.Conv2d(4, 8, 3, bias=False))
    >>> compress(model, target=0.5, calibration=torch.randn(4, 16, 4, 9, 9)).removed_param_fraction
    0.5
    >>> type(model[0]).__name__
    'ShuffledGroupConv2d'
    """
    data = None if calibration is None else Calibration.of(calibration)
    if isinstance(target, GroupingPlan):
        plan = target
    else:
        plan = one_shot_plan(
            model, target, calibration=data, filter_fn=filter_fn, example_inputs=example_inputs, on_progress=on_progress
        )
    if data is None:
        convert_(model, plan)
        return plan
    dense = copied(unwrapped(model))
    convert_(model, plan)
    reconstruct_(model, dense, data, on_progress=on_progress)
    return plan


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
    batches = _checked_batches("batches", batches)
    device = next(itertools.chain(model.parameters(), model.buffers())).device
    momenta = [norm.momentum for norm in norms]
    try:
        with undisturbed(model):
            for norm in norms:
                norm.train().reset_running_stats()
                norm.momentum = None  # the plain mean of all batches
            for batch in batches:
                images = batch if isinstance(batch, torch.Tensor) else batch[0]
                model(images.to(device))
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        for norm in norms:
            _average_over_processes_(norm)


def _checked_batches(name: str, batches: Iterable[CalibrationBatch]) -> Iterator[CalibrationBatch]:
    batches = iter(batches)
    for first in batches:
        return itertools.chain([first], batches)
    raise ValueError(f"{name} holds no batch; give at least one of images")


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
