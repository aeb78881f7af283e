"""Shifts and mirrors of many images at once, on their device (the CIFAR augmentation of Sec. 3.5)."""

from dataclasses import dataclass

import torch
from torch.nn import functional

from strucspars.data.image_set import Augmentation


@dataclass(frozen=True, eq=False)
class Variations:
    """For each image, where its crop out of the padded image begins, and whether it is mirrored.

    Attributes:
        top: int64 `(N,)`, from 0 to twice the padding; the padding itself leaves the image where it is.
        left: the same, along the width.
        mirrored: bool `(N,)`.
    """

    top: torch.Tensor
    left: torch.Tensor
    mirrored: torch.Tensor


def drawn_variations(count: int, augmentation: Augmentation, generator: torch.Generator) -> Variations:
    """A shift and a mirror for each of `count` images, all equally likely."""
    top, left = torch.randint(0, 2 * augmentation.padding + 1, (2, count), generator=generator)
    mirrored = torch.randint(0, 2, (count,), generator=generator).bool()
    return Variations(top, left, mirrored if augmentation.flip else torch.zeros_like(mirrored))


def varied(images: torch.Tensor, variations: Variations, *, padding: int) -> torch.Tensor:
    """Images `(N, C, H, W)` padded with zeros, cropped back to their size at their own places, and mirrored.

    >>> image = torch.arange(4, dtype=torch.uint8).view(1, 1, 2, 2)
    >>> one_left = Variations(torch.tensor([1]), torch.tensor([2]), torch.tensor([False]))
    >>> varied(image, one_left, padding=1).tolist()
    [[[[1, 0], [3, 0]]]]
    """
    count, channels, height, width = images.shape
    device = images.device
    padded = functional.pad(images, (padding,) * 4)
    across = torch.arange(width, device=device).expand(count, width)
    columns = variations.left[:, None] + torch.where(variations.mirrored[:, None], width - 1 - across, across)
    rows = variations.top[:, None] + torch.arange(height, device=device)
    return padded[
        torch.arange(count, device=device)[:, None, None, None],
        torch.arange(channels, device=device)[None, :, None, None],
        rows[:, None, :, None],
        columns[:, None, None, :],
    ]
