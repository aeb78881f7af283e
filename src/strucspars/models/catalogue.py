"""Networks by name, and the weights they start from."""

import difflib
import importlib
import importlib.util
import inspect
import logging
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torchvision
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from strucspars.core.checks import checked_at_least
from strucspars.export.input_transform import InputTransforms
from strucspars.measure.counting import undisturbed
from strucspars.models.cifar_resnet import CifarResNet
from strucspars.models.preactivation_resnet import PreactivationResNet

logger = logging.getLogger(__name__)

OWN_NETWORKS: Mapping[str, Callable[[int, int], nn.Module]] = {
    "preact-resnet": PreactivationResNet,
    "cifar-resnet": CifarResNet,
}
# For suggestions; any depth that the networks allow will do.
USUAL_DEPTHS = {"preact-resnet": (20, 56, 110, 164), "cifar-resnet": (20, 32, 44, 56, 110)}

TIMM = "timm:"

# While training, these return several outputs by default, for which nothing here has a loss. Their published weights
# want inputs of another scale than other networks: `transform_input` is what torchvision sets with them. It is set for
# fresh weights too, whose first norms all but undo it: no file of tensors tells of it, so the name has to.
INCEPTIONS = ("googlenet", "inception_v3")
INCEPTION_OPTIONS = {"aux_logits": False, "init_weights": True, "transform_input": True}
TORCHVISIONS_TRANSFORMS = InputTransforms({"": True})

# What `torch.compile` calls the module that it wraps.
COMPILED = "_orig_mod"

CHECKPOINT_SUFFIXES = (".safetensors", ".pt", ".pth")


def names_a_function(name: str) -> bool:
    """Whether building this network means running code that the name leads to, rather than a library's.

    >>> names_a_function("my_package.networks:small"), names_a_function("timm:resnet18")
    (True, False)
    """
    return ":" in name and not name.startswith(TIMM)


def build_model(
    name: str, *, num_classes: int, image_shape: tuple[int, int, int] | None = None, must_classify: bool = True
) -> nn.Module:
    """The network of this name, with fresh weights.

    GoogLeNet and Inception v3 of torchvision are as it builds them for its weights: with `transform_input`, for images
    normalised as for the other networks, and here without auxiliary classifiers.

    Args:
        name: `preact-resnet20` (any depth 9 n + 2), `cifar-resnet56` (6 n + 2), a torchvision classifier, `timm:NAME`,
            or `package.module:function`, which is called with `num_classes`.
        num_classes: outputs.
        image_shape: channels, height and width of an image. If given, the network must take one.
        must_classify: it must return `num_classes` scores for it, too.

    Raises:
        ValueError: there is no such network, or it does not fit the images.

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
        model = _model_of_function(name, num_classes)
    elif name in torchvision_names():
        options = INCEPTION_OPTIONS if name in INCEPTIONS else {}
        model = torchvision.models.get_model(name, weights=None, num_classes=num_classes, **options)
    else:
        raise ValueError(f"there is no network {name!r}; {_suggestion(name)}")
    if image_shape is not None:
        outputs = _outputs(name, model, image_shape)
        if must_classify:
            _check_scores(name, outputs, num_classes)
    return model


def torchvision_names() -> list[str]:
    """Names of torchvision's classifiers.

    >>> "resnet50" in torchvision_names()
    True
    """
    # Without the module the list has detectors, segmentation and video too.
    names: list[str] = torchvision.models.list_models(module=torchvision.models)
    return names


def load_weights_(model: nn.Module, source: str, name: str, *, with_classifier: bool = False) -> None:
    """Put stored weights into a model, or leave it as it was.

    A classifier of another number of classes keeps its fresh weights; a log line says so. Another names the auxiliary
    heads of torchvision's weights, which its networks are built without here. Most files do not tell whether their
    GoogLeNet or Inception v3 was trained with `transform_input`; a third line says what it is taken for.

    Args:
        model: what `build_model` built.
        source: a name of torchvision's weights, such as `DEFAULT`, or a checkpoint: a `.safetensors`, `.pt` or `.pth`
            file of a state dict, bare or under the key `state_dict` or `model`. Nothing in a file is executed.
        name: of the network, as in `build_model`.
        with_classifier: make another number of classes an error instead.

    Raises:
        ValueError: there are no such weights, the file is damaged, or they belong to another network.
    """
    path = Path(source).expanduser()
    if path.suffix in CHECKPOINT_SUFFIXES or path.is_file():
        state, transforms = _checkpoint_state(path), _told_transforms(path)
    else:
        state, transforms = _torchvision_state(source, name), TORCHVISIONS_TRANSFORMS
    where = f"weights {source!r} for network {name!r}"
    state = _without_wrappers(state, model)
    if name in INCEPTIONS:
        _check_transforms(model, transforms, where)
    if name in torchvision_names():
        state = _as_built(state, model, where)
    classifier = _foreign_classifier(model, state, where)
    if classifier and with_classifier:
        classes, wanted = (each[f"{classifier}.weight"].shape[0] for each in (state, model.state_dict()))
        raise ValueError(
            f"{where} are for {classes} classes, not {wanted}; build the network for as many (--classes {classes} on "
            "the command line)"
        )
    if classifier:
        logger.warning("%s: classifier %r has another number of classes and keeps its fresh weights", where, classifier)
        state = {key: value for key, value in state.items() if not key.startswith(f"{classifier}.")}
    _load_all_or_nothing_(model, state, where)


def _told_transforms(path: Path) -> InputTransforms:
    """Whether the network of a file transforms its inputs, as far as it tells: what `strucspars.save` wrote does."""
    if path.suffix != ".safetensors":
        return InputTransforms({})
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
    try:
        return InputTransforms.from_metadata(metadata)
    except ValueError as error:
        raise ValueError(f"weights {str(path)!r}: {error}") from error


def _check_transforms(model: nn.Module, told: InputTransforms, where: str) -> None:
    """The model is not changed: whoever builds it again by its name would not know."""
    present = InputTransforms.of(model)
    remedy = "name a function of your own that builds the network: package.module:function"
    if not told.by_name:
        logger.warning(
            "%s: taken to be trained with transform_input=%s, which the file does not tell; for the other, %s",
            *(where, present.by_name.get(""), remedy),
        )
    elif told != present:
        raise ValueError(
            f"{where} were trained with transform_input={told.by_name.get('')}, and the network has "
            f"{present.by_name.get('')}; {remedy}"
        )


def _suggestion(name: str) -> str:
    known = {plain: plain for plain in torchvision_names()}
    known |= {f"{kind}{depth}": f"{kind}{depth}" for kind, depths in USUAL_DEPTHS.items() for depth in depths}
    if importlib.util.find_spec("timm"):
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


def _model_of_function(name: str, num_classes: int) -> nn.Module:
    function = _imported(name)
    if not callable(function):
        raise ValueError(f"network {name!r}: this is a {type(function).__name__}, not a function that builds a network")
    try:
        inspect.signature(function).bind(num_classes=num_classes)
    except (TypeError, ValueError) as error:  # ValueError: a builtin that does not tell what it takes
        raise ValueError(f"network {name!r}: must be callable with num_classes alone: {error}") from error
    model = function(num_classes=num_classes)
    if not isinstance(model, nn.Module):
        raise ValueError(f"network {name!r}: must return a torch.nn.Module, returned a {type(model).__name__}")
    return model


def _imported(name: str) -> object:
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ValueError(f"network {name!r}: {error}; is it installed, or its folder in PYTHONPATH?") from error
    except (ImportError, ValueError, TypeError) as error:  # nameless and relative names
        raise ValueError(f"network {name!r}: {module_name!r} cannot be imported: {error}") from error
    try:
        found: object = getattr(module, attribute)
    except AttributeError as error:
        near = difflib.get_close_matches(attribute, dir(module), n=1)
        hint = f"did you mean {near[0]!r}?" if near else "write package.module:function"
        raise ValueError(f"network {name!r}: module {module_name!r} has no {attribute!r}; {hint}") from error
    return found


def _outputs(name: str, model: nn.Module, image_shape: tuple[int, int, int]) -> object:
    try:
        with undisturbed(model):
            outputs: object = model(torch.zeros(1, *image_shape))
    except Exception as error:  # networks complain about sizes in many ways
        reason = " ".join(str(error).split())
        raise ValueError(f"network {name!r} cannot take images of shape {image_shape}: {reason}") from error
    return outputs


def _check_scores(name: str, scores: object, num_classes: int) -> None:
    if not isinstance(scores, torch.Tensor) or scores.shape != (1, num_classes):
        got = tuple(scores.shape) if isinstance(scores, torch.Tensor) else type(scores).__name__
        raise ValueError(f"network {name!r} must return scores of shape {(1, num_classes)} for one image, got {got}")


def _torchvision_state(source: str, name: str) -> dict[str, Any]:
    if name not in torchvision_names():
        raise ValueError(
            f"weights {source!r}: there is no such file, and only networks of torchvision have weights by name, which "
            f"{name!r} is not; give a {', '.join(CHECKPOINT_SUFFIXES)} file"
        )
    choices = torchvision.models.get_model_weights(name)
    if source not in choices.__members__:
        raise ValueError(
            f"weights {source!r}: there is no such file, and torchvision's weights of {name!r} are "
            f"{', '.join(choices.__members__)}"
        )
    try:
        state: Mapping[str, Any] = choices[source].get_state_dict(check_hash=True, progress=False)
    except (OSError, RuntimeError) as error:  # no connection; another hash
        raise ValueError(
            f"weights {source!r} of {name!r} could not be fetched: {error}; give a file that is here instead"
        ) from error
    return dict(state)


def _as_built(state: Mapping[str, Any], model: nn.Module, where: str) -> dict[str, Any]:
    """Torchvision's weights, from wherever, under the names of its networks and without auxiliary heads."""
    state = {_present_key(key): value for key, value in state.items()}
    present = model.state_dict()
    surplus = {key for key in state if _is_auxiliary(key) and key not in present}
    if surplus:
        heads = sorted({key.partition(".")[0] for key in surplus})
        logger.warning("%s: the auxiliary heads %s are left out: the network is built without", where, ", ".join(heads))
    return {key: value for key, value in state.items() if key not in surplus}


def _present_key(key: str) -> str:
    """Stored DenseNets say `norm.1` where the network has `norm1`."""
    return re.sub(r"(denselayer\d+\.(?:norm|conv))\.(?=[12]\.)", r"\1", key)


def _is_auxiliary(key: str) -> bool:
    return key.startswith(("aux1.", "aux2.", "AuxLogits."))


def _checkpoint_state(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"weights {str(path)!r}: there is no such file")
    try:
        if path.suffix == ".safetensors":
            content: Any = load_file(path)
        else:
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"weights {str(path)!r}: holds more than tensors, or is damaged, and was not executed; save "
            f"model.state_dict() alone: {' '.join(str(error).split())}"
        ) from error
    except Exception as error:  # a damaged file can fail anywhere in the reader
        raise ValueError(f"weights {str(path)!r}: the file cannot be read: {' '.join(str(error).split())}") from error
    for key in ("state_dict", "model"):
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not _is_state(content):
        found = f"keys {_first_of(list(content))}" if isinstance(content, Mapping) else type(content).__name__
        raise ValueError(
            f"weights {str(path)!r}: must hold a state dict of tensors, bare or under 'state_dict' or 'model', "
            f"got {found}"
        )
    return dict(content)


def _is_state(content: object) -> bool:
    return (
        isinstance(content, Mapping)
        and len(content) > 0
        and all(isinstance(key, str) and isinstance(value, torch.Tensor) for key, value in content.items())
    )


def _without_wrappers(state: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """Names as in the network itself, not in `DistributedDataParallel` around it or `torch.compile` anywhere in it."""
    present = list(model.state_dict())
    if not any(COMPILED in key.split(".") for key in present):
        state = {".".join(part for part in key.split(".") if part != COMPILED): state[key] for key in state}
    if all(key.startswith("module.") for key in state) and not any(key.startswith("module.") for key in present):
        state = {key.removeprefix("module."): value for key, value in state.items()}
    return state


def _foreign_classifier(model: nn.Module, state: Mapping[str, torch.Tensor], where: str) -> str | None:
    """Name of the classifier if the weights have one of another number of classes; an error if more is different."""
    present = {key: value for key, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    differing = [key for key in present if key in state and state[key].shape != present[key].shape]
    classifier = _classifier_name(model)
    only_outputs_differ = f"{classifier}.weight" in differing and all(
        key.startswith(f"{classifier}.") and state[key].shape[1:] == present[key].shape[1:] for key in differing
    )
    shapes = [f"{key} {tuple(state[key].shape)} where {tuple(present[key].shape)} is wanted" for key in differing]
    complaints = {
        # Networks of before PyTorch 0.4.1 did not count their batches.
        "the weights lack": [key for key in present if key not in state and not key.endswith("num_batches_tracked")],
        "the network lacks": [key for key in state if key not in present],
        "shapes differ": [] if only_outputs_differ else shapes,
    }
    if any(complaints.values()):
        reasons = "; ".join(f"{title}: {_first_of(found)}" for title, found in complaints.items() if found)
        raise ValueError(f"{where} belong to another network: {reasons}")
    return classifier if only_outputs_differ else None


def _classifier_name(model: nn.Module) -> str:
    """The last layer that was registered; there is no better rule that holds for all libraries."""
    kinds = nn.Linear | nn.modules.conv._ConvNd
    return next((name for name, layer in reversed(list(model.named_modules())) if isinstance(layer, kinds)), "")


def _load_all_or_nothing_(model: nn.Module, state: Mapping[str, torch.Tensor], where: str) -> None:
    wanted = model.state_dict()
    present = dict(wanted)
    before = {key: value.clone() for key, value in present.items() if isinstance(value, torch.Tensor)}
    # Into the model's own state, which knows its version: without one, some networks refuse (MNASNet).
    wanted.update(state)
    try:
        model.load_state_dict(wanted)
    except Exception as error:  # a model's own hooks may raise anything
        # Not by loading again, which would call the hooks again: these tensors share the parameters' memory.
        for key, value in before.items():
            present[key].copy_(value)
        raise ValueError(f"{where} cannot be loaded: {' '.join(str(error).split())}") from error


def _first_of(texts: Sequence[object], limit: int = 5) -> str:
    more = f" and {len(texts) - limit} more" if len(texts) > limit else ""
    return ", ".join(map(str, texts[:limit])) + more
