"""CIFAR-10 and CIFAR-100, in the "python version" that their authors publish.

The files are pickles, and a pickle is a program. They are read without importing or calling anything that they name:
numpy's names become stand-ins that record an array's shape, type and bytes, and any other name is refused. The contents
are checked instead of a checksum, so that repacked copies work.
"""

import io
import os
import pickle
import pickletools
import tarfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from strucspars.data.image_set import Augmentation, ImageSet, ResidentData
from strucspars.io.files import read_bytes

# The largest real file has 155 MB; protocol 2 of Python 3 can double it.
MAX_FILE_BYTES = 512 * 2**20
IMAGE_SHAPE = (3, 32, 32)
# An array takes six.
MOST_TUPLES = 24
# Name within the data set, location for errors, content.
FoundFile = tuple[str, str, bytes]


@dataclass(frozen=True, kw_only=True)
class CifarLayout:
    """What the files of a CIFAR data set are called, and what they must hold."""

    name: str
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
CIFAR_LAYOUTS = {layout.name: layout for layout in (CIFAR10, CIFAR100)}


def read_cifar(root: str | os.PathLike[str], layout: CifarLayout, *, download: bool = False) -> ResidentData:
    """The images of CIFAR-10 or CIFAR-100 in `root`, which holds the folder or the archive, or is one of the two."""
    root = Path(root)
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


def _files_in_archive(archive: Path, folder: str, names: tuple[str, ...]) -> Iterator[FoundFile]:
    """The named files of `folder` in a `.tar.gz`, in the archive's order; nothing is written to disk."""
    wanted = {f"{folder}/{name}": name for name in names}
    try:
        with tarfile.open(archive, mode="r|gz") as members:
            for member in members:
                name = wanted.pop(member.name.removeprefix("./"), None)
                if name is not None:
                    file = members.extractfile(member) if member.isfile() else None
                    if file is None or member.size > MAX_FILE_BYTES:
                        raise tarfile.TarError(f"{name} is not a plain file of at most {MAX_FILE_BYTES:,} bytes")
                    yield name, f"{archive}:{member.name}", file.read()
    # A gzip file may end early, be of another format, or decode to nonsense.
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise ValueError(f"{archive} is not a .tar.gz archive, or damaged: {error}; download it again") from error
    if wanted:
        raise ValueError(f"{archive} lacks {', '.join(sorted(wanted))}; download it again")


def _places_searched(root: Path, layout: CifarLayout) -> str:
    names = (*layout.train_files, layout.test_file)
    lines = [f"no {layout.name.upper()} data under {root}; looked for"]
    for folder in (root / layout.folder, root):
        missing = [name for name in names if not (folder / name).exists()]
        state = f"lacks {', '.join(missing)}" if folder.is_dir() else "no such folder"
        lines.append(f"  the folder {folder}: {state}")
    lines.append(f"  the archive {root / layout.archive}: no such file")
    download = "data.download=true in a recipe or on the command line, download=True in Python"
    lines.append(f"put {layout.archive} there, unpacked or not, or ask for a download ({download})")
    return "\n".join(lines)


def _download(root: Path, layout: CifarLayout) -> None:
    """Fetch and check the archive with torchvision; its own reader, which unpickles, is not used."""
    import torchvision

    if root.name.endswith(".gz"):
        raise ValueError(f"cannot download to {root}, which is the name of an archive; give the folder it should be in")
    try:
        getattr(torchvision.datasets, layout.name.upper())(root, download=True)
    except (OSError, RuntimeError) as error:
        raise OSError(
            f"cannot download {layout.name.upper()} to {root}: {error}; "
            f"fetch {layout.archive} by other means and put it there"
        ) from error


def _image_set(source: str, content: bytes, name: str, layout: CifarLayout) -> ImageSet:
    """Images and labels of one file, if they are what the layout promises."""
    fields = load_plain_pickle(content, source=source)
    if not isinstance(fields, dict):
        raise ValueError(f"{source} holds a {type(fields).__name__} instead of a dictionary; it is not a CIFAR file")
    # Keys are text or bytes, by the Python that wrote them.
    fields = {key.decode("latin1") if isinstance(key, bytes) else key: field for key, field in fields.items()}
    expected = layout.images_per_test_file if name == layout.test_file else layout.images_per_train_file
    images = fields.get("data")
    if not isinstance(images, np.ndarray) or images.dtype != np.uint8 or images.shape != (expected, 3072):
        found = f"{images.dtype} of {images.shape}" if isinstance(images, np.ndarray) else "no array"
        raise ValueError(f"{source} has {found}, expected uint8 of {(expected, 3072)}; download it again")
    labels = fields.get(layout.label_key)
    numbers = labels.ravel().tolist() if isinstance(labels, np.ndarray) else labels
    if not isinstance(numbers, list) or not all(
        type(number) is int and 0 <= number < layout.num_classes for number in numbers
    ):
        raise ValueError(
            f"{source} has no list of whole numbers 0 .. {layout.num_classes - 1} under {layout.label_key!r}; it is "
            f"not a {layout.name} file"
        )
    if len(numbers) != expected:
        raise ValueError(f"{source} has {len(numbers)} labels for {expected} images; download it again")
    # A copy: the array is a view of the file's bytes, which torch would not treat as read-only.
    return ImageSet(torch.from_numpy(images.reshape(expected, *IMAGE_SHAPE).copy()), torch.tensor(numbers))


def load_plain_pickle(data: bytes, *, source: str) -> object:
    """The value pickled in `data`, if it is made of numbers, text, bytes, lists, tuples, dicts and integer arrays only.

    Any protocol of Python 2 and 3; text of Python 2 becomes bytes. Arrays are found at the top, or as values of a
    dictionary at the top. Anything else is a `ValueError`.
    """
    try:
        _check_costs(data)
        value = _PlainUnpickler(io.BytesIO(data), encoding="bytes").load()
        if isinstance(value, dict):
            return {key: _plain(entry) for key, entry in value.items()}
        return _plain(value)
    except Exception as error:  # damaged pickles raise almost any type
        raise ValueError(f"{source} cannot be read safely: {str(error) or type(error).__name__}") from error


def _check_costs(data: bytes) -> None:
    """Refuse a small pickle that takes much memory or time."""
    tuples = 0
    for count, (opcode, argument, _) in enumerate(pickletools.genops(data)):
        # The memo is a table as long as its largest index. Hashing n nested tuples can take 2**n steps.
        tuples += opcode.name.startswith("TUPLE")
        if (opcode.name.endswith("PUT") and int(argument or 0) > count) or tuples > MOST_TUPLES:
            raise ValueError(f"instruction {count} needs more memory or time than plain arrays do")


class _Dtype:
    """Stands for `numpy.dtype`."""

    def __init__(self, code: Any, *_: object) -> None:
        self.code, self.byte_order = _text(code), "="

    def __setstate__(self, state: Any) -> None:
        # (version, byte order, ...)
        self.byte_order = _text(state[1])


class _Array:
    """Stands for an array: `numpy.ndarray` and the functions that make one."""

    def __init__(self, *_: object) -> None:
        self.parts: Any = None

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, is_fortran, content = state
        self.parts = content, dtype, shape, "F" if is_fortran else "C"


def _array_of_buffer(content: Any, dtype: object, shape: object, order: object) -> _Array:
    """Stands for numpy's `_frombuffer`, which protocol 5 uses."""
    array = _Array()
    array.parts = bytes(content), dtype, shape, _text(order)
    return array


def _encode(text: str, encoding: object) -> bytes:
    """Stands for `_codecs.encode`, by which Python 3 writes bytes under the protocols of Python 2."""
    if _text(encoding) != "latin1":
        raise ValueError(f"it asks for the encoding {encoding!r:.80}")
    return text.encode("latin1")


STAND_INS: dict[tuple[str, str], Callable[..., object]] = {
    ("_codecs", "encode"): _encode,
    ("numpy", "dtype"): _Dtype,
    ("numpy", "ndarray"): _Array,
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy.core.numeric", "_frombuffer"): _array_of_buffer,
    ("numpy._core.numeric", "_frombuffer"): _array_of_buffer,
}


class _PlainUnpickler(pickle.Unpickler):
    """Finds stand-ins, and nothing else."""

    def find_class(self, module: str, name: str, /) -> object:
        if (module, name) not in STAND_INS:
            raise ValueError(f"it asks for {f'{module}.{name}'!r:.80}, which no plain array needs")
        return STAND_INS[module, name]


def _plain(value: object) -> object:
    """The array that a stand-in describes, as a read-only view of the file's bytes; any other value unchanged."""
    if not isinstance(value, _Array):
        return value
    content, dtype, shape, order = value.parts
    kind = np.dtype(dtype.byte_order + dtype.code)
    if kind.kind not in "iu":
        raise ValueError(f"it has an array of type {kind}, and only whole numbers are allowed")
    return np.frombuffer(content, kind).reshape(shape, order=order)


def _text(value: Any) -> str:
    return value.decode("latin1") if isinstance(value, bytes) else str(value)
