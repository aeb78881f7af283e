"""The example inputs of folding and export: which axis is the batch, and random inputs like them."""

from dataclasses import dataclass

import torch

from strucspars.convert.comparison import random_like
from strucspars.cost.counting import ExampleInputs, as_arguments

Arguments = tuple[torch.Tensor, ...]

# torch.export takes a batch of one for a constant.
SMALLEST_TRACED_BATCH = 2


@dataclass(frozen=True, kw_only=True)
class ExampleBatch:
    """Inputs of a network, on the CPU.

    Attributes:
        arguments: as they were given.
        is_batched: for each, whether its first axis is the batch.
        sizes: the batch sizes to check: that of the example, and another where the batch may vary.
    """

    arguments: Arguments
    is_batched: tuple[bool, ...]
    sizes: tuple[int, ...]

    @property
    def is_dynamic(self) -> bool:
        """Whether the batch may have any size."""
        return any(self.is_batched)

    @property
    def batch_words(self) -> str:
        """Which inputs were taken for batches, why, and what to do where that is wrong; empty unless several were.

        To stand inside an error: an input that is no batch may be as long as one by chance.
        """
        places = [f"example_inputs[{place}]" for place, batched in enumerate(self.is_batched) if batched]
        if len(places) < 2:
            return ""
        size = self.sizes[0]
        larger = "2 or more" if size == 1 else "another size"
        return (
            f"{', '.join(places[:-1])} and {places[-1]} were taken for batches, as the first axis of each has length "
            f"{size}; where one of them is none, give an example batch of {larger}, or pass dynamic_batch=False"
        )

    def traceable(self) -> Arguments:
        """The arguments with so many samples that their number is not taken for a constant."""
        if not self.is_dynamic or self.sizes[0] >= SMALLEST_TRACED_BATCH:
            return self.arguments
        pairs = zip(self.arguments, self.is_batched, strict=True)
        return tuple(torch.cat([tensor] * SMALLEST_TRACED_BATCH) if batched else tensor for tensor, batched in pairs)

    def random_like(self, size: int) -> Arguments:
        """Random inputs of the same kinds, shapes and, roughly, values, with `size` samples; the same every time."""
        generator = torch.Generator().manual_seed(size)
        return tuple(
            random_like(tensor, (size, *tensor.shape[1:]) if batched else tuple(tensor.shape), generator)
            for tensor, batched in zip(self.arguments, self.is_batched, strict=True)
        )


def random_image(image_shape: tuple[int, ...]) -> torch.Tensor:
    """One image of random values, the same every time, as a batch.

    Not zeros: folding compares its graph with the network on the example, and zeros hide most differences.

    >>> random_image((3, 8, 8)).shape
    torch.Size([1, 3, 8, 8])
    """
    return torch.randn(1, *image_shape, generator=torch.Generator().manual_seed(0), device="cpu")


def example_batch(example_inputs: ExampleInputs, *, dynamic_batch: bool) -> ExampleBatch:
    """Check example inputs and find their batch: the first axis of the first, and of all that are as long there.

    Raises:
        ValueError: an input is no tensor, or there is no batch; the message says what to do.
    """
    arguments = as_arguments(example_inputs)
    if not arguments:
        raise ValueError("example_inputs is empty; give one tensor per argument of forward")
    for place, value in enumerate(arguments):
        if not isinstance(value, torch.Tensor):
            raise ValueError(
                f"example_inputs[{place}] is a {type(value).__name__}; a file takes tensors only: wrap the network in "
                "a module that fills the other arguments in"
            )
        if value.numel() == 0:
            raise ValueError(
                f"example_inputs[{place}] is empty, of shape {tuple(value.shape)}; give at least one sample"
            )
    tensors = tuple(value.detach().cpu() for value in arguments)
    size = tensors[0].shape[0] if tensors[0].dim() else 0
    if not dynamic_batch:
        return ExampleBatch(arguments=tensors, is_batched=(False,) * len(tensors), sizes=(max(size, 1),))
    if not size:
        raise ValueError("example_inputs[0] has no axes, so no batch; pass dynamic_batch=False")
    is_batched = tuple(tensor.dim() > 0 and tensor.shape[0] == size for tensor in tensors)
    return ExampleBatch(arguments=tensors, is_batched=is_batched, sizes=(size, 3 if size == 1 else 1))
