"""Folders of images, such as ImageNet: `root/train/CLASS/*.jpg` and `root/val/CLASS/*.jpg`."""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import IMG_EXTENSIONS
from torchvision.transforms import InterpolationMode, functional

from strucspars.core.checks import IntArray
from strucspars.core.plan import Preprocessing
from strucspars.data.image_set import KeyedSplit, SampleKey, Stream, generator_for
from strucspars.io.files import IMAGE_BYTES, open_file

# Pillow goes by the content, not the name, and starts another program for EPS and similar formats.
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
# Pillow reads 16-bit grey of these as 32-bit numbers in 0 .. 65535: PGM always, PNG in older versions.
FORMATS_WITHOUT_32_BIT = ("PNG", "PPM")


def read_image(path: str) -> Image.Image:
    """The image in a file, in 8-bit RGB. 16-bit grey is scaled by its whole range: 65535 becomes 255."""
    with open_file(path, limit=IMAGE_BYTES) as file, Image.open(file, formats=FORMATS) as image:
        return in_8_bits(image).convert("RGB")


def in_8_bits(image: Image.Image) -> Image.Image:
    """16-bit grey scaled to 8 bit, where Pillow would clip it at 255; images of 8 bit are not changed."""
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in FORMATS_WITHOUT_32_BIT):
        # Rounded: 257 is odd, so nothing is halfway.
        return Image.fromarray(((np.asarray(image).astype(np.int32) + 128) // 257).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError(f"its 32-bit pixels (mode {image.mode}) have no fixed range; convert them to 8 or 16 bit")
    return image


TEST_FOLDERS = ("val", "test")


class FolderSplit(KeyedSplit):
    """The images of one split, each resized (shortest side), cropped, maybe mirrored, and normalised.

    `split[epoch, index]` is a float32 image `(3, size, size)` and its label. Crop and mirror depend on the seed, the
    epoch and the index only: not on the global random state, not on which process asks, nor in what order.

    Args:
        random: crop anywhere and mirror every other image, as in training; otherwise take the centre.
        num_classes: outputs of the network, which the folders must fit: one per output in the order of names, or named
            by the numbers of their outputs, then maybe only some. None: one output per folder.
    """

    def __init__(
        self, root: Path, preprocessing: Preprocessing, *, random: bool, seed: int, num_classes: int | None = None
    ) -> None:
        try:
            folder = ImageFolder(str(root))
        except FileNotFoundError as error:  # torchvision's word for "no classes" and for "a class without images"
            raise FileNotFoundError(f"{root} must hold a folder of images for every class: {error}") from error
        self.classes = tuple(folder.classes)
        self._root = root
        # One array instead of a million strings: touching a string's reference count copies its page in every worker.
        self._paths = np.array([os.fsencode(path) for path, _ in folder.samples])
        self._labels = np.array(folder.targets)
        if num_classes is not None:
            if not fits_outputs(self.classes, num_classes):
                raise ValueError(
                    f"{root} has {len(self.classes)} folders of classes ({', '.join(self.classes[:3])}, ...), but the "
                    f"network has {num_classes} outputs; give images of all its classes, or name every folder by the "
                    "number of its output"
                )
            outputs = _numbers(self.classes, num_classes)
            self._labels = self._labels if outputs is None else outputs[self._labels]
        self.preprocessing = preprocessing
        self.random = random
        self.seed = seed

    def __len__(self) -> int:
        return len(self._paths)

    @property
    def shown_labels(self) -> IntArray:
        """The labels that some image has, in order."""
        return np.unique(self._labels)

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
        image = resized_image(os.fsdecode(self._paths[index]), self.preprocessing)
        if self.random:
            image = self._random_crop(image, generator_for(Stream.SAMPLE, self.seed, epoch, index))
        else:
            image = functional.center_crop(image, self.preprocessing.size)
        return normalised(image, self.preprocessing), int(self._labels[index])

    def _random_crop(self, image: Image.Image, generator: torch.Generator) -> Image.Image:
        _, height, width = functional.get_dimensions(image)
        size = self.preprocessing.size
        top = int(torch.randint(0, height - size + 1, (), generator=generator))
        left = int(torch.randint(0, width - size + 1, (), generator=generator))
        mirrored = bool(torch.randint(0, 2, (), generator=generator))
        cropped: Image.Image = functional.crop(image, top, left, size, size)
        return functional.hflip(cropped) if mirrored else cropped


def resized(image: Image.Image, preprocessing: Preprocessing) -> Image.Image:
    """The image with its shortest side resized; the caller crops it."""
    shortest = preprocessing.size if preprocessing.resize is None else preprocessing.resize
    result: Image.Image = functional.resize(image, shortest, InterpolationMode(preprocessing.interpolation))
    return result


def resized_image(path: str, preprocessing: Preprocessing) -> Image.Image:
    """The image in a file, resized."""
    try:
        return resized(read_image(path), preprocessing)
    except Exception as error:  # decoders of many formats raise many types
        raise ValueError(f"cannot read the image {path}: {error}; replace or remove it") from error


def normalised(image: Image.Image, preprocessing: Preprocessing) -> torch.Tensor:
    """The pixels as the network takes them: float32 `(3, H, W)`."""
    pixels: torch.Tensor = functional.to_tensor(image)
    normal: torch.Tensor = functional.normalize(pixels, preprocessing.mean, preprocessing.std)
    return normal


def fits_outputs(classes: Sequence[str], num_classes: int) -> bool:
    """Whether folders of these names can mean outputs of a network: all of them, or some by their numbers."""
    return len(classes) == num_classes or _numbers(classes, num_classes) is not None


def _numbers(classes: Sequence[str], num_classes: int) -> IntArray | None:
    """The numbers that folders are named by; None if they are not all different outputs."""
    if not all(name.isascii() and name.isdecimal() for name in classes):
        return None
    numbers = np.array([int(name) for name in classes])
    is_valid = len({*numbers.tolist()}) == len(classes) and numbers.max() < num_classes
    return numbers if is_valid else None


def evaluation_split(root: Path, preprocessing: Preprocessing, *, num_classes: int) -> FolderSplit:
    """The labelled images of a folder, or of val/ or test/ in it, to evaluate a network of so many outputs on."""
    place = test_folder(root) or root
    if not place.is_dir():
        raise FileNotFoundError(f"there is no folder {root}; give one with a folder of images for every class")
    return FolderSplit(place, preprocessing, random=False, seed=0, num_classes=num_classes)


def test_folder(root: Path) -> Path | None:
    """The subfolder with the images to test on; None where there is none."""
    return next((root / name for name in TEST_FOLDERS if (root / name).is_dir()), None)


def calibration_images(root: Path, preprocessing: Preprocessing, *, count: int, seed: int = 0) -> torch.Tensor:
    """Some images of a folder, also of `train/` in it, cropped at the centre and normalised: `(N, 3, size, size)`."""
    place = root / "train" if (root / "train").is_dir() else root
    if not place.is_dir():
        raise FileNotFoundError(f"there is no folder {root}; give a folder of images")
    paths = sorted(path for path in place.rglob("*") if path.suffix.lower() in IMG_EXTENSIONS)
    if not paths:
        raise FileNotFoundError(f"{place} holds no image; give a folder of images ({', '.join(IMG_EXTENSIONS)})")
    chosen = torch.randperm(len(paths), generator=generator_for(Stream.ORDER, seed, 0))[:count]
    images = (resized_image(str(paths[index]), preprocessing) for index in sorted(chosen.tolist()))
    return torch.stack(
        [normalised(functional.center_crop(image, preprocessing.size), preprocessing) for image in images]
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class FolderData:
    """A data set that stays on disk; `preprocessing` is None where a function of the user makes the images."""

    name: str
    train: KeyedSplit
    test: KeyedSplit
    num_classes: int
    image_shape: tuple[int, int, int]
    preprocessing: Preprocessing | None

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, in the order of the labels."""
        return self.train.classes

    def listing(self) -> dict[str, int | str]:
        """Counts and digests of the images: equal for the same names and labels in the same order."""
        return {
            "train_images": len(self.train),
            "test_images": len(self.test),
            "names": f"{self.train.names_digest()} {self.test.names_digest()}",
        }


def image_folder(
    root: Path,
    preprocessing: Preprocessing | None = None,
    *,
    val: Path | None = None,
    seed: int = 0,
    num_classes: int | None = None,
) -> FolderData:
    """Images in `root/train/CLASS/` and `root/val/CLASS/` (or `root/test/CLASS/`), with the paper's transforms.

    Training (Sec. 3.5): shortest side 8/7 of the crop or more, random crop, mirrored half of the time. Evaluation: the
    centre. With `val`, the folder of the images to test on, `root` may hold the classes to learn from itself.
    """
    preprocessing = preprocessing or Preprocessing()
    train_root, test_root = root / "train", test_folder(root if val is None else val)
    if val is not None:
        train_root, test_root = train_root if train_root.is_dir() else root, test_root or val
    if not train_root.is_dir() or test_root is None or not test_root.is_dir():
        places = [str(root / name) for name in TEST_FOLDERS] if val is None else [str(val)]
        raise FileNotFoundError(
            f"no image folders under {root}; looked for {train_root} and for {' or '.join(places)}, each with one "
            "folder of images per class"
        )
    # Networks that are evaluated on whole images, without a border to crop, are still trained on random crops.
    wider = max(preprocessing.resize or 0, round(preprocessing.size * 8 / 7))
    cropped = replace(preprocessing, resize=wider)
    train = FolderSplit(train_root, cropped, random=True, seed=seed, num_classes=num_classes)
    test = FolderSplit(test_root, preprocessing, random=False, seed=seed, num_classes=num_classes)
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
        num_classes=num_classes or len(train.classes),
        image_shape=(3, preprocessing.size, preprocessing.size),
        preprocessing=preprocessing,
    )
