"""Folders of images, such as ImageNet: `root/train/CLASS/*.jpg` and `root/val/CLASS/*.jpg`."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset
from torchvision.datasets import ImageFolder
from torchvision.transforms import functional

from strucspars.data.image_set import Stream, generator_for
from strucspars.io.files import IMAGE_BYTES, open_file

# Pillow goes by the content, not the name, and starts another program for EPS and similar formats.
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
# Pillow reads 16-bit grey of these as 32-bit numbers in 0 .. 65535: PGM always, PNG in older versions.
FORMATS_WITHOUT_32_BIT = ("PNG", "PPM")


def read_image(path: str) -> Image.Image:
    """The image in a file, in 8-bit RGB. 16-bit grey is scaled by its whole range: 65535 becomes 255.

    Raises:
        ValueError: the pixels have no fixed range, or it is not a regular file.
        Exception: of almost any type, where the file is damaged.
    """
    with open_file(path, limit=IMAGE_BYTES) as file, Image.open(file, formats=FORMATS) as image:
        return in_8_bits(image).convert("RGB")


def in_8_bits(image: Image.Image) -> Image.Image:
    """16-bit grey scaled to 8 bit, where Pillow would clip it at 255; images of 8 bit are not changed.

    Raises:
        ValueError: the pixels are 32-bit numbers, which have no known white.
    """
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in FORMATS_WITHOUT_32_BIT):
        # Rounded: 257 is odd, so nothing is halfway.
        return Image.fromarray(((np.asarray(image).astype(np.int32) + 128) // 257).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError(
            f"its 32-bit pixels (Pillow's mode {image.mode}) have no fixed range, and must be converted to 8 or 16 bit"
        )
    return image


IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
TEST_FOLDERS = ("val", "test")

SampleKey = tuple[int, int]
"""Epoch and index of an image; persistent worker processes learn the epoch from it."""


class FolderSplit(Dataset[tuple[torch.Tensor, int]]):
    """The images of one split, each resized (shortest side), cropped, maybe mirrored, and normalised.

    `split[epoch, index]` is a float32 image `(3, image_size, image_size)` and its label. Crop and mirror depend on the
    seed, the epoch and the index only: not on the global random state, not on which process asks, nor in what order.

    Args:
        root: a folder with one folder of images per class.
        image_size: side of the crop.
        resize: length that the shortest side gets before.
        random: crop anywhere and mirror every other image, as in training; otherwise take the centre.
        seed: of the crops and mirrors.
    """

    def __init__(self, root: Path, *, image_size: int, resize: int, random: bool, seed: int) -> None:
        if not 1 <= image_size <= resize:
            raise ValueError(f"image_size must be in 1 .. resize ({resize}), got {image_size}")
        try:
            folder = ImageFolder(str(root))
        except FileNotFoundError as error:  # torchvision's word for "no classes" and for "a class without images"
            raise FileNotFoundError(f"{root} must hold a folder of images for every class: {error}") from error
        self.classes = tuple(folder.classes)
        self._root = root
        # One array instead of a million strings: touching a string's reference count copies its page in every worker.
        self._paths = np.array([os.fsencode(path) for path, _ in folder.samples])
        self._labels = np.array(folder.targets)
        self.image_size = image_size
        self.resize = resize
        self.random = random
        self.seed = seed

    def __len__(self) -> int:
        return len(self._paths)

    def names_digest(self) -> str:
        """SHA-256 of the images' names and labels in order, whatever the path of the folder and the class names."""
        digest = hashlib.sha256()
        before_class = len(os.fsencode(self._root / "_")) - 1
        for label, path in zip(self._labels.tolist(), self._paths.tolist(), strict=True):
            name = path[before_class:].partition(os.fsencode(os.sep))[2]
            digest.update(b"%d/%s\0" % (label, name))
        return digest.hexdigest()

    def __getitem__(self, key: SampleKey) -> tuple[torch.Tensor, int]:
        epoch, index = key
        path = os.fsdecode(self._paths[index])
        try:
            image = functional.resize(read_image(path), self.resize)
        except Exception as error:  # decoders of many formats raise many types
            raise ValueError(f"cannot read the image {path}: {error}; replace or remove it") from error
        if self.random:
            image = self._random_crop(image, generator_for(Stream.SAMPLE, self.seed, epoch, index))
        else:
            image = functional.center_crop(image, self.image_size)
        pixels = functional.normalize(functional.to_tensor(image), IMAGENET_MEAN, IMAGENET_STD)
        return pixels, int(self._labels[index])

    def _random_crop(self, image: Image.Image, generator: torch.Generator) -> Image.Image:
        _, height, width = functional.get_dimensions(image)
        top = int(torch.randint(0, height - self.image_size + 1, (), generator=generator))
        left = int(torch.randint(0, width - self.image_size + 1, (), generator=generator))
        mirrored = bool(torch.randint(0, 2, (), generator=generator))
        cropped: Image.Image = functional.crop(image, top, left, self.image_size, self.image_size)
        return functional.hflip(cropped) if mirrored else cropped


@dataclass(frozen=True, eq=False, kw_only=True)
class FolderData:
    """A data set that stays on disk.

    Attributes:
        name: what the data set is called in recipes.
        train: images to learn from, cropped at random.
        test: images to evaluate on, cropped at the centre.
        num_classes: as many as there are folders.
        image_shape: channels, height and width of the images that `train` and `test` give.
    """

    name: str
    train: FolderSplit
    test: FolderSplit
    num_classes: int
    image_shape: tuple[int, int, int]

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the class folders, in the order of the labels."""
        return self.train.classes

    def listing(self) -> dict[str, int | str]:
        """Counts and digests of the images: equal for the same names and labels in the same order."""
        return {
            "train_images": len(self.train),
            "test_images": len(self.test),
            "names": f"{self.train.names_digest()} {self.test.names_digest()}",
        }


def image_folder(root: Path, *, image_size: int = 224, resize: int = 256, seed: int = 0) -> FolderData:
    """Images in `root/train/CLASS/` and `root/val/CLASS/` (or `root/test/CLASS/`), with the paper's transforms.

    Training (Sec. 3.5): shortest side 256, random crop of 224, mirrored half of the time. Evaluation: the centre.

    Args:
        root: the folder with the two splits.
        image_size: side of the crops.
        resize: length that the shortest side gets before the crop.
        seed: of the random crops and mirrors.

    Raises:
        FileNotFoundError: a folder is missing, or has no classes, or a class has no images.
        ValueError: the splits have different classes.
    """
    train_root = root / "train"
    test_root = next((root / name for name in TEST_FOLDERS if (root / name).is_dir()), None)
    if not train_root.is_dir() or test_root is None:
        raise FileNotFoundError(
            f"no image folders under {root}; looked for {train_root} and for "
            f"{' or '.join(str(root / name) for name in TEST_FOLDERS)}, each with one folder of images per class"
        )
    train = FolderSplit(train_root, image_size=image_size, resize=resize, random=True, seed=seed)
    test = FolderSplit(test_root, image_size=image_size, resize=resize, random=False, seed=seed)
    if train.classes != test.classes:
        only_train, only_test = sorted({*train.classes} - {*test.classes}), sorted({*test.classes} - {*train.classes})
        raise ValueError(
            f"{train_root} and {test_root} must have the same classes; only the first has {only_train[:5]}, "
            f"only the second {only_test[:5]}"
        )
    return FolderData(
        name=root.resolve().name,
        train=train,
        test=test,
        num_classes=len(train.classes),
        image_shape=(3, image_size, image_size),
    )
