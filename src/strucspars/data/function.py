"""Data of a function of the user's code, `package.module:function`."""

from collections.abc import Callable
from typing import Any

import torch
from typing_extensions import override

from strucspars.core.registry import import_named, users_error
from strucspars.data.folder import FolderData
from strucspars.data.image_set import KeyedSplit, ResidentData, Stream, mixed_seed


class FunctionSplit(KeyedSplit):
    """One of the datasets that a function has returned.

    The random numbers that torch draws while an image is made depend on the seed, the epoch and the index only, so
    that a run resumes exactly. The global random state stays.

    Args:
        dataset: `dataset[index]` is a float32 image, normalised, and its label.
        classes: names of the labels.
        seed: of the random numbers.
    """

    def __init__(self, dataset: Any, classes: tuple[str, ...], *, seed: int) -> None:
        self.dataset, self.classes, self.seed = dataset, classes, seed

    @override
    def __len__(self) -> int:
        return len(self.dataset)

    @override
    def names_digest(self) -> str:
        return ""

    @override
    def __getitem__(self, key: tuple[int, int]) -> tuple[torch.Tensor, int]:
        epoch, index = key
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(mixed_seed(Stream.SAMPLE, self.seed, epoch, index))
            try:
                image, label = self.dataset[index]
            except Exception as error:  # the user's code may raise anything
                raise ValueError(f"image {index} of the data: {users_error(error)}") from error
        return image, int(label)


def data_of_function(name: str, root: str | None, *, seed: int) -> ResidentData | FolderData:
    """What the function of this name returns, called with `root`.

    It may be `ResidentData` or `FolderData`, or a pair of datasets, to learn from and to test on. Their images are
    float32 tensors as the network takes them, and the first has the names of the `classes`, as torchvision's have.
    """
    function: Callable[..., Any] = import_named("data", name)
    try:
        made = function(root=root)
    except Exception as error:  # the user's code may raise anything
        raise ValueError(f"data {name!r}: making them fails: {users_error(error)}") from error
    if isinstance(made, ResidentData | FolderData):
        return made
    if not (isinstance(made, tuple) and len(made) == 2):
        raise ValueError(
            f"data {name!r}: must return ResidentData, FolderData, or a pair of datasets to learn from and to test on; "
            f"returned a {type(made).__name__}"
        )
    classes = getattr(made[0], "classes", None)
    if not classes:
        raise ValueError(f"data {name!r}: the first dataset must have `classes`, the names of its labels; add them")
    train, test = (FunctionSplit(each, tuple(map(str, classes)), seed=seed) for each in made)
    shapes = [_checked_image(split, f"data {name!r}") for split in (train, test)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"data {name!r}: images to learn from are {shapes[0]}, those to test on {shapes[1]}; crop them"
        )
    return FolderData(
        name=name, train=train, test=test, num_classes=len(classes), image_shape=shapes[0], preprocessing=None
    )


def _checked_image(split: FunctionSplit, where: str) -> tuple[int, int, int]:
    """The shape of the first image."""
    if not len(split):
        raise ValueError(f"{where}: a dataset is empty; give images to learn from and to test on")
    image, label = split[0, 0]
    if not isinstance(image, torch.Tensor) or image.dim() != 3 or image.dtype != torch.float32:
        found = f"{image.dtype} {tuple(image.shape)}" if isinstance(image, torch.Tensor) else type(image).__name__
        raise ValueError(f"{where}: an image must be a float32 tensor (channels, height, width), got {found}")
    if not 0 <= label < len(split.classes):
        raise ValueError(f"{where}: the label {label} is not one of its {len(split.classes)} classes")
    channels, height, width = image.shape
    return channels, height, width
