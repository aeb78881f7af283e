"""Copies of networks that have been used."""

import copy
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import TypeVar

import torch
from torch import nn

Model = TypeVar("Model", bound=nn.Module)


def copied(model: Model) -> Model:
    """A deep copy with tensors of its own.

    A module may keep what it computed last: features, an auxiliary loss, a weight-normed weight. PyTorch refuses to
    copy tensors with a history, so those are copied without it.

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
