"""Which image stands where in an epoch, for one process of several."""

import math
from dataclasses import dataclass

import torch

from strucspars.data.seeding import Stream, generator_for


@dataclass(frozen=True, kw_only=True)
class EpochOrder:
    """How the images of a split are dealt out to steps and processes.

    All processes together take `batch_size * world_size` images a step, each every `world_size`-th of them. So several
    processes see the very images that one process with the larger batch would see, step by step.

    Attributes:
        count: images of the split.
        batch_size: images per step of one process.
        shuffled: a new order every epoch, and a last step filled up with the epoch's first images. Otherwise the
            natural order, and a last step filled up with image 0, marked as not valid.
        seed: of the orders; an epoch's order depends on nothing but the seed and the epoch.
        rank: this process, from 0.
        world_size: how many processes there are.

    >>> order = EpochOrder(count=5, batch_size=2, shuffled=False, seed=0)
    >>> order.indices(epoch=0).tolist()
    [[0, 1], [2, 3], [4, 0]]
    >>> order.valid().tolist()
    [[True, True], [True, True], [True, False]]
    """

    count: int
    batch_size: int
    shuffled: bool
    seed: int
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        for name in ("count", "batch_size", "world_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, got {getattr(self, name)}")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank must lie in 0 .. {self.world_size - 1}, got {self.rank}")

    @property
    def steps(self) -> int:
        """Steps per epoch, the last one filled up."""
        return math.ceil(self.count / (self.batch_size * self.world_size))

    @property
    def places(self) -> int:
        """Images per epoch of all processes together, those that fill up the last step included."""
        return self.steps * self.batch_size * self.world_size

    def indices(self, epoch: int) -> torch.Tensor:
        """Index of the image at each step and place of this process: int64 `(steps, batch_size)`."""
        if not self.shuffled:
            positions = torch.arange(self.places)
            return self.share(torch.where(positions < self.count, positions, 0))
        order = torch.randperm(self.count, generator=generator_for(Stream.ORDER, self.seed, epoch))
        return self.share(order[torch.arange(self.places) % self.count])

    def valid(self) -> torch.Tensor:
        """Which places count: bool `(steps, batch_size)`. All of them, in a shuffled epoch."""
        return self.share((torch.arange(self.places) < self.count) | self.shuffled)

    def share(self, values: torch.Tensor) -> torch.Tensor:
        """This process's part `(steps, batch_size, ...)` of values `(places, ...)` for all processes."""
        dealt = values.view(self.steps, self.batch_size, self.world_size, *values.shape[1:])
        return dealt[:, :, self.rank].contiguous()

    def check_step(self, start_step: int) -> None:
        """Raise a `ValueError` unless an epoch can start, or already end, at this step."""
        if not 0 <= start_step <= self.steps:
            raise ValueError(f"start_step must lie in 0 .. {self.steps}, got {start_step}")
