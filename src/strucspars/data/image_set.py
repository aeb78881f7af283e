"""Data sets in memory, and the random augmentation of their images."""

from abc import abstractmethod
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch
from torch.nn import functional
from torch.utils.data import Dataset

from strucspars.core.plan import Preprocessing

SampleKey = tuple[int, int]
"""Epoch and index of an image; persistent worker processes learn the epoch from it."""


@dataclass(frozen=True, eq=False)
class ImageSet:
    """The images of one split, uint8 `(N, C, H, W)`, and their labels, int64 `(N,)`."""

    images: torch.Tensor
    labels: torch.Tensor

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Augmentation:
    """Random shifts by up to `padding` pixels in each direction, filled with zeros, and random mirrors."""

    padding: int
    flip: bool


@dataclass(frozen=True, eq=False, kw_only=True)
class ResidentData:
    """A data set in memory; mean and deviation are per channel, of pixels scaled to 0 .. 1."""

    name: str
    train: ImageSet
    test: ImageSet
    num_classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    augmentation: Augmentation | None

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of every image."""
        channels, height, width = self.train.images.shape[1:]
        return channels, height, width

    @property
    def preprocessing(self) -> Preprocessing:
        """Of the images, which have their size already."""
        return Preprocessing(mean=self.mean, std=self.std, size=self.image_shape[-1], resize=None)


class KeyedSplit(Dataset[tuple[torch.Tensor, int]]):
    """The images of one split that are made when they are read: `split[epoch, index]` is an image and its label."""

    classes: tuple[str, ...]

    @abstractmethod
    def __len__(self) -> int:
        """How many images there are."""

    @abstractmethod
    def names_digest(self) -> str:
        """Equal for the same images in the same order, as far as their names say."""


class Stream(IntEnum):
    """Purposes of random numbers, so that two uses of one seed do not draw the same ones."""

    ORDER = 0
    CROPS = 1
    SAMPLE = 2


def mixed_seed(stream: Stream, *values: int) -> int:
    """One 63-bit seed from a purpose and some numbers, the same on every machine."""
    words = [int(stream), len(values)]
    for value in values:
        if not 0 <= value < 2**64:
            raise ValueError(f"a seed, epoch or index must be in 0 .. 2**64 - 1, got {value}")
        # Always two words: SeedSequence itself takes 2**32 for (0, 1), and ignores zeros at the end.
        words += [value & 0xFFFFFFFF, value >> 32]
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0] >> np.uint64(1))


def generator_for(stream: Stream, *values: int) -> torch.Generator:
    """A generator on the CPU, seeded by a purpose and some numbers. The CPU's draws are the same for every device."""
    return torch.Generator().manual_seed(mixed_seed(stream, *values))


def drawn_variations(count: int, augmentation: Augmentation, generator: torch.Generator) -> torch.Tensor:
    """A crop out of the padded image, from the top and left, and a mirror for each image: int64 `(count, 3)`."""
    corners = torch.randint(0, 2 * augmentation.padding + 1, (2, count), generator=generator)
    mirrored = torch.randint(0, 2, (1, count), generator=generator) * augmentation.flip
    return torch.cat([corners, mirrored]).T


def varied(images: torch.Tensor, variations: torch.Tensor, *, padding: int) -> torch.Tensor:
    """Images `(N, C, H, W)` padded with zeros, cropped back to their size at their own places, and mirrored."""
    count, channels, height, width = images.shape
    device = images.device
    padded = functional.pad(images, (padding,) * 4)
    top, left, mirrored = variations[:, :, None].unbind(1)
    across = torch.arange(width, device=device)
    columns = left + torch.where(mirrored.bool(), width - 1 - across, across)
    rows = top + torch.arange(height, device=device)
    return padded[
        torch.arange(count, device=device)[:, None, None, None],
        torch.arange(channels, device=device)[None, :, None, None],
        rows[:, None, :, None],
        columns[:, None, None, :],
    ]
