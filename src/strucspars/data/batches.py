"""The batches of one split, epoch by epoch, always of the same shape.

What an epoch holds depends on the seed and the epoch only, so that a run can resume in the middle of it.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate

from strucspars.data.image_set import (
    Augmentation,
    ImageSet,
    KeyedSplit,
    SampleKey,
    Stream,
    drawn_variations,
    generator_for,
    varied,
)


@dataclass(frozen=True, kw_only=True)
class EpochOrder:
    """How the images of a split are distributed over steps and processes.

    A step takes `batch_size * world_size` images, of which each process gets every `world_size`-th. So several
    processes together see the same images in each step as one process with the larger batch.

    A shuffled epoch has an order that depends on the seed and the epoch only, and fills its last step up with its first
    images. Otherwise the order is the natural one, and image 0 fills up the last step, marked as not valid.

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
        """Which places count: bool `(steps, batch_size)`; all of them in a shuffled epoch."""
        return self.share((torch.arange(self.places) < self.count) | self.shuffled)

    def share(self, values: torch.Tensor) -> torch.Tensor:
        """This process's part `(steps, batch_size, ...)` of values `(places, ...)` for all processes."""
        dealt = values.reshape(self.steps, self.batch_size, self.world_size, *values.shape[1:])
        return dealt[:, :, self.rank].contiguous()


# Bounds the memory of gathering; larger pieces are no faster.
IMAGES_PER_PIECE = 10_000


@dataclass(frozen=True, eq=False)
class Batch:
    """One step's images, normalised; `valid` is False where an image only fills up the last batch of an evaluation."""

    images: torch.Tensor
    labels: torch.Tensor
    valid: torch.Tensor


class Batches(ABC):
    """A split in batches of one size."""

    def __init__(self, order: EpochOrder, device: torch.device) -> None:
        self.order = order
        self.device = device
        self.steps = order.steps
        self.batch_size = order.batch_size
        self.valid = order.valid().to(device)

    @abstractmethod
    def epoch(self, epoch: int, *, start_step: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, from `start_step` on."""


class ResidentBatches(Batches):
    """Batches of a split that lives on the device, augmented there for a whole epoch at once.

    The buffers keep their memory from epoch to epoch, so a captured CUDA graph may read them. A `Batch` is a view into
    them: it lasts until the next epoch is filled in. Images are `(steps, B, C, H, W)`, labels `(steps, B)`.
    """

    def __init__(
        self,
        split: ImageSet,
        order: EpochOrder,
        *,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        device: torch.device,
        augmentation: Augmentation | None = None,
        memory_format: torch.memory_format = torch.contiguous_format,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(order, device)
        self.augmentation = augmentation
        self._all_images = split.images.to(device)
        self._all_labels = split.labels.to(device)
        # Of pixels in 0 .. 255, per channel.
        factors = torch.tensor([mean, std], dtype=torch.float64) * 255
        self._mean, self._std = factors.to(device, torch.float32)[..., None, None]
        shape = (self.steps * self.batch_size, *split.images.shape[1:])
        self._rows = torch.empty(shape, dtype=dtype, device=device, memory_format=memory_format)
        self.images = self._rows.view(self.steps, self.batch_size, *shape[1:])
        self.labels = torch.empty(self.steps, self.batch_size, dtype=torch.int64, device=device)
        self._filled_epoch: int | None = None

    def epoch(self, epoch: int, *, start_step: int = 0) -> Iterator[Batch]:
        """Fill in the epoch; then its batches, from `start_step` on."""
        self.fill_(epoch)
        return (Batch(self.images[step], self.labels[step], self.valid[step]) for step in range(start_step, self.steps))

    def fill_(self, epoch: int) -> None:
        """Write the images and labels of an epoch into the buffers."""
        changes = self.order.shuffled or self.augmentation is not None
        if self._filled_epoch == epoch or (self._filled_epoch is not None and not changes):
            return
        # An interruption below leaves parts of two epochs in the buffers.
        self._filled_epoch = None
        indices = self.order.indices(epoch).to(self.device)
        if self.augmentation is not None:
            # Drawn for all processes on the CPU, so that neither their number nor the device changes an image.
            generator = generator_for(Stream.CROPS, self.order.seed, epoch)
            drawn = drawn_variations(self.order.places, self.augmentation, generator)
            variations = self.order.share(drawn).flatten(0, 1).to(self.device)
        self.labels.copy_(self._all_labels[indices])
        for start in range(0, len(self._rows), IMAGES_PER_PIECE):
            piece = slice(start, start + IMAGES_PER_PIECE)
            images = self._all_images[indices.view(-1)[piece]]
            if self.augmentation is not None:
                images = varied(images, variations[piece], padding=self.augmentation.padding)
            self._rows[piece].copy_(images.to(torch.float32).sub_(self._mean).div_(self._std))
        self._filled_epoch = epoch


class FolderBatches(Batches):
    """Batches of images on disk, one epoch at a time, read by worker processes that live as long as this object."""

    def __init__(
        self,
        dataset: KeyedSplit,
        order: EpochOrder,
        *,
        device: torch.device,
        workers: int = 0,
        memory_format: torch.memory_format = torch.contiguous_format,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(order, device)
        self.memory_format = memory_format
        self.dtype = dtype
        self._sampler = _StepSampler(order)
        self._loader = DataLoader(
            _Reading(dataset),
            collate_fn=_collated,
            batch_sampler=self._sampler,
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=device.type == "cuda",
            # The loader draws a number every epoch, which must not change the global random state.
            generator=torch.Generator(),
        )

    def epoch(self, epoch: int, *, start_step: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, from `start_step` on; images of earlier steps are not read."""
        self._sampler.epoch = epoch
        self._sampler.start_step = start_step
        for step, loaded in enumerate(self._loader, start=start_step):
            if isinstance(loaded, ValueError):
                raise ValueError(str(loaded))
            images, labels = loaded
            yield Batch(
                images.to(self.device, self.dtype, non_blocking=True, memory_format=self.memory_format),
                labels.to(self.device, non_blocking=True),
                self.valid[step],
            )


class _Reading(Dataset[tuple[torch.Tensor, int] | ValueError]):
    """A split that returns errors instead of raising them.

    Raised in a worker, they would arrive wrapped in the worker's traceback, and keep the loader alive, whose workers
    then take seconds to end.
    """

    def __init__(self, split: KeyedSplit) -> None:
        self.split = split

    def __getitem__(self, key: SampleKey) -> tuple[torch.Tensor, int] | ValueError:
        try:
            return self.split[key]
        except ValueError as error:
            return ValueError(str(error))


def _collated(samples: list[tuple[torch.Tensor, int] | ValueError]) -> list[torch.Tensor] | ValueError:
    """Images and labels of a batch, or the first error among them."""
    for sample in samples:
        if isinstance(sample, ValueError):
            return sample
    collated: list[torch.Tensor] = default_collate(samples)
    return collated


class _StepSampler(Sampler[list[SampleKey]]):
    """The keys of each step's images. It is read in the parent process, so workers need not know the epoch."""

    def __init__(self, order: EpochOrder) -> None:
        self.order = order
        self.epoch = 0
        self.start_step = 0

    def __iter__(self) -> Iterator[list[SampleKey]]:
        epoch = self.epoch
        for indices in self.order.indices(epoch)[self.start_step :].tolist():
            yield [(epoch, index) for index in indices]
