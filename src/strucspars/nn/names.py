"""Networks as a whole: their modules by name whether wrapped or not (`torch.compile`, DDP and the like), and copies."""

import copy
from collections.abc import Collection, Iterator, Mapping, Set
from dataclasses import fields, is_dataclass, replace
from typing import TypeVar

import torch
from torch import nn

from strucspars.core.plan import GroupingPlan

Model = TypeVar("Model", bound=nn.Module)

# What `torch.compile` calls the module that it wraps.
COMPILED = "_orig_mod"

# By name: importing the compiler takes seconds. The module inside is under the second name.
_INNER_NAMES = {
    "torch._dynamo.eval_frame.OptimizedModule": COMPILED,
    "torch.nn.parallel.data_parallel.DataParallel": "module",
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
    # They compute activations again in training, or move them to the CPU.
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.CheckpointWrapper": "_checkpoint_wrapped_module",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.OffloadWrapper": "_checkpoint_wrapped_module",
    # What `Fabric.setup` returns.
    "lightning.fabric.wrappers._FabricModule": "_forward_module",
    "lightning_fabric.wrappers._FabricModule": "_forward_module",
}
# Those that stay out of states.
_NOT_IN_STATES = frozenset({"_checkpoint_wrapped_module", "_forward_module"})
# The class of Fabric's that leaves inputs and operations in the precision they have.
_SAME_PRECISION = "Precision"


def inner_name(module: nn.Module) -> str | None:
    """By which name a wrapper of PyTorch holds the network; None for any other module.

    >>> inner_name(nn.DataParallel(nn.Conv2d(1, 1, 1))), inner_name(nn.Conv2d(1, 1, 1))
    ('module', None)
    """
    return _INNER_NAMES.get(f"{type(module).__module__}.{type(module).__qualname__}")


def unwrapped(model: nn.Module) -> nn.Module:
    """The network inside `torch.compile`, `DataParallel`, `DistributedDataParallel` and the like, in any order.

    A wrapper with hooks of its own, or one that gives its inputs another precision, does more than call, and stays.

    >>> layer = nn.Conv2d(1, 1, 1)
    >>> unwrapped(nn.DataParallel(layer)) is layer
    True
    """
    while (name := inner_name(model)) is not None:
        if model._forward_hooks or model._forward_pre_hooks or _changes_precision(model):
            break
        model = model.get_submodule(name)
    return model


def _changes_precision(wrapper: nn.Module) -> bool:
    # Of all wrappers only Fabric's has a strategy.
    strategy = vars(wrapper).get("_strategy")
    return strategy is not None and type(strategy.precision).__name__ != _SAME_PRECISION


def unwrap_children_(model: nn.Module) -> None:
    """Take the wrappers off all modules below a network, in place."""
    for module in list(model.modules()):
        # Not named_children(): of a module that has several names it gives the first alone.
        for name, child in module._modules.items():
            if child is not None:
                module._modules[name] = unwrapped(child)


def bare_modules(model: nn.Module, *, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a network as `named_modules` would list them if nothing were wrapped.

    So a layer has one name in plans and files, whether parts of its network are compiled or not.

    >>> model = nn.Sequential(nn.DataParallel(nn.Sequential(nn.Conv2d(1, 1, 1))))
    >>> [name for name, _ in bare_modules(model)]
    ['', '0', '0.0']
    """
    for name, module in _names_without(model, set(_INNER_NAMES.values()), remove_duplicate=remove_duplicate):
        if inner_name(module) is None:
            yield name, module


def modules_by_name(model: nn.Module) -> dict[str, nn.Module]:
    """Every module under each of its names, those with wrappers in them too."""
    return dict(model.named_modules(remove_duplicate=False)) | dict(bare_modules(model, remove_duplicate=False))


def bare_state_names(model: nn.Module) -> dict[str, str]:
    """The names in a model's `state_dict`, each with the name that it has where nothing is wrapped.

    >>> bare_state_names(nn.Sequential(nn.DataParallel(nn.Linear(1, 1))))
    {'0.module.weight': '0.weight', '0.module.bias': '0.bias'}
    """
    wrappers = list(_wrappers_in_state(model))
    return {name: _without_wrappers(name, wrappers) for name in model.state_dict()}


def state_versions(model: nn.Module) -> dict[str, tuple[str, int]]:
    """The bare name and the version of every module in a model's `state_dict`, by its name there.

    PyTorch keeps the versions in `_metadata` beside the tensors; modules such as batch norms need them to load.

    >>> state_versions(nn.DataParallel(nn.BatchNorm2d(1)))
    {'': ('', 1), 'module': ('', 2)}
    """
    wrappers = list(_wrappers_in_state(model))
    metadata: dict[str, dict[str, int]] = getattr(model.state_dict(), "_metadata", {})
    return {
        name: (_without_wrappers(f"{name}.", wrappers).removesuffix("."), own.get("version", 1))
        for name, own in metadata.items()
    }


def _without_wrappers(name: str, wrappers: list[tuple[str, str]]) -> str:
    # From the innermost outwards: the names of those around it are still what they were.
    for wrapper, inner in reversed(wrappers):
        if name.startswith(wrapper + inner):
            name = wrapper + name.removeprefix(wrapper + inner)
    return name


def _wrappers_in_state(model: nn.Module) -> Iterator[tuple[str, str]]:
    """The prefixes of names in the state below each wrapper: the wrapper's own name, and the inner one."""
    for name, module in _names_without(model, _NOT_IN_STATES, remove_duplicate=False):
        inner = inner_name(module)
        if inner is not None and inner not in _NOT_IN_STATES:
            yield (f"{name}." if name else "", f"{inner}.")


def _names_without(model: nn.Module, left_out: Set[str], *, remove_duplicate: bool) -> Iterator[tuple[str, nn.Module]]:
    """All modules as `named_modules` lists them, by names without what some wrappers call the module inside."""
    names: dict[str, str] = {}
    inside: set[str] = set()
    for name, module in model.named_modules(remove_duplicate=remove_duplicate):
        parent, _, own_name = name.rpartition(".")
        # What is inside a wrapper has the wrapper's name.
        before = names.get(parent, "")
        names[name] = before if name in inside else _joined(before, own_name)
        inner = inner_name(module)
        if inner is not None and inner in left_out:
            inside.add(_joined(name, inner))
        yield names[name], module


def _joined(parent: str, name: str) -> str:
    return f"{parent}.{name}" if parent else name


def under_first_names(model: nn.Module, plan: GroupingPlan) -> GroupingPlan:
    """The same plan with every module under the name by which networks list it: the first, without wrappers.

    A name that the network does not have stays as it is.

    Raises:
        ValueError: two names of one module, which one grouping is for.

    >>> import strucspars as ss
    >>> model = nn.Sequential(nn.Conv2d(4, 8, 1))
    >>> plan = ss.one_shot_plan(model, target=0.4)
    >>> model.add_module("again", model[0])
    >>> renamed = replace(plan, layers={"again": plan.layers["0"]})
    >>> list(under_first_names(model, renamed).layers)
    ['0']
    """
    modules = modules_by_name(model)
    first_names = {module: name for name, module in bare_modules(model)}
    given: dict[str, str] = {}
    for name in plan.layers:
        first = first_names.get(modules[name], name) if name in modules else name
        if first in given:
            raise ValueError(f"layers {given[first]!r} and {name!r} of the plan are one shared module; keep one")
        given[first] = name
    return replace(plan, layers={first: plan.layers[name] for first, name in given.items()})


def copied(model: Model) -> Model:
    """A deep copy with tensors of its own.

    A module may keep what it computed last: features, an auxiliary loss, a weight-normed weight. PyTorch refuses to
    copy tensors with a gradient history, so those are copied without it.

    >>> model = nn.Conv2d(2, 2, 1)
    >>> model.last = model(torch.zeros(1, 2, 1, 1))
    >>> copied(model).last.requires_grad
    False
    """
    seen: set[int] = set()
    kept = (tensor for module in model.modules() for tensor in _tensors_in(vars(module), seen))
    return copy.deepcopy(model, {id(tensor): tensor.detach().clone() for tensor in kept if not tensor.is_leaf})


def _tensors_in(value: object, seen: set[int]) -> Iterator[torch.Tensor]:
    """The tensors in containers and dataclasses of any depth; modules are looked at one by one."""
    if isinstance(value, torch.Tensor):
        yield value
    elif id(value) not in seen:
        parts = _parts(value)
        if parts:
            seen.add(id(value))
        for part in parts:
            yield from _tensors_in(part, seen)


def _parts(value: object) -> Collection[object]:
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, list | tuple | set | frozenset):
        return value
    if is_dataclass(value) and not isinstance(value, nn.Module | type):
        return [getattr(value, field.name, None) for field in fields(value)]
    return ()
