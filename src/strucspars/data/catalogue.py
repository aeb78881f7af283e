"""Data sets by name or of a function, `package.module:function`, their batches, and the digits, which need no files."""

import difflib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from typing_extensions import override

from strucspars.core.plan import Preprocessing
from strucspars.core.registry import import_named, users_error
from strucspars.data.batches import Batches, EpochOrder, FolderBatches, ResidentBatches
from strucspars.data.cifar import CIFAR_LAYOUTS, read_cifar
from strucspars.data.folder import FolderData, image_folder
from strucspars.data.image_set import Augmentation, ImageSet, KeyedSplit, ResidentData, Stream, mixed_seed

TEST_IMAGES = 450
SPLIT_SEED = 0
BRIGHTEST = 16  # scikit-learn's pixels are whole numbers from 0 to 16

NEEDED_ROOT = {
    "cifar10": "the folder with cifar-10-batches-py or cifar-10-python.tar.gz",
    "cifar100": "the folder with cifar-100-python or cifar-100-python.tar.gz",
    "imagenet": "the folder with train/ and val/",
    "folder": "the folder with train/ and val/",
}
DATA_NAMES = ("digits", *NEEDED_ROOT)


def load_data(
    name: str,
    root: Path | None,
    *,
    download: bool = False,
    preprocessing: Preprocessing | None = None,
    val: Path | None = None,
    seed: int = 0,
    num_classes: int | None = None,
) -> ResidentData | FolderData:
    """The data set of that name, one of `DATA_NAMES` or `package.module:function`.

    Args:
        root: the folder of the data; digits need none.
        download: fetch CIFAR to `root` if it is not there.
        preprocessing: of image folders; None for ImageNet's.
        val: folder of the images of an image folder to test on, if they are not in root.
        num_classes: outputs of the network that the folders must fit, as in `FolderSplit`.

    >>> load_data("digits", None).num_classes
    10
    """
    if ":" in name:
        return data_of_function(name, None if root is None else str(root), seed=seed)
    if name not in DATA_NAMES:
        nearest = difflib.get_close_matches(name, DATA_NAMES, n=1)
        hint = f"did you mean {nearest[0]!r}? There are" if nearest else "there are"
        raise ValueError(f"unknown data set {name!r}; {hint} {', '.join(DATA_NAMES)} and package.module:function")
    if name == "digits":
        return digits()
    if root is None:
        raise ValueError(f"data set {name!r} needs a root: {NEEDED_ROOT[name]}; give data.root=FOLDER")
    if name in CIFAR_LAYOUTS:
        return read_cifar(root, CIFAR_LAYOUTS[name], download=download)
    if download:
        raise ValueError(f"data set {name!r} cannot be downloaded; make root {NEEDED_ROOT[name]}; leave download out")
    return replace(image_folder(root, preprocessing, val=val, seed=seed, num_classes=num_classes), name=name)


def batches_of(
    data: ResidentData | FolderData,
    *,
    training: bool,
    batch_size: int,
    device: torch.device,
    seed: int = 0,
    workers: int = 0,
    rank: int = 0,
    world_size: int = 1,
    memory_format: torch.memory_format = torch.contiguous_format,
    dtype: torch.dtype = torch.float32,
) -> Batches:
    """Batches to learn from, shuffled and augmented every epoch; or to evaluate on, every image once, unchanged."""
    images = data.train if training else data.test
    order = EpochOrder(
        count=len(images), batch_size=batch_size, shuffled=training, seed=seed, rank=rank, world_size=world_size
    )
    if isinstance(images, KeyedSplit):
        return FolderBatches(images, order, device=device, workers=workers, memory_format=memory_format, dtype=dtype)
    assert isinstance(data, ResidentData)
    return ResidentBatches(
        images,
        order,
        mean=data.mean,
        std=data.std,
        device=device,
        augmentation=data.augmentation if training else None,
        memory_format=memory_format,
        dtype=dtype,
    )


def digits() -> ResidentData:
    """1797 digits of ten classes: 1347 to learn from, 450 to test on, always the same ones, equally mixed.

    The 8 x 8 grey images are enlarged to 16 x 16 (bilinear) and repeated in three equal channels, for networks made for
    CIFAR. Training shifts them by a pixel, which is half an original one, and never mirrors them.
    """
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("the digits come with scikit-learn; pip install scikit-learn") from error
    pixels, labels = load_digits(return_X_y=True)
    # An integer seed means numpy's old generator, whose numbers are promised never to change.
    places = np.arange(len(labels))
    split = train_test_split(places, test_size=TEST_IMAGES, random_state=SPLIT_SEED, stratify=labels)
    train, test = (torch.from_numpy(np.sort(part)) for part in split)
    scaled = torch.from_numpy(pixels).to(torch.float32).view(-1, 1, 8, 8) * (255 / BRIGHTEST)
    enlarged = functional.interpolate(scaled, scale_factor=2, mode="bilinear", align_corners=False)
    images = enlarged.round().to(torch.uint8).repeat(1, 3, 1, 1)
    targets = torch.from_numpy(labels).to(torch.int64)
    brightness = images[train].to(torch.float64) / 255
    return ResidentData(
        name="digits",
        train=ImageSet(images[train], targets[train]),
        test=ImageSet(images[test], targets[test]),
        num_classes=10,
        mean=(brightness.mean().item(),) * 3,
        std=(brightness.std(correction=0).item(),) * 3,
        augmentation=Augmentation(padding=1, flip=False),
    )


class FunctionSplit(KeyedSplit):
    """One of the datasets that a function has returned.

    The random numbers of an image depend on the seed, the epoch and the index only, so that a run resumes exactly.
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
    """The data that a function returns when called with `root`.

    It may be `ResidentData` or `FolderData`, or a pair of datasets, to learn from and to test on. Their images are
    float32 tensors as the network takes them, and the first has the names of the `classes`, as torchvision's have.
    """
    function = import_named("data", name)
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
        raise ValueError(f"data {name!r}: images to learn from are {shapes[0]}, to test on {shapes[1]}; crop them")
    labels = len(classes)
    return FolderData(name=name, train=train, test=test, num_classes=labels, image_shape=shapes[0], preprocessing=None)


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
