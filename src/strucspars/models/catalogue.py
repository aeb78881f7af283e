"""Networks by name."""

import difflib
import importlib
import re
from collections.abc import Callable, Mapping
from contextlib import suppress

import torch
import torchvision
from torch import nn

from strucspars.core.checks import checked_at_least
from strucspars.core.registry import import_named, users_error
from strucspars.cost.counting import undisturbed
from strucspars.models.cifar import CifarResNet, PreactivationResNet

OWN_NETWORKS: Mapping[str, Callable[[int, int], nn.Module]] = {
    "preact-resnet": PreactivationResNet,
    "cifar-resnet": CifarResNet,
}
# For suggestions; any depth that the networks allow will do.
USUAL_DEPTHS = {"preact-resnet": (20, 56, 110, 164), "cifar-resnet": (20, 32, 44, 56, 110)}

TIMM = "timm:"

# There is no loss for auxiliary classifiers here. torchvision sets `transform_input` with its published weights, which
# expect inputs of another scale; weight files do not record it, so it is always set.
INCEPTIONS = ("googlenet", "inception_v3")
INCEPTION_OPTIONS = {"aux_logits": False, "init_weights": True, "transform_input": True}


def names_a_function(name: str) -> bool:
    """Whether this name refers to a function of the user's code, rather than to a library's network."""
    return ":" in name and not name.startswith(TIMM)


def build_model(
    name: str, *, num_classes: int, image_shape: tuple[int, int, int] | None = None, must_classify: bool = True
) -> nn.Module:
    """The network of this name, with fresh weights.

    Args:
        name: `preact-resnet20` (any depth 9 n + 2), `cifar-resnet56` (6 n + 2), a torchvision classifier, `timm:NAME`,
            or `package.module:function`, which is called with `num_classes`.
        image_shape: channels, height and width of an image that the network must take.
        must_classify: it must return `num_classes` scores for it, too.

    >>> type(build_model("cifar-resnet20", num_classes=100, image_shape=(3, 32, 32))).__name__
    'CifarResNet'
    """
    checked_at_least("num_classes", num_classes, 1)
    own = re.fullmatch(r"(.+?)([1-9][0-9]{0,3})", name)
    if own and own[1] in OWN_NETWORKS:
        try:
            model = OWN_NETWORKS[own[1]](int(own[2]), num_classes)
        except ValueError as error:
            raise ValueError(f"network {name!r}: {error}") from error
    elif name.startswith(TIMM):
        model = _timm_model(name, num_classes)
    elif names_a_function(name):
        function = import_named("network", name)
        try:
            model = function(num_classes=num_classes)
        except Exception as error:  # the user's code may raise anything
            raise ValueError(f"network {name!r}: building it fails: {users_error(error)}") from error
        if not isinstance(model, nn.Module):
            raise ValueError(f"network {name!r}: must return a torch.nn.Module, returned a {type(model).__name__}")
    elif name in torchvision_names():
        options = INCEPTION_OPTIONS if name in INCEPTIONS else {}
        model = torchvision.models.get_model(name, weights=None, num_classes=num_classes, **options)
    else:
        raise ValueError(f"there is no network {name!r}; {_suggestion(name)}")
    if image_shape is not None:
        check_takes_images(name, model, image_shape, num_classes=num_classes if must_classify else None)
    return model


def check_takes_images(
    name: str, model: nn.Module, image_shape: tuple[int, int, int], *, num_classes: int | None = None
) -> None:
    """Raise a `ValueError` unless a network of this name takes images of this shape, and returns so many scores."""
    try:
        with undisturbed(model):
            scores: object = model(torch.zeros(1, *image_shape))
    except Exception as error:  # networks complain about sizes in many ways
        reason = " ".join(str(error).split())
        raise ValueError(
            f"network {name!r} cannot take images of shape {image_shape}: {reason}; choose another shape "
            "(--image-shape, or data.image_size in a recipe) or another network"
        ) from error
    got = tuple(scores.shape) if isinstance(scores, torch.Tensor) else type(scores).__name__
    if num_classes is not None and got != (1, num_classes):
        raise ValueError(f"network {name!r} must return scores of shape {(1, num_classes)} for one image, got {got}")


def torchvision_names() -> list[str]:
    """Names of torchvision's classifiers."""
    # Without the module the list has detectors, segmentation and video too.
    names: list[str] = torchvision.models.list_models(module=torchvision.models)
    return names


def _suggestion(name: str) -> str:
    known = {plain: plain for plain in torchvision_names()}
    known |= {f"{kind}{depth}": f"{kind}{depth}" for kind, depths in USUAL_DEPTHS.items() for depth in depths}
    with suppress(ImportError):
        known = {plain: f"{TIMM}{plain}" for plain in importlib.import_module("timm").list_models()} | known
    near = difflib.get_close_matches(name, known, n=1)
    question = f"did you mean {known[near[0]]!r}? " if near else ""
    return (
        f"{question}Names are preact-resnet20, cifar-resnet56, those of torchvision's classifiers, timm:NAME and "
        "package.module:function"
    )


def _timm_model(name: str, num_classes: int) -> nn.Module:
    try:
        timm = importlib.import_module("timm")
    except ImportError as error:
        raise ValueError(f"network {name!r} needs timm, which cannot be imported: {error}; pip install timm") from error
    timm_name = name.removeprefix(TIMM)
    # Only registered names: others are addresses of a hub, and nothing is fetched here.
    if not timm.is_model(timm_name):
        near = difflib.get_close_matches(timm_name, timm.list_models(), n=1, cutoff=0.0)
        raise ValueError(f"timm has no network {timm_name!r}; did you mean '{TIMM}{near[0]}'?")
    model: nn.Module = timm.create_model(timm_name, pretrained=False, num_classes=num_classes)
    return model
