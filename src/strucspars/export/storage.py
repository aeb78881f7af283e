"""One safetensors file per network, the plan in its metadata. Nothing in it is ever executed.

The file holds the tensors of the converted model; the user's own code builds the dense one, and the plan tells how to
group it. So there is no class to pickle, and no model zoo to depend on.
"""

import hashlib
import json
import os
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialised
from torch import nn

from strucspars._version import __version__
from strucspars.convert.conversion import check_fits, convert_, model_plan, plan_of
from strucspars.core.plan import GroupingPlan
from strucspars.cost.gathers import FOLDED_PLAN_KEY, is_folded
from strucspars.export.input_transform import InputTransforms
from strucspars.io.files import check_readable, replace_file
from strucspars.nn.groupable import parameter_key
from strucspars.nn.layers import check_plain_weights, is_grouped, is_masked, planned_orders
from strucspars.nn.names import (
    bare_modules,
    bare_state_names,
    inner_name,
    modules_by_name,
    state_versions,
    under_first_names,
)

PLAN_KEY = "strucspars.plan"
SELECTION_KEY = "strucspars.channel_selection"
VERSION_KEY = "strucspars.version"
FORMAT_KEY = "strucspars.format"
# Since format 2 the rows of a grouped weight and the bias are in the original order of the output channels.
FORMAT = "2"
# JSON: the version of every module's state that is not 1, which PyTorch keeps in the state's `_metadata`.
STATE_VERSIONS_KEY = "strucspars.state_versions"
# What safetensors calls its own entry in a file's header.
METADATA = "__metadata__"

Model = TypeVar("Model", bound=nn.Module)


def save(model: nn.Module, path: str | os.PathLike[str], *, plan: GroupingPlan | None = None) -> None:
    """Write a converted (or dense) model to one safetensors file, all or nothing.

    The file appears under its name only when it is complete; a file that was there before survives any failure. Names
    in it are those of the network itself, also where `torch.compile`, `DistributedDataParallel` or their like have
    wrapped it or parts of it. Whether torchvision's GoogLeNet or Inception transforms its inputs is kept beside its
    tensors.

    Args:
        model: what to save.
        path: where.
        plan: the plan that the model was converted with, to keep its target and threshold too. None: the grouping
            alone, read off the model.

    >>> import strucspars as ss, tempfile
    >>> model = nn.Sequential(nn.Conv2d(4, 8, 3, bias=False))
    >>> _ = ss.convert_(model, ss.one_shot_plan(model, target=0.5))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     ss.save(model, f"{folder}/small.safetensors")
    ...     restored = ss.load(f"{folder}/small.safetensors", nn.Sequential(nn.Conv2d(4, 8, 3, bias=False)))
    >>> torch.equal(restored[0].weight, model[0].weight)
    True
    """
    path = Path(path)
    check_plain_weights(model)
    tensors, present = _tensors_to_save(_network_inside(model)), model_plan(model)
    _check_state_is_whole(tensors, present)
    plan = present if plan is None else under_first_names(model, plan)
    if {name: layer for name, layer in plan.layers.items() if layer.group_level > 1} != dict(present.layers):
        raise ValueError(
            "the plan is not the one that the model was converted with; leave it out or give the right one"
        )
    versions = {name: version for name, version in state_versions(_network_inside(model)).values() if version != 1}
    metadata = {
        PLAN_KEY: plan.to_json(),
        VERSION_KEY: __version__,
        FORMAT_KEY: FORMAT,
        STATE_VERSIONS_KEY: json.dumps(versions, sort_keys=True),
    }
    write_tensors(path, tensors, metadata | InputTransforms.of(model).as_metadata())


def _network_inside(model: nn.Module) -> nn.Module:
    # Past wrappers with hooks too: its tensors are asked for, not what it computes.
    while (inner := inner_name(model)) is not None:
        model = model.get_submodule(inner)
    return model


def _bare_state(model: nn.Module) -> dict[str, torch.Tensor]:
    state = model.state_dict()
    return {bare: state[name] for name, bare in bare_state_names(model).items()}


def _tensors_to_save(model: nn.Module) -> dict[str, torch.Tensor]:
    state = _bare_state(model)
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            raise ValueError(f"{name!r} of the model's state is a {type(value).__name__}; a file holds tensors only")
        if value.layout != torch.strided or not _has_known_precision(value):
            raise ValueError(
                f"{name!r} of the model is a tensor of {value.layout} and {value.dtype}, which the file format lacks; "
                "make it a dense one of another precision, or leave it out of the state (persistent=False)"
            )
        if value.is_meta:
            raise ValueError(
                f"{name!r} of the model is on the meta device, where there is nothing to save; call "
                "model.to_empty(device=...) and load the weights first"
            )
    return state


def _check_state_is_whole(state: Mapping[str, torch.Tensor], plan: GroupingPlan) -> None:
    """Raise a `ValueError` where a model's own `state_dict` leaves out a grouped layer: no file could bring it back."""
    for name, layer in plan.layers.items():
        if layer.group_level > 1 and _key(name, "weight") not in state:
            raise ValueError(
                f"layer {name!r} is not in the model's state_dict(), which leaves it out or calls it otherwise, so "
                "that it could not be loaded; give the network that this one holds, or a state_dict() that is whole"
            )


def _has_known_precision(tensor: torch.Tensor) -> bool:
    try:
        serialised({"any": tensor.new_empty(0, device="cpu")})
    except (KeyError, RuntimeError):
        return False
    return True


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file that appears under its name only when it is complete, or raise an `OSError`.

    The same tensors and metadata give the same bytes.
    """
    # Tied tensors are written once per name: the format refuses tensors that overlap in memory.
    separate = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    try:
        content = serialised(separate, metadata)
    except SafetensorError as error:
        raise OSError(f"cannot write {path}: {error}") from error
    header_end = 8 + int.from_bytes(content[:8], "little")
    with replace_file(path, follow_link=True) as unfinished, unfinished.open("wb") as file:
        # As bytes, written here: the library's own files can be read by nobody else.
        file.write(_in_order(content[8:header_end]))
        file.write(memoryview(content)[header_end:])


def _in_order(header: bytes) -> bytes:
    """The header with its length before it, and its metadata by name: the library has them in any order."""
    entries = json.loads(header)
    entries[METADATA] = dict(sorted(entries[METADATA].items()))
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    # The format aligns the tensors that follow.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def load(path: str | os.PathLike[str], model: Model) -> Model:
    """Turn a freshly built, dense model into the saved one, in place; returns the model.

    Everything is checked before anything changes: if the file is damaged, foreign, newer, or belongs to another
    network, the model stays as it is.

    Args:
        path: a file that `save` has written.
        model: the same network, dense, built by its own code; `torch.compile` may have wrapped it, or parts of it.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file or the model does not fit; the message says where.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(nn.Linear(2, 2), f"{folder}/dense.safetensors")
    ...     load(f"{folder}/dense.safetensors", nn.Linear(2, 2))
    Linear(in_features=2, out_features=2, bias=True)
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no saved model at {path}")
    saved, network = _read(path), _network_inside(model)
    _check_dense(network)
    try:
        check_fits(network, saved.plan)
        saved.input_transforms.check_fit(network)
    except ValueError as error:
        raise ValueError(f"{path} belongs to another network: {error}") from error
    _check_state_is_whole(_bare_state(network), under_first_names(network, saved.plan))
    _check_tensors(path, saved.tensors, expected=_expected_tensors(network, saved.plan))
    _check_tied(path, saved.tensors, _bare_state(network))
    _check_orders(path, saved.tensors, saved.plan)
    convert_(network, saved.plan)
    state = OrderedDict((name, saved.tensors[bare]) for name, bare in bare_state_names(network).items())
    # Where PyTorch itself keeps them, and reads them again.
    state._metadata = {  # type: ignore[attr-defined]  # an attribute that PyTorch adds
        name: {"version": saved.state_versions.get(bare, 1)} for name, (bare, _) in state_versions(network).items()
    }
    network.load_state_dict(state)
    saved.input_transforms.set_(network)
    return model


@dataclass(frozen=True)
class _SavedNetwork:
    """What a file holds."""

    plan: GroupingPlan
    tensors: Mapping[str, torch.Tensor]
    input_transforms: InputTransforms
    state_versions: Mapping[str, int]


def read_tensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors and the metadata of a safetensors file; a `ValueError` where it is damaged."""
    check_readable(path)
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a mapping
            return tensors, file.metadata() or {}
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(
            f"{path} is not a readable safetensors file, or damaged: {error}; restore it from a copy"
        ) from error


def _read(path: Path) -> _SavedNetwork:
    tensors, metadata = read_tensors(path)
    if PLAN_KEY not in metadata:
        raise ValueError(f"{path} was not written by strucspars.save: it carries no plan")
    if metadata.get(FORMAT_KEY) != FORMAT:
        raise ValueError(
            f"{path} holds its weights in storage format {metadata.get(FORMAT_KEY, '1')}, this version reads format "
            f"{FORMAT}; save the network anew with this version"
        )
    try:
        plan = GroupingPlan.from_json(metadata[PLAN_KEY])
        versions = json.loads(metadata.get(STATE_VERSIONS_KEY, "{}"))
        return _SavedNetwork(plan, tensors, InputTransforms.from_metadata(metadata), versions)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _check_dense(model: nn.Module) -> None:
    """`load` groups a model that is dense and has real tensors; on any other it would go wrong halfway."""
    for name, module in bare_modules(model):
        if is_grouped(module) or is_masked(module):
            raise ValueError(f"layer {name!r} of the model is grouped or masked already; load into a freshly built one")
    for name, tensor in model.state_dict().items():
        if tensor.is_meta:
            raise ValueError(f"{name!r} of the model is on the meta device; call model.to_empty(device=...) first")


def _expected_tensors(model: nn.Module, plan: GroupingPlan) -> dict[str, torch.Tensor]:
    """Empty tensors in the shapes and precisions that the model's will have once it is converted."""
    expected = {name: tensor.to("meta") for name, tensor in _bare_state(model).items()}
    modules, names = modules_by_name(model), defaultdict(list)
    for name, module in bare_modules(model, remove_duplicate=False):
        names[module].append(name)
    for name, layer in plan.layers.items():
        out_channels, in_channels, *kernel = layer.weight_shape
        # A shared module stands in the state under each of its names.
        for alias in names[modules[name]] if layer.group_level > 1 else ():
            weight = expected[_key(alias, "weight")]
            expected[_key(alias, "weight")] = weight.new_empty(out_channels, in_channels // layer.num_groups, *kernel)
            expected |= {_key(alias, order): perm.to("meta") for order, perm in planned_orders(layer).items()}
    return expected


def _key(module: str, tensor: str) -> str:
    """The name of a module's tensor in the state; the model itself has no name."""
    return f"{module}.{tensor}" if module else tensor


def _check_tensors(path: Path, tensors: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    missing, unknown = sorted(set(expected) - set(tensors)), sorted(set(tensors) - set(expected))
    if missing or unknown:
        raise ValueError(f"{path} belongs to another network: it lacks {missing[:3]} and has {unknown[:3]} besides")
    for name, model_tensor in expected.items():
        shape, needed = tuple(tensors[name].shape), tuple(model_tensor.shape)
        if shape != needed:
            raise ValueError(f"{path}: {name!r} has shape {shape}, the model needs {needed}")
        kinds = [(tensor.is_floating_point(), tensor.is_complex()) for tensor in (tensors[name], model_tensor)]
        if kinds[0] != kinds[1]:
            raise ValueError(f"{path}: {name!r} holds {tensors[name].dtype}, the model needs {model_tensor.dtype}")


def _check_tied(path: Path, tensors: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor]) -> None:
    """What is one tensor in the model must be so in the file: of two, the last one would stay."""
    first_names: dict[object, str] = {}
    for name, tensor in state.items():
        first = first_names.setdefault((parameter_key(tensor), tensor.shape, tensor.stride(), tensor.dtype), name)
        if first != name and not _is_same(tensors[first], tensors[name]):
            raise ValueError(
                f"{path}: {first!r} and {name!r} differ, and are one tensor in the model; load into one in which they "
                "are not tied"
            )


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    # By their bytes: NaN is the same as itself.
    return torch.equal(*(tensor.reshape(-1).view(torch.uint8) for tensor in (one, other)))


def _check_orders(path: Path, tensors: Mapping[str, torch.Tensor], plan: GroupingPlan) -> None:
    """The stored orders must be the plan's: an index out of range would read foreign memory on some devices."""
    for name, layer in plan.layers.items():
        for order, perm in planned_orders(layer).items() if layer.group_level > 1 else ():
            if not torch.equal(tensors[_key(name, order)], perm):
                raise ValueError(f"{path}: {name!r} has an {order} that contradicts the plan; the file is damaged")


def plan_hash(plan: GroupingPlan) -> str:
    """SHA-256 of what a plan groups and how, as hexadecimal text.

    Layers that stay whole, the target and the version do not count: the same network gives the same text.

    >>> plan_hash(GroupingPlan({}))[:12]
    '44136fa355b3'
    """
    layers = json.loads(plan.to_json())["layers"]
    grouped = {name: layers[name] for name, layer in plan.layers.items() if layer.group_level > 1}
    return hashlib.sha256(json.dumps(grouped, sort_keys=True).encode()).hexdigest()


def hash_of_model(model: nn.Module) -> str | None:
    """The hash of the plan of a converted network, also of one that was folded; None where there is no plan."""
    plan = model.meta.get(FOLDED_PLAN_KEY) if is_folded(model) else plan_of(model)
    return plan_hash(plan) if isinstance(plan, GroupingPlan) and plan.layers else None
