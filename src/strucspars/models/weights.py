"""The weights that networks start from: torchvision's by name, or those of a file."""

import logging
import pickle
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import nn

from strucspars.core.plan import GroupingPlan
from strucspars.export.storage import FORMAT_KEY, FORMAT_VERSION, PLAN_KEY, SELECTION_KEY, read_tensors, read_transforms
from strucspars.io.files import check_not_packed, open_file
from strucspars.models.catalogue import INCEPTIONS, torchvision_names
from strucspars.nn.layers import ORDER_NAMES, dense_weight
from strucspars.nn.names import COMPILED

logger = logging.getLogger(__name__)

AUXILIARY_HEADS = ("aux1.", "aux2.", "AuxLogits.")

PICKLED_SUFFIXES = (".pt", ".pth")
CHECKPOINT_SUFFIXES = (".safetensors", *PICKLED_SUFFIXES)
GIVE_A_FILE = f"give a {', '.join(CHECKPOINT_SUFFIXES)} file of a state dict"
# Where training scripts put the state dict in a checkpoint.
STATE_KEYS = ("state_dict", "model", "model_state_dict")


def load_weights_(model: nn.Module, source: str, name: str, *, with_classifier: bool = False) -> None:
    """Load stored weights into a model; on any error the model stays as it was.

    A classifier of another number of classes keeps its fresh weights, unless `with_classifier` is set, and auxiliary
    heads of torchvision's weights are left out; log lines say so.

    Args:
        source: a name of torchvision's weights, such as `DEFAULT`, or a `.safetensors`, `.pt` or `.pth` file of a state
            dict, bare or under one of `STATE_KEYS`. Nothing in a file is executed. Of a compressed network come the
            dense weights of the same function, with zeros outside its groups.
    """
    path = Path(source).expanduser()
    if path.suffix in CHECKPOINT_SUFFIXES or path.is_file():
        state, transforms = _checkpoint_state(path)
    else:
        state, transforms = _torchvision_state(source, name), {}
    where = f"weights {source!r} for network {name!r}"
    state = _without_wrappers(state, model)
    if name in INCEPTIONS and not all(transforms.values()):
        raise ValueError(
            f"{where} were trained with transform_input=False, and the network has True; name a function of your own "
            "that builds the network: package.module:function"
        )
    if name in torchvision_names():
        state = _as_built(state, model, where)
    classifier = _foreign_classifier(model, state, where)
    if classifier and with_classifier:
        classes, own_classes = (each[f"{classifier}.weight"].shape[0] for each in (state, model.state_dict()))
        raise ValueError(
            f"{where} are for {classes} classes, not {own_classes}; build the network for as many "
            f"(--classes {classes} on the command line)"
        )
    if classifier:
        logger.warning("%s: classifier %r has another number of classes and keeps its fresh weights", where, classifier)
        state = {key: value for key, value in state.items() if not key.startswith(f"{classifier}.")}
    # Into the model's own state, which knows its version: without one, some networks refuse (MNASNet).
    wanted = model.state_dict()
    wanted.update(state)
    model.load_state_dict(wanted)


def _torchvision_state(source: str, name: str) -> dict[str, Any]:
    is_folder = Path(source).expanduser().is_dir()
    missing = f"weights {source!r}: {'this is a folder' if is_folder else 'there is no such file'}"
    if name not in torchvision_names():
        raise ValueError(
            f"{missing}, and only networks of torchvision have weights by name, which {name!r} is not; {GIVE_A_FILE}"
        )
    choices = torchvision.models.get_model_weights(name)
    if source not in choices.__members__:
        raise ValueError(
            f"{missing}, and torchvision's weights of {name!r} are "
            f"{', '.join(choices.__members__)}; name one of these, or {GIVE_A_FILE}"
        )
    try:
        return dict(choices[source].get_state_dict(check_hash=True, progress=False))
    except (OSError, RuntimeError) as error:  # no connection; another hash
        raise ValueError(
            f"weights {source!r} of {name!r} could not be fetched: {error}; give a file instead"
        ) from error


def _as_built(state: Mapping[str, Any], model: nn.Module, where: str) -> dict[str, Any]:
    """Torchvision's weights under the names of its networks, without auxiliary heads."""
    # Stored DenseNets say `norm.1` where the network has `norm1`.
    state = {re.sub(r"(denselayer\d+\.(?:norm|conv))\.(?=[12]\.)", r"\1", key): value for key, value in state.items()}
    present = model.state_dict()
    surplus = {key for key in state if key.startswith(AUXILIARY_HEADS) and key not in present}
    if surplus:
        heads = sorted({key.partition(".")[0] for key in surplus})
        logger.warning("%s: the auxiliary heads %s are left out: the network is built without", where, ", ".join(heads))
    return {key: value for key, value in state.items() if key not in surplus}


def _checkpoint_state(path: Path) -> tuple[dict[str, Any], dict[str, bool]]:
    """The dense state dict of a file, and the `transform_input` settings that it records."""
    where = f"weights {str(path)!r}"
    if not path.exists() or path.is_dir():
        raise ValueError(f"{where}: {'this is a folder' if path.is_dir() else 'there is no such file'}; {GIVE_A_FILE}")
    content: Any
    metadata: dict[str, str] = {}
    try:
        if path.suffix == ".safetensors":
            content, metadata = read_tensors(path)
        else:
            with open_file(path) as file:
                check_not_packed(file)
                content = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        # The rest of torch's message explains how to disable the protection.
        name = re.search(r"GLOBAL ([\w.]+)", str(error))
        foreign = f" ({name[1]})" if name else ""
        raise ValueError(
            f"{where}: holds more than tensors{foreign}, or is damaged, and was not executed; save model.state_dict() "
            "alone"
        ) from error
    except PermissionError:
        raise
    except Exception as error:  # a damaged file can fail anywhere in the reader
        reason = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(":")
        raise ValueError(
            f"{where}: the file is damaged, or of another kind than its name says ({reason}); {GIVE_A_FILE}"
        ) from error
    if SELECTION_KEY in metadata:
        raise ValueError(f"{where}: this network is slimmed already; give dense weights")
    if PLAN_KEY in metadata:
        plan = GroupingPlan.from_json(metadata[PLAN_KEY], where)
        if metadata.get(FORMAT_KEY) != FORMAT_VERSION and any(layer.group_level > 1 for layer in plan.layers.values()):
            raise ValueError(f"{where}: it is of another storage format; save the network again with this version")
        content = dense_state(content, plan, where)
    for key in STATE_KEYS:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    entries = content.items() if isinstance(content, Mapping) else ()
    if not entries or not all(isinstance(key, str) and isinstance(value, torch.Tensor) for key, value in entries):
        found = f"keys {_first_of(list(content))}" if isinstance(content, Mapping) else type(content).__name__
        raise ValueError(
            f"{where}: must hold a state dict of tensors, bare or under one of "
            f"{', '.join(map(repr, STATE_KEYS))}, got {found}; save model.state_dict()"
        )
    return dict(content), read_transforms(metadata, where)


def dense_state(tensors: Mapping[str, torch.Tensor], plan: GroupingPlan, where: str) -> dict[str, torch.Tensor]:
    """The state of the dense network that computes what a compressed one does, with zeros outside the groups."""
    if plan.narrowed:
        raise ValueError(f"{where}: this network has lost channels, and has no weights for the dense one; give others")
    grouped = {name: layer for name, layer in plan.layers.items() if layer.group_level > 1}
    orders = {f"{name}.{order}" for name in grouped for order in ORDER_NAMES}
    state = {key: value for key, value in tensors.items() if key not in orders}
    for name, layer in grouped.items():
        groups = torch.Size((layer.weight_shape[0], layer.weight_shape[1] // layer.num_groups, *layer.weight_shape[2:]))
        weight = state.get(f"{name}.weight")
        if weight is None or weight.shape != groups:
            raise ValueError(f"{where}: {name}.weight contradicts the file's own plan; restore the file from a copy")
        state[f"{name}.weight"] = dense_weight(weight, layer)
    return state


def _without_wrappers(state: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """Names without those of `DistributedDataParallel` around the network or `torch.compile` anywhere in it."""
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
    # The layer registered last, the only rule that holds for all libraries.
    kinds = nn.Linear | nn.modules.conv._ConvNd
    classifier = next((name for name, layer in reversed([*model.named_modules()]) if isinstance(layer, kinds)), "")
    only_outputs_differ = f"{classifier}.weight" in differing and all(
        key.startswith(f"{classifier}.") and state[key].shape[1:] == present[key].shape[1:] for key in differing
    )
    shapes = [f"{key} {tuple(state[key].shape)} where {tuple(present[key].shape)} is wanted" for key in differing]
    complaints = {
        # Weights saved before PyTorch 0.4.1 have no num_batches_tracked.
        "the weights lack": [key for key in present if key not in state and not key.endswith("num_batches_tracked")],
        "the network lacks": [key for key in state if key not in present],
        "shapes differ": [] if only_outputs_differ else shapes,
    }
    if any(complaints.values()):
        reasons = "; ".join(f"{title}: {_first_of(found)}" for title, found in complaints.items() if found)
        raise ValueError(f"{where} belong to another network: {reasons}; name the network that they were saved of")
    return classifier if only_outputs_differ else None


def _first_of(texts: Sequence[object], limit: int = 5) -> str:
    return ", ".join(map(str, texts[:limit])) + (f" and {len(texts) - limit} more" if len(texts) > limit else "")
