"""CIFAR-10 and CIFAR-100, in the "python version" that their authors publish.

The files are pickles, read without executing anything (`restricted_pickle`). Their contents are checked instead of a
checksum, so that repacked copies work.
"""

import gzip
import os
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from strucspars.data.image_set import Augmentation, ImageSet, ResidentData
from strucspars.data.restricted_pickle import load_plain_pickle, plain_array
from strucspars.io.files import read_bytes

# The largest real file has 155 MB; protocol 2 of Python 3 can make twice of it.
MAX_FILE_BYTES = 512 * 2**20
MAX_ARCHIVE_BYTES = 1024 * 2**20
BLOCK_BYTES = 1024 * 1024
IMAGE_SHAPE = (3, 32, 32)
BYTES_PER_IMAGE = 3072
# Name within the data set, location for errors, content.
FoundFile = tuple[str, str, bytes]


@dataclass(frozen=True, kw_only=True)
class CifarLayout:
    """What the files of a CIFAR data set are called, and what they must hold."""

    name: str
    torchvision_name: str
    folder: str
    archive: str
    train_files: tuple[str, ...]
    test_file: str
    images_per_train_file: int
    images_per_test_file: int
    label_key: str
    num_classes: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


CIFAR10 = CifarLayout(
    name="cifar10",
    torchvision_name="CIFAR10",
    folder="cifar-10-batches-py",
    archive="cifar-10-python.tar.gz",
    train_files=tuple(f"data_batch_{number}" for number in range(1, 6)),
    test_file="test_batch",
    images_per_train_file=10_000,
    images_per_test_file=10_000,
    label_key="labels",
    num_classes=10,
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2470, 0.2435, 0.2616),
)
CIFAR100 = CifarLayout(
    name="cifar100",
    torchvision_name="CIFAR100",
    folder="cifar-100-python",
    archive="cifar-100-python.tar.gz",
    train_files=("train",),
    test_file="test",
    images_per_train_file=50_000,
    images_per_test_file=10_000,
    label_key="fine_labels",
    num_classes=100,
    mean=(0.5071, 0.4865, 0.4409),
    std=(0.2673, 0.2564, 0.2762),
)


def cifar10(root: str | os.PathLike[str], *, download: bool = False) -> ResidentData:
    """CIFAR-10: 50,000 training and 10,000 test images of 32 x 32 pixels in ten classes.

    Args:
        root: the folder that holds `cifar-10-batches-py` or `cifar-10-python.tar.gz`, or one of the two itself.
        download: fetch the archive to `root` with torchvision if it is not there.

    Raises:
        FileNotFoundError: no data there; the message lists the places looked at.
        ValueError: a file is damaged, incomplete, or asks for code to be run (which is not done).
    """
    return read_cifar(Path(root), CIFAR10, download=download)


def cifar100(root: str | os.PathLike[str], *, download: bool = False) -> ResidentData:
    """CIFAR-100: as `cifar10`, with a hundred classes, in `cifar-100-python` or `cifar-100-python.tar.gz`."""
    return read_cifar(Path(root), CIFAR100, download=download)


def read_cifar(root: Path, layout: CifarLayout, *, download: bool) -> ResidentData:
    """The data set of a layout, looked for under `root`."""
    files = _find_files(root, layout)
    if files is None and download:
        _download(root, layout)
        files = _find_files(root, layout)
    if files is None:
        raise FileNotFoundError(_places_searched(root, layout))
    splits = {name: _image_set(source, content, name, layout) for name, source, content in files}
    train = [splits[name] for name in layout.train_files]
    return ResidentData(
        name=layout.name,
        train=ImageSet(torch.cat([part.images for part in train]), torch.cat([part.labels for part in train])),
        test=splits[layout.test_file],
        num_classes=layout.num_classes,
        mean=layout.mean,
        std=layout.std,
        augmentation=Augmentation(padding=4, flip=True),
    )


def _find_files(root: Path, layout: CifarLayout) -> Iterator[FoundFile] | None:
    names = (*layout.train_files, layout.test_file)
    for folder in (root / layout.folder, root):
        if all((folder / name).exists() for name in names):
            return ((name, str(folder / name), read_bytes(folder / name, limit=MAX_FILE_BYTES)) for name in names)
    for archive in (root / layout.archive, root):
        if archive.is_file():
            return _files_in_archive(archive, layout.folder, names)
    return None


class _LimitedReader(gzip.GzipFile):
    """A gzip file with a limit on its unpacked size, against zip bombs."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "rb")
        self.path = path
        self.bytes_left = MAX_ARCHIVE_BYTES

    def read(self, size: int | None = BLOCK_BYTES) -> bytes:
        """The next bytes, at most a block of them."""
        block = super().read(BLOCK_BYTES if size is None or size < 0 else min(size, BLOCK_BYTES))
        self.bytes_left -= len(block)
        if self.bytes_left < 0:
            raise ValueError(f"{self.path} unpacks to more than {MAX_ARCHIVE_BYTES} bytes; it is no CIFAR archive")
        return block


def _files_in_archive(archive: Path, folder: str, names: tuple[str, ...]) -> Iterator[FoundFile]:
    """The named files of `folder` in a `.tar.gz`, in the archive's order; nothing is written to disk."""
    wanted = {f"{folder}/{name}": name for name in names}
    try:
        # "r|" reads forwards only, so that every byte counts towards the limit once.
        with _LimitedReader(archive) as unpacked, tarfile.open(fileobj=unpacked, mode="r|") as members:
            for member in members:
                name = wanted.pop(member.name.removeprefix("./"), None)
                if name is not None:
                    yield name, f"{archive}:{member.name}", _content(archive, members, member)
    # A gzip file may end early, be none, or decode to nonsense.
    except (gzip.BadGzipFile, EOFError, zlib.error, tarfile.TarError) as error:
        raise ValueError(f"{archive} is no .tar.gz archive, or damaged: {error}; download it again") from error
    if wanted:
        raise ValueError(f"{archive} lacks {', '.join(sorted(wanted))}; download it again")


def _content(archive: Path, members: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = members.extractfile(member) if member.isfile() else None
    if file is None:
        raise ValueError(f"{archive}: {member.name} is not a plain file; download the archive again")
    if member.size > MAX_FILE_BYTES:
        raise ValueError(f"{archive}: {member.name} claims {member.size} bytes; it is no CIFAR file")
    content = file.read()
    if len(content) != member.size:
        raise ValueError(f"{archive}: {member.name} ends early; download the archive again")
    return content


def _places_searched(root: Path, layout: CifarLayout) -> str:
    names = (*layout.train_files, layout.test_file)
    lines = [f"no {layout.torchvision_name} data under {root}; looked for"]
    for folder in (root / layout.folder, root):
        missing = [name for name in names if not (folder / name).exists()]
        state = f"lacks {', '.join(missing)}" if folder.is_dir() else "no such folder"
        lines.append(f"  the folder {folder}: {state}")
    lines.append(f"  the archive {root / layout.archive}: no such file")
    download = "data.download=true in a recipe or on the command line, download=True in Python"
    lines.append(f"put {layout.archive} there, unpacked or not, or ask for a download ({download})")
    return "\n".join(lines)


def _download(root: Path, layout: CifarLayout) -> None:
    """Fetch and check the archive with torchvision; its own reader is not used."""
    import torchvision

    if root.name.endswith(".gz"):
        raise ValueError(f"cannot download to {root}, which is the name of an archive; give the folder it should be in")
    try:
        getattr(torchvision.datasets, layout.torchvision_name)(root, download=True)
    except (OSError, RuntimeError) as error:
        raise OSError(
            f"cannot download {layout.torchvision_name} to {root}: {error}; "
            f"fetch {layout.archive} by other means and put it there"
        ) from error


def _image_set(source: str, content: bytes, name: str, layout: CifarLayout) -> ImageSet:
    """Images and labels of one file, if they are what the layout promises."""
    fields = load_plain_pickle(content, source=source)
    if not isinstance(fields, dict):
        raise ValueError(f"{source} holds a {type(fields).__name__} instead of a dictionary; it is no CIFAR file")
    # Keys are text or bytes, by the Python that wrote them.
    fields = {key.decode("latin1") if isinstance(key, bytes) else key: field for key, field in fields.items()}
    expected = layout.images_per_test_file if name == layout.test_file else layout.images_per_train_file
    images = plain_array(fields.get("data"))
    if images is None or images.dtype != np.uint8 or images.shape != (expected, BYTES_PER_IMAGE):
        found = "no array of bytes" if images is None or images.dtype != np.uint8 else f"images of {images.shape}"
        raise ValueError(f"{source} has {found}, expected {(expected, BYTES_PER_IMAGE)} as 'data'; download it again")
    labels = fields.get(layout.label_key)
    array = plain_array(labels)
    numbers = labels if array is None else array.ravel().tolist()
    if not isinstance(numbers, list) or not all(type(number) is int for number in numbers):
        raise ValueError(
            f"{source} has no list of whole numbers under {layout.label_key!r}; it is no {layout.name} file"
        )
    if len(numbers) != expected:
        raise ValueError(f"{source} has {len(numbers)} labels for {expected} images; download it again")
    if not all(0 <= number < layout.num_classes for number in numbers):
        raise ValueError(f"{source} has a label outside 0 .. {layout.num_classes - 1}: it is no {layout.name} file")
    # A copy: the array lies over the file's bytes, which torch would not treat as read-only.
    return ImageSet(torch.from_numpy(images.reshape(expected, *IMAGE_SHAPE).copy()), torch.tensor(numbers))
