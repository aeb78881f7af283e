"""Grouping a trained network in one call: plan from its weights, convert it, recalibrate its batch norms."""

from collections.abc import Iterable

from torch import nn

from strucspars.convert.conversion import convert_
from strucspars.convert.recalibration import CalibrationBatch, recalibrate_
from strucspars.core.plan import GroupingPlan
from strucspars.cost.counting import ExampleInputs
from strucspars.nn.groupable import FilterFn
from strucspars.sparsify.config import SparsifyConfig
from strucspars.sparsify.planning import one_shot_plan


def compress(
    model: nn.Module,
    target: float | SparsifyConfig,
    *,
    calibration: Iterable[CalibrationBatch] | None = None,
    filter_fn: FilterFn | None = None,
    example_inputs: ExampleInputs | None = None,
) -> GroupingPlan:
    """Group the layers of a trained model in place, one-shot, and return the plan.

    A one-shot plan loses much of the weights' norm: finetune the model before you judge it.

    Args:
        model: any module; its layers are replaced by grouped ones.
        target: fraction of all parameters to remove, or all options; those of the training are not used.
        calibration: tensors of images, or pairs of images and labels, such as a `DataLoader` of some training images;
            the batch-norm statistics are recomputed from them after the conversion. None keeps the statistics of the
            dense network, which no longer fit.
        filter_fn: called as `filter_fn(module, name)`; False leaves a layer alone.
        example_inputs: a tensor or a tuple of them to count MACs with; needed for `budget="macs"`.

    >>> model = nn.Sequential(nn.Conv2d(4, 8, 3, bias=False))
    >>> compress(model, target=0.5).removed_param_fraction
    0.5
    >>> type(model[0]).__name__
    'ShuffledGroupConv2d'
    """
    plan = one_shot_plan(model, target, filter_fn=filter_fn, example_inputs=example_inputs)
    convert_(model, plan)
    if calibration is not None:
        recalibrate_(model, calibration)
    return plan
