"""Whether a graph computes what its network does."""

import math
from collections.abc import Iterator, Mapping

import torch

# Against the largest output. A wrong order is off by as much as the output itself; rounding stays far below, in half
# precision too. What is subtler shows in double precision, in which every network is tried that can be.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}
HALF_PRECISION_TOLERANCE = 0.1


def difference(outputs: object, expected: object, *, with_whole_numbers: bool = False) -> str:
    """How outputs differ from the expected ones; empty if they are equal up to rounding.

    Args:
        outputs: a tensor, or lists, tuples and dictionaries of tensors.
        expected: likewise.
        with_whole_numbers: compare these too. They are often places of largest values, which rounding can move.
    """
    tensors, expected_tensors = list(_tensors_in(outputs)), list(_tensors_in(expected))
    if [tensor.shape for tensor in tensors] != [tensor.shape for tensor in expected_tensors]:
        return "the traced graph puts out other tensors than the network"
    for tensor, wanted in zip(tensors, expected_tensors, strict=True):
        if wanted.is_floating_point():
            if off := _distance(tensor, wanted):
                return off
        elif with_whole_numbers and not torch.equal(tensor, wanted):
            return "the traced graph puts out other whole numbers than the network"
    return ""


def _distance(tensor: torch.Tensor, wanted: torch.Tensor) -> str:
    finite = wanted.isfinite()
    largest = wanted[finite].abs().max().item() if finite.any() else 0.0
    allowed = TOLERANCE.get(wanted.dtype, HALF_PRECISION_TOLERANCE) * largest
    if torch.allclose(tensor, wanted, rtol=0, atol=allowed, equal_nan=True):
        return ""
    off = (tensor - wanted)[finite].abs().max().item() if finite.any() else math.nan
    return f"the traced graph puts out something else: off by {off:.3g} where outputs reach {largest:.3g}"


def _tensors_in(outputs: object) -> Iterator[torch.Tensor]:
    if isinstance(outputs, torch.Tensor):
        yield outputs
    elif isinstance(outputs, Mapping | list | tuple):
        for part in outputs.values() if isinstance(outputs, Mapping) else outputs:
            yield from _tensors_in(part)
