"""Compare the outputs of two computations up to rounding, and draw random inputs for the comparison."""

import cmath
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch.utils import _pytree as pytree

# Allowed differences, as fractions of the largest entry. A wrong channel order causes errors as large as the output;
# rounding errors are far smaller. Double precision, which `fold` tries where possible, reveals smaller mistakes.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 0.1}
LOWEST_PRECISION_TOLERANCE = 0.1

# Values that `==` compares.
PLAIN_VALUES = (bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device, type(None))

Place = tuple[object, ...]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """How outputs compare with the expected ones; the complaint says which differs first, and is empty if all agree."""

    relative_error: float
    tolerance: float
    complaint: str


def compare_outputs(outputs: object, expected: object, *, whole_numbers: bool = True) -> Comparison:
    """Compare outputs, tensor by tensor, with the expected ones: tensors, plain values, or containers of them.

    Without `whole_numbers`, tensors of these need not be equal: they are often positions of largest values.
    """
    try:
        found, wanted = dict(_leaves(outputs)), dict(_leaves(expected))
    except _NotComparableError as error:
        return _mismatch(str(error))
    tensors = [leaf for leaf in wanted.values() if isinstance(leaf, torch.Tensor)]
    if not tensors:
        return _mismatch("no output is a tensor to compare by")
    if found.keys() != wanted.keys():
        names, wanted_names = (", ".join(map(_name, leaves)) or "nothing" for leaves in (found, wanted))
        return _mismatch(f"it returns {names} instead of {wanted_names}")
    compared = {place: _compare_leaves(found[place], leaf, whole_numbers) for place, leaf in wanted.items()}
    complaints = (f"{_name(place)} {complaint}" for place, (_, complaint) in compared.items() if complaint)
    return Comparison(
        relative_error=max(error for error, _ in compared.values()),
        tolerance=max(map(tolerance, tensors)),
        complaint=next(complaints, ""),
    )


def _mismatch(complaint: str) -> Comparison:
    return Comparison(relative_error=math.inf, tolerance=0.0, complaint=complaint)


def tolerance(expected: torch.Tensor) -> float:
    """How far off a tensor may be, as a fraction of its largest entry. Whole numbers and truth values may not be."""
    return TOLERANCE.get(expected.real.dtype, LOWEST_PRECISION_TOLERANCE) if _has_fractions(expected) else 0.0


def relative_error(output: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference over the largest finite entry expected; infinite where shapes or non-finite entries differ."""
    kinds = {(tensor.is_floating_point(), tensor.is_complex()) for tensor in (output, expected)}
    if output.shape != expected.shape or len(kinds) > 1:
        return math.inf
    # On the CPU: some devices have no double precision.
    output, expected = output.detach().cpu(), expected.detach().cpu()
    if not _has_fractions(expected):
        return 0.0 if torch.equal(output.to(expected.dtype), expected) else math.inf
    precision = torch.complex128 if expected.is_complex() else torch.float64
    output, expected = output.to(precision), expected.to(precision)
    finite = expected.isfinite()
    if not torch.allclose(output[~finite], expected[~finite], equal_nan=True):
        return math.inf
    off, largest = _largest(output[finite] - expected[finite]), _largest(expected[finite])
    if off == 0:
        return 0.0
    return off / largest if largest and math.isfinite(off) else math.inf


class _NotComparableError(Exception):
    """An output holds an object that cannot be compared."""


def _compare_leaves(found: object, wanted: object, whole_numbers: bool) -> tuple[float, str]:
    if not isinstance(found, torch.Tensor) or not isinstance(wanted, torch.Tensor):
        is_same = type(found) is type(wanted) and (found == wanted or (found != found and wanted != wanted))
        if isinstance(found, float | complex) and isinstance(wanted, float | complex):
            is_same = is_same or cmath.isclose(found, wanted, rel_tol=TOLERANCE[torch.float32])
        return (0.0, "") if is_same else (math.inf, f"is {found!r} instead of {wanted!r}")
    if found.shape != wanted.shape:
        return math.inf, f"has shape {tuple(found.shape)} instead of {tuple(wanted.shape)}"
    if not _has_fractions(wanted) and not whole_numbers:
        return 0.0, ""
    error, allowed = relative_error(found, wanted), tolerance(wanted)
    complaint = f"is off by {error:.3g} of its largest entry, {allowed:g} is allowed"
    return error, "" if error <= allowed else complaint


def _has_fractions(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _largest(values: torch.Tensor) -> float:
    return float(values.abs().max()) if values.numel() else 0.0


def _name(place: Place) -> str:
    return f"output {'.'.join(map(str, place))}" if place else "the output"


def _leaves(value: object, place: Place = ()) -> Iterator[tuple[Place, object]]:
    """Tensors and plain values, each with its place."""
    if isinstance(value, (torch.Tensor, *PLAIN_VALUES)):
        yield place, value
        return
    parts: Iterable[tuple[object, object]]
    if isinstance(value, Mapping):
        parts = value.items()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    elif pytree.tree_is_leaf(value):
        raise _NotComparableError(
            f"{_name(place)} is an object of {type(value).__name__}, which cannot be compared; return a dataclass, "
            "a dictionary or a tuple of tensors instead"
        )
    else:
        parts = enumerate(pytree.tree_leaves(value, is_leaf=lambda part: part is not value))
    for key, part in parts:
        yield from _leaves(part, (*place, key))


def random_like(tensor: torch.Tensor, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """A random tensor of the same type and roughly the same values, on the CPU."""
    if tensor.is_complex():
        return torch.randn(shape, generator=generator, dtype=torch.complex64, device="cpu").to(tensor.dtype)
    if tensor.is_floating_point():
        values = tensor.double()
        mean, spread = values.mean().item(), values.std(correction=0).item()
        # The scale of later inputs cannot be read from a constant example such as zeros.
        mean, spread = (mean, spread) if spread > 0 else (0.0, 1.0)
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
        return (drawn * spread + mean).to(tensor.dtype)
    # Whole numbers are often indices: others than those of the example may be out of range.
    places = torch.randint(tensor.numel(), shape, generator=generator, device="cpu")
    return tensor.detach().cpu().flatten()[places]


def random_arguments(arguments: tuple[Any, ...], *, in_double: bool = True, seed: int = 0) -> tuple[Any, ...]:
    """Arguments in which floating-point tensors are random, in double precision or their own; everything else stays."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point() or not tensor.numel():
            return tensor
        like = tensor.double() if in_double else tensor
        return random_like(like, tuple(tensor.shape), generator).to(tensor.device)

    random: tuple[Any, ...] = pytree.tree_map_only(torch.Tensor, drawn, arguments)
    return random


def random_image(image_shape: tuple[int, ...]) -> torch.Tensor:
    """One image of random values, the same every time, as a batch.

    Not zeros: folding compares its graph with the network on the example, and zeros hide most differences.
    """
    return torch.randn(1, *image_shape, generator=torch.Generator().manual_seed(0), device="cpu")
