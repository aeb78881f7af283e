"""Networks as a whole: their modules by name whether wrapped or not (`torch.compile`, DDP and the like), and copies."""

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import TypeVar

import torch
from torch import nn
from torch.utils import _pytree as pytree

from strucspars.core.plan import GroupingPlan

Model = TypeVar("Model", bound=nn.Module)

# What `torch.compile` calls the module that it wraps.
COMPILED = "_orig_mod"

# By name: importing the compiler takes seconds. The module inside is under the second name.
_INNER_NAMES = {
    "torch._dynamo.eval_frame.OptimizedModule": COMPILED,
    "torch.nn.parallel.data_parallel.DataParallel": "module",
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
    # These recompute activations in training, or move them to the CPU.
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.CheckpointWrapper": "_checkpoint_wrapped_module",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.OffloadWrapper": "_checkpoint_wrapped_module",
    # What `Fabric.setup` returns.
    "lightning.fabric.wrappers._FabricModule": "_forward_module",
    "lightning_fabric.wrappers._FabricModule": "_forward_module",
}
# The tensors in a state do not have these names.
_NOT_IN_STATES = frozenset({"_checkpoint_wrapped_module", "_forward_module"})


def inner_name(module: nn.Module) -> str | None:
    """The name under which a wrapper holds the network; None for any other module."""
    return _INNER_NAMES.get(f"{type(module).__module__}.{type(module).__qualname__}")


def unwrapped(model: nn.Module) -> nn.Module:
    """The network inside `torch.compile`, `DataParallel`, `DistributedDataParallel` and the like, in any order.

    A wrapper that has hooks, or casts its inputs to another precision, changes the computation and is kept.
    """
    while (name := inner_name(model)) is not None:
        # Of all wrappers only Fabric's has a strategy, whose class `Precision` changes nothing.
        strategy = vars(model).get("_strategy")
        changes_precision = strategy is not None and type(strategy.precision).__name__ != "Precision"
        if model._forward_hooks or model._forward_pre_hooks or changes_precision:
            break
        model = model.get_submodule(name)
    return model


def unwrap_children_(model: nn.Module) -> None:
    """Remove the wrappers from all modules inside a network, in place."""
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
    seen: set[nn.Module] = set()
    for _, _, name, module in _names(model):
        if inner_name(module) is None and not (remove_duplicate and module in seen):
            seen.add(module)
            yield name, module


def modules_by_name(model: nn.Module) -> dict[str, nn.Module]:
    """Every module under each of its names, those with wrappers in them too."""
    return dict(model.named_modules(remove_duplicate=False)) | dict(bare_modules(model, remove_duplicate=False))


def bare_state_names(model: nn.Module) -> dict[str, str]:
    """The names in a model's `state_dict`, each with the name that it has where nothing is wrapped.

    >>> bare_state_names(nn.Sequential(nn.DataParallel(nn.Linear(1, 1))))
    {'0.module.weight': '0.weight', '0.module.bias': '0.bias'}
    """
    bare_names = _bare_names(model)
    found = {}
    for key in model.state_dict():
        owner = key.rpartition(".")[0]
        # Modules may save names with dots of their own.
        while owner not in bare_names:
            owner = owner.rpartition(".")[0]
        found[key] = _joined(bare_names[owner], key.removeprefix(owner).removeprefix("."))
    return found


def state_versions(model: nn.Module) -> dict[str, tuple[str, int]]:
    """The bare name and the version of every module in a model's `state_dict`, by its name there.

    PyTorch keeps the versions in `_metadata` beside the tensors; modules such as batch norms need them to load.

    >>> state_versions(nn.DataParallel(nn.BatchNorm2d(1)))
    {'': ('', 1), 'module': ('', 2)}
    """
    bare_names = _bare_names(model)
    metadata: dict[str, dict[str, int]] = getattr(model.state_dict(), "_metadata", {})
    return {name: (bare_names.get(name, name), own.get("version", 1)) for name, own in metadata.items()}


def _bare_names(model: nn.Module) -> dict[str, str]:
    """The bare name of every module, by its full name and by the one in states."""
    return {known: bare for full, in_state, bare, _ in _names(model) for known in (full, in_state)}


def _names(model: nn.Module) -> Iterator[tuple[str, str, str, nn.Module]]:
    """All modules, each with its full name, the one in states and the bare one; shared ones under every name."""
    names = {"": ("", "")}
    inside: set[str] = set()
    for full, module in model.named_modules(remove_duplicate=False):
        if full:
            parent, _, own_name = full.rpartition(".")
            in_state, bare = names[parent]
            if full not in inside or own_name not in _NOT_IN_STATES:
                in_state = _joined(in_state, own_name)
            # What is inside a wrapper has the wrapper's name.
            names[full] = in_state, bare if full in inside else _joined(bare, own_name)
        inner = inner_name(module)
        if inner is not None:
            inside.add(_joined(full, inner))
        yield full, *names[full], module


def _joined(parent: str, name: str) -> str:
    return f"{parent}.{name}" if parent else name


def under_first_names(model: nn.Module, plan: GroupingPlan) -> GroupingPlan:
    """The same plan with every module under its first name, without wrappers; two names of one are a `ValueError`."""
    modules = modules_by_name(model)
    first_names = {module: name for name, module in bare_modules(model)}
    given: dict[str, str] = {}
    for name in dict.fromkeys((*plan.layers, *plan.narrowed)):
        first = first_names.get(modules[name], name) if name in modules else name
        if first in given:
            raise ValueError(f"layers {given[first]!r} and {name!r} of the plan are one shared module; keep one")
        given[first] = name
    layers = {first: plan.layers[name] for first, name in given.items() if name in plan.layers}
    narrowed = {first: plan.narrowed[name] for first, name in given.items() if name in plan.narrowed}
    return replace(plan, layers=layers, narrowed=narrowed)


def copied(model: Model) -> Model:
    """A deep copy that shares no tensors.

    A module may store its last results. PyTorch refuses to copy tensors with a gradient history, so those are copied
    without it.
    """
    kept = (value for module in model.modules() for value in pytree.tree_leaves(vars(module)))
    computed = [value for value in kept if isinstance(value, torch.Tensor) and not value.is_leaf]
    return copy.deepcopy(model, {id(tensor): tensor.detach().clone() for tensor in computed})
