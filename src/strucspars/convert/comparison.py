"""Whether a graph computes what its network does."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from enum import Enum

import torch
from torch.utils import _pytree as pytree

# Against the largest output. A wrong order is off by as much as the output itself; rounding stays far below, in half
# precision too. What is subtler shows in double precision, in which every network is tried that can be.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}
HALF_PRECISION_TOLERANCE = 0.1

# What can be compared with `==`.
PLAIN_VALUES = (bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device, type(None))
LEAVES = (torch.Tensor, *PLAIN_VALUES)


def difference(outputs: object, expected: object, *, with_whole_numbers: bool = False) -> str:
    """How outputs differ from the expected ones, or why nobody can tell; empty if they are equal up to rounding.

    Args:
        outputs: a tensor, or lists, tuples, dictionaries, dataclasses and pytrees of tensors and plain values.
        expected: likewise.
        with_whole_numbers: compare tensors of these too. They are often places of largest values, which rounding can
            move.
    """
    try:
        leaves, wanted_leaves = dict(_leaves(outputs)), dict(_leaves(expected))
    except _CannotBeOpenedError as error:
        return str(error)
    if not any(isinstance(wanted, torch.Tensor) for wanted in wanted_leaves.values()):
        return "the network puts out no tensor that its graph could be compared by"
    if leaves.keys() != wanted_leaves.keys():
        return "the traced graph puts out other tensors than the network"
    tensors = (wanted for wanted in wanted_leaves.values() if isinstance(wanted, torch.Tensor))
    largest = max((_largest(_as_real(tensor)) for tensor in tensors if _has_fractions(tensor)), default=0.0)
    for place, wanted in wanted_leaves.items():
        found = leaves[place]
        if isinstance(found, torch.Tensor) and isinstance(wanted, torch.Tensor):
            wrong = _tensor_difference(found, wanted, with_whole_numbers)
        else:
            wrong = _value_difference(found, wanted, largest)
        if wrong:
            return wrong
    return ""


class _CannotBeOpenedError(Exception):
    """An output holds an object whose parts nobody knows."""


def _value_difference(value: object, wanted: object, largest: float) -> str:
    is_same = type(value) is type(wanted) and (value == wanted or (value != value and wanted != wanted))
    if isinstance(value, float | complex) and isinstance(wanted, float | complex):
        # Read off a tensor that nobody sees: a mean, say, may be small beside what it is the mean of.
        is_same = is_same or abs(value - wanted) <= TOLERANCE[torch.float32] * max(largest, abs(wanted))
    return "" if is_same else f"the traced graph puts out {value!r} where the network puts out {wanted!r}"


def _tensor_difference(tensor: torch.Tensor, wanted: torch.Tensor, with_whole_numbers: bool) -> str:
    if tensor.shape != wanted.shape or tensor.is_complex() != wanted.is_complex():
        return "the traced graph puts out other tensors than the network"
    if _has_fractions(wanted):
        return _distance(_as_real(tensor), _as_real(wanted))
    if with_whole_numbers and not torch.equal(tensor, wanted):
        return "the traced graph puts out other whole numbers than the network"
    return ""


def _has_fractions(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _as_real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _distance(tensor: torch.Tensor, wanted: torch.Tensor) -> str:
    largest = _largest(wanted)
    allowed = TOLERANCE.get(wanted.dtype, HALF_PRECISION_TOLERANCE) * largest
    if torch.allclose(tensor, wanted, rtol=0, atol=allowed, equal_nan=True):
        return ""
    finite = wanted.isfinite()
    off = (tensor - wanted)[finite].abs().max().item() if finite.any() else math.nan
    return f"the traced graph puts out something else: off by {off:.3g} where outputs reach {largest:.3g}"


def _largest(tensor: torch.Tensor) -> float:
    finite = tensor[tensor.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _leaves(value: object, place: tuple[object, ...] = ()) -> Iterator[tuple[tuple[object, ...], object]]:
    """Tensors and plain values, each by its place."""
    if isinstance(value, LEAVES):
        yield place, value
        return
    for key, part in _parts(value):
        yield from _leaves(part, (*place, key))


def _parts(value: object) -> Iterator[tuple[object, object]]:
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, list | tuple):
        yield from enumerate(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
    else:
        parts = pytree.tree_leaves(value, is_leaf=lambda part: part is not value)
        if any(part is value for part in parts):
            raise _CannotBeOpenedError(
                f"the network puts out an object of {type(value).__name__}, by which its graph cannot be compared; "
                "a dataclass, a dictionary or a tuple could be"
            )
        yield from enumerate(parts)
