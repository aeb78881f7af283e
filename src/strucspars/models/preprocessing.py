"""How images are prepared for a network, by its own metadata."""

import importlib
import math
from dataclasses import replace
from pathlib import Path

import torchvision

from strucspars.core.plan import Preprocessing
from strucspars.export.storage import read_plan
from strucspars.models.catalogue import OWN_NETWORKS, TIMM, torchvision_names

CIFAR_SIZE = 32
INTERPOLATIONS = ("nearest", "bilinear", "bicubic")


def preprocessing_of(name: str, weights: str | None = None) -> Preprocessing:
    """What the images of a network go through, by the file of its weights, else by its library, else ImageNet's.

    >>> preprocessing_of("resnet50", "DEFAULT").resize, preprocessing_of("inception_v3").size
    (232, 299)
    """
    plan = None if weights is None else read_plan(Path(weights).expanduser())
    if plan is not None and plan.preprocessing is not None:
        return plan.preprocessing
    if name.startswith(TIMM):
        return _of_timm(name.removeprefix(TIMM))
    if name in torchvision_names():
        return _of_torchvision(name, weights)
    if name.startswith(tuple(OWN_NETWORKS)):
        return Preprocessing(size=CIFAR_SIZE, resize=usual_resize(CIFAR_SIZE))
    return Preprocessing()


def at_size(preprocessing: Preprocessing, size: int) -> Preprocessing:
    """The same for images of another size."""
    return preprocessing if preprocessing.size == size else replace(preprocessing, size=size, resize=usual_resize(size))


def usual_resize(size: int) -> int:
    """The shortest side before a crop of this size, in the proportion that is usual for ImageNet.

    >>> usual_resize(224)
    256
    """
    return round(size * 8 / 7)


def _of_torchvision(name: str, weights: str | None) -> Preprocessing:
    """By the published weights of this name; for a file and for fresh weights by those published first."""
    choices = torchvision.models.get_model_weights(name)
    chosen = choices[weights] if weights in choices.__members__ else next(iter(choices))
    transforms = chosen.transforms()
    return Preprocessing(
        mean=tuple(transforms.mean),
        std=tuple(transforms.std),
        size=transforms.crop_size[0],
        resize=transforms.resize_size[0],
        interpolation=transforms.interpolation.value,
    )


def _of_timm(name: str) -> Preprocessing:
    config = importlib.import_module("timm").get_pretrained_cfg(name)
    if config is None:
        return Preprocessing()
    size = config.input_size[-1]
    return Preprocessing(
        mean=tuple(config.mean),
        std=tuple(config.std),
        size=size,
        resize=math.floor(size / config.crop_pct),
        interpolation=config.interpolation if config.interpolation in INTERPOLATIONS else "bilinear",
    )
