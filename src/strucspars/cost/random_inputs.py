"""Random inputs like given ones: an example may be all zeros, for which much comes out right by accident."""

from typing import Any

import torch
from torch.utils import _pytree as pytree


def random_like(tensor: torch.Tensor, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """A random tensor of the same kind and, roughly, values, on the CPU.

    >>> random_like(torch.zeros(2, 3), (4, 3), torch.Generator().manual_seed(0)).std() > 0.1
    tensor(True)
    """
    if tensor.is_complex():
        return torch.randn(shape, generator=generator, dtype=torch.complex64, device="cpu").to(tensor.dtype)
    if tensor.is_floating_point():
        values = tensor.double()
        mean, spread = values.mean().item(), values.std(correction=0).item()
        # A constant example, zeros for one, tells nothing about the inputs to come.
        mean, spread = (mean, spread) if spread > 0 else (0.0, 1.0)
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
        return (drawn * spread + mean).to(tensor.dtype)
    # Whole numbers are often places in a table: others than those of the example might be none.
    places = torch.randint(tensor.numel(), shape, generator=generator, device="cpu")
    return tensor.detach().cpu().flatten()[places]


def random_arguments(arguments: tuple[Any, ...], *, in_double: bool = True, seed: int = 0) -> tuple[Any, ...]:
    """Arguments in which floating-point tensors are random, in double precision or their own; everything else stays.

    Tensors in lists and dictionaries are meant, too.
    """
    generator = torch.Generator().manual_seed(seed)

    def drawn(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point() or not tensor.numel():
            return tensor
        like = tensor.double() if in_double else tensor
        return random_like(like, tuple(tensor.shape), generator).to(tensor.device)

    random: tuple[Any, ...] = pytree.tree_map_only(torch.Tensor, drawn, arguments)
    return random
