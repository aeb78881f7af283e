"""One safetensors file per network: the tensors of the converted model, with the plan in the metadata.

The user's own code builds the dense model, and the plan says how to group it, so nothing is pickled or executed.
"""

import hashlib
import json
import os
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialised
from torch import nn

from strucspars._version import __version__
from strucspars.convert.conversion import convert_, model_plan, plan_of
from strucspars.core.plan import GroupingPlan
from strucspars.cost.gathers import FOLDED_PLAN_KEY, is_folded
from strucspars.io.files import check_readable, replace_file
from strucspars.io.records import convert, parse_json
from strucspars.nn.layers import check_plain_weights, is_grouped, is_masked
from strucspars.nn.names import (
    bare_modules,
    bare_state_names,
    copied,
    inner_name,
    modules_by_name,
    state_versions,
    under_first_names,
)
from strucspars.nn.narrowing import narrowed_from

PLAN_KEY = "strucspars.plan"
SELECTION_KEY = "strucspars.channel_selection"
VERSION_KEY = "strucspars.version"
FORMAT_KEY = "strucspars.format"
# Since format 2 the rows of a grouped weight and the bias are in the original order of the output channels.
FORMAT_VERSION = "2"
# JSON: versions of modules' states other than 1, which PyTorch keeps in the state's `_metadata`.
STATE_VERSIONS_KEY = "strucspars.state_versions"
# JSON: which modules transform their inputs. torchvision sets this with its published weights, which were trained on
# images of another scale, and no state dict records it.
TRANSFORM_KEY = "strucspars.transform_input"

# By name, so that saving does not import torchvision.
_WITH_TRANSFORM = frozenset({"torchvision.models.googlenet.GoogLeNet", "torchvision.models.inception.Inception3"})

Model = TypeVar("Model", bound=nn.Module)
Value = TypeVar("Value")


def save(model: nn.Module, path: str | os.PathLike[str], *, plan: GroupingPlan | None = None) -> None:
    """Write a converted (or dense) model to one safetensors file, all or nothing.

    On an error the previous file stays. Names are those of the network itself, without wrappers such as `torch.compile`
    and `DistributedDataParallel`. The `transform_input` of torchvision's GoogLeNet and Inception is saved too.

    Args:
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
    check_plain_weights(model)
    network = _network_inside(model)
    state = _bare_state(network)
    for name, value in state.items():
        _check_can_be_saved(name, value)
    present = model_plan(model)
    plan = present if plan is None else under_first_names(model, plan)
    if _what_it_makes(plan) != _what_it_makes(present):
        raise ValueError("the plan is not the one that the model was converted with; give that one or none")
    versions = {name: version for name, version in state_versions(network).values() if version != 1}
    metadata = {
        PLAN_KEY: plan.to_json(),
        FORMAT_KEY: FORMAT_VERSION,
        STATE_VERSIONS_KEY: json.dumps(versions, sort_keys=True),
    }
    if transforms := input_transforms(model):
        metadata[TRANSFORM_KEY] = json.dumps(transforms)
    write_tensors(path, state, metadata)


def _what_it_makes(plan: GroupingPlan) -> tuple[object, ...]:
    """What a converted model shows of a plan: not which orders are shared, nor the groups of channels it has lost."""
    layers = {name: plan.narrowed_layer(name) for name, layer in plan.layers.items() if layer.group_level > 1}
    unnamed = {name: layer.with_orders(layer.out_perm, layer.in_perm) for name, layer in layers.items()}
    return unnamed, plan.narrowed, plan.kept_channels


def load(path: str | os.PathLike[str], model: Model) -> Model:
    """Turn a freshly built, dense model into the saved one, in place; returns the model.

    All checks come first: if the file is damaged, of another program or a newer version, or belongs to another network,
    the model is not changed.

    Args:
        path: a file that `save` has written.
        model: the same network, dense, built by its own code; `torch.compile` may have wrapped it, or parts of it.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(nn.Linear(2, 2), f"{folder}/dense.safetensors")
    ...     load(f"{folder}/dense.safetensors", nn.Linear(2, 2))
    Linear(in_features=2, out_features=2, bias=True)
    """
    tensors, metadata = read_tensors(path)
    network = _network_inside(model)
    if PLAN_KEY not in metadata:
        raise ValueError(f"{path} was not written by strucspars.save: it carries no plan")
    if metadata.get(FORMAT_KEY) != FORMAT_VERSION:
        raise ValueError(
            f"{path} holds its weights in storage format {metadata.get(FORMAT_KEY, '1')}, this version reads format "
            f"{FORMAT_VERSION}; save the network again with this version"
        )
    plan = GroupingPlan.from_json(metadata[PLAN_KEY], str(path))
    transforms = read_transforms(metadata, str(path))
    versions = _read_json(metadata, STATE_VERSIONS_KEY, dict[str, int], str(path))
    for name, module in bare_modules(network):
        if is_grouped(module) or is_masked(module):
            raise ValueError(f"layer {name!r} of the model is grouped or masked already; load into a freshly built one")
        if narrowed_from(module) is not None:
            raise ValueError(f"module {name!r} of the model has lost channels; load into a freshly built one")
    for name, tensor in network.state_dict().items():
        if tensor.is_meta:
            raise ValueError(f"{name!r} of the model is on the meta device; call model.to_empty(device=...) first")
    try:
        needed = _bare_state(convert_(copied(network), plan))
    except ValueError as error:
        raise ValueError(f"{path} belongs to another network: {error}") from error
    # What conversion adds to the state are the channel orders.
    check_tensors(path, tensors, needed, fixed=needed.keys() - _bare_state(network).keys())
    convert_(network, plan)
    loaded = OrderedDict((name, tensors[bare]) for name, bare in bare_state_names(network).items())
    # PyTorch reads the versions from here.
    loaded._metadata = {  # type: ignore[attr-defined]  # an attribute that PyTorch adds
        name: {"version": versions.get(bare, 1)} for name, (bare, _) in state_versions(network).items()
    }
    network.load_state_dict(loaded)
    modules = modules_by_name(network)
    for name in transforms.keys() & input_transforms(network).keys():
        setattr(modules[name], "transform_input", transforms[name])  # noqa: B010  # not an attribute of all modules
    return model


def write_tensors(path: str | os.PathLike[str], state: Mapping[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file, all or nothing. The same tensors and metadata give the same bytes."""
    # Tied tensors are written once per name, because the format refuses tensors that overlap in memory.
    separate = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in state.items()}
    content = serialised(separate, metadata | {VERSION_KEY: __version__})
    header_end = 8 + int.from_bytes(content[:8], "little")
    # The library writes the metadata in random order.
    entries = json.loads(content[8:header_end])
    entries["__metadata__"] = dict(sorted(entries["__metadata__"].items()))
    header = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    # The format aligns the tensors that follow.
    header += b" " * (-len(header) % 8)
    with replace_file(Path(path), follow_link=True) as unfinished, unfinished.open("wb") as file:
        # Not written by the library, which makes files readable by their owner only.
        file.write(len(header).to_bytes(8, "little") + header)
        file.write(memoryview(content)[header_end:])


def _check_can_be_saved(name: str, value: object) -> None:
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{name!r} of the model's state is a {type(value).__name__}; a file holds tensors only")
    if value.is_meta:
        raise ValueError(
            f"{name!r} of the model is on the meta device, where there is nothing to save; call "
            "model.to_empty(device=...) and load the weights first"
        )
    try:
        serialised({name: value.new_empty(0, device="cpu")})
    except (KeyError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{name!r} of the model is a tensor of {value.layout} and {value.dtype}, which the file format lacks; "
            "make it a dense one of another precision, or leave it out of the state (persistent=False)"
        ) from error


@contextmanager
def opened(path: str | os.PathLike[str], remedy: str = "restore it from a copy") -> Iterator[Any]:
    """An open safetensors file; a damaged one is a `ValueError` that ends with the remedy."""
    if not Path(path).exists() or Path(path).is_dir():
        raise FileNotFoundError(f"there is no saved network at {path}; give the path of one")
    check_readable(path)
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"{path} is not a readable safetensors file, or damaged: {error}; {remedy}") from error


def read_tensors(path: str | os.PathLike[str]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors and the metadata of a safetensors file."""
    with opened(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118  # no mapping


def read_plan(path: str | os.PathLike[str]) -> GroupingPlan | None:
    """The plan in the metadata of a file, without its tensors; None where the file is of another kind."""
    if Path(path).suffix != ".safetensors" or not Path(path).is_file():
        return None
    try:
        with opened(path) as file:
            metadata = file.metadata() or {}
    except ValueError:
        return None  # reading the tensors says what is wrong
    return GroupingPlan.from_json(metadata[PLAN_KEY], str(path)) if PLAN_KEY in metadata else None


def check_tensors(
    path: str | os.PathLike[str],
    tensors: Mapping[str, torch.Tensor],
    needed: Mapping[str, torch.Tensor],
    *,
    fixed: Collection[str] = (),
) -> None:
    """Raise a `ValueError` unless the tensors of a file are those that a network needs, by name, shape and kind.

    Tensors named in `fixed`, such as indices, must have the values of those needed: an index out of range reads foreign
    memory on some devices.
    """
    missing, unknown = sorted(set(needed) - set(tensors)), sorted(set(tensors) - set(needed))
    if missing or unknown:
        raise ValueError(f"{path} belongs to another network: it lacks {missing[:3]} and has {unknown[:3]} in addition")
    for name, own in needed.items():
        found = tensors[name]
        kinds = {(tensor.is_floating_point(), tensor.is_complex()) for tensor in (found, own)}
        if found.shape != own.shape or len(kinds) > 1:
            raise ValueError(
                f"{path}: {name!r} is {found.dtype} {tuple(found.shape)}, the model needs {own.dtype} "
                f"{tuple(own.shape)}"
            )
        if name in fixed and not torch.equal(found, own.cpu()):
            raise ValueError(f"{path}: {name!r} contradicts the file's own plan or selection; the file is damaged")


def _network_inside(model: nn.Module) -> nn.Module:
    # Wrappers with hooks are unwrapped too, because only the tensors matter.
    while (inner := inner_name(model)) is not None:
        model = model.get_submodule(inner)
    return model


def _bare_state(model: nn.Module) -> dict[str, torch.Tensor]:
    state = model.state_dict()
    return {bare: state[name] for name, bare in bare_state_names(model).items()}


def input_transforms(model: nn.Module) -> dict[str, bool]:
    """Whether torchvision's GoogLeNet and Inception in a model transform their inputs, by name; usually empty."""
    return {
        name: bool(module.transform_input)
        for name, module in bare_modules(model)
        if any(f"{base.__module__}.{base.__qualname__}" in _WITH_TRANSFORM for base in type(module).__mro__)
    }


def read_transforms(metadata: Mapping[str, str], where: str) -> dict[str, bool]:
    """The `input_transforms` recorded in the metadata of a file; may be empty."""
    return _read_json(metadata, TRANSFORM_KEY, dict[str, bool], where)


def _read_json(metadata: Mapping[str, str], key: str, kind: type[Value], where: str) -> Value:
    """A value stored as JSON in the metadata of a file; empty if it is missing."""
    where = f"{where}: {key}"
    value: Value = convert(kind, parse_json(metadata.get(key, "{}"), where), where)
    return value


def plan_hash(plan: GroupingPlan) -> str:
    """SHA-256 of what a plan groups and prunes; layers that stay whole, the target and the version do not count."""
    document = json.loads(plan.to_json())
    grouped = {name: document["layers"][name] for name, layer in plan.layers.items() if layer.group_level > 1}
    if plan.narrowed:
        grouped = {name: document[name] for name in ("kept_channels", "narrowed")} | {"layers": grouped}
    return hashlib.sha256(json.dumps(grouped, sort_keys=True).encode()).hexdigest()


def hash_of_model(model: nn.Module) -> str | None:
    """The plan hash of a converted or folded network; None where there is no plan."""
    plan = model.meta.get(FOLDED_PLAN_KEY) if is_folded(model) else plan_of(model)
    return plan_hash(plan) if isinstance(plan, GroupingPlan) and (plan.layers or plan.narrowed) else None
