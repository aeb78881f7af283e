import gzip
import os
import pickle
import struct
import tarfile
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torchvision

from strucspars.data import cifar as cifar_files
from strucspars.data.cifar import CIFAR10, CIFAR100, CifarLayout, read_cifar
from strucspars.data.image_set import Augmentation, ResidentData

SMALL10 = replace(CIFAR10, images_per_train_file=4, images_per_test_file=3)
SMALL100 = replace(CIFAR100, images_per_train_file=6, images_per_test_file=3)


def files_of(layout: CifarLayout) -> dict[str, dict[str, Any]]:
    """Random content for every file of a layout."""
    generator = np.random.default_rng(0)
    counts = dict.fromkeys(layout.train_files, layout.images_per_train_file)
    counts[layout.test_file] = layout.images_per_test_file
    return {
        name: {
            "data": generator.integers(256, size=(count, 3072), dtype=np.uint8),
            layout.label_key: generator.integers(layout.num_classes, size=count).tolist(),
            "coarse_labels": [0] * count,
        }
        for name, count in counts.items()
    }


def write_folder(folder: Path, files: dict[str, Any], protocol: int = pickle.DEFAULT_PROTOCOL) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, fields in files.items():
        (folder / name).write_bytes(pickle.dumps(fields, protocol=protocol))
    return folder


def write_archive(path: Path, folder: Path, prefix: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as archive:
        archive.add(folder, f"{prefix}{folder.name}")
    return path


def python2_batch(images: np.ndarray, labels: list[int], *, label_key: str = "labels") -> bytes:
    """A CIFAR file as Python 2 and its numpy wrote it, the published ones among them. Python 3 cannot."""
    keys_and_values = (
        (_string(b"batch_label"), _string(b"training batch 1 of 5")),
        (_string(label_key.encode()), _numbers(labels)),
        (_string(b"data"), _array(images)),
        (_string(b"filenames"), b"](" + b"".join(_string(b"image_%d.png" % n) for n in range(len(labels))) + b"e"),
    )
    return b"\x80\x02}(" + b"".join(key + value for key, value in keys_and_values) + b"u."


def _string(text: bytes) -> bytes:
    return b"U" + struct.pack("<B", len(text)) + text


def _numbers(values: list[int]) -> bytes:
    return b"](" + b"".join(b"J" + struct.pack("<i", value) for value in values) + b"e"


def _array(array: np.ndarray) -> bytes:
    content = array.tobytes()
    empty = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00t" + _string(b"b") + b"tR"
    shape = b"(" + b"".join(b"J" + struct.pack("<i", length) for length in array.shape) + b"t"
    dtype_state = b"(K\x03" + _string(b"|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    dtype = b"cnumpy\ndtype\n(" + _string(array.dtype.str[1:].encode()) + b"K\x00K\x01tR" + dtype_state
    return empty + b"(K\x01" + shape + dtype + b"\x89" + b"T" + struct.pack("<I", len(content)) + content + b"tb"


def read(root: Path, layout: CifarLayout = SMALL10) -> ResidentData:
    return read_cifar(root, layout, download=False)


def assert_holds(data: ResidentData, files: dict[str, dict[str, Any]], layout: CifarLayout) -> None:
    train = [files[name] for name in layout.train_files]
    expected_train = np.concatenate([fields["data"] for fields in train]).reshape(-1, 3, 32, 32)
    np.testing.assert_array_equal(data.train.images.numpy(), expected_train)
    assert data.train.labels.tolist() == [label for fields in train for label in fields[layout.label_key]]
    test = files[layout.test_file]
    np.testing.assert_array_equal(data.test.images.numpy(), test["data"].reshape(-1, 3, 32, 32))
    assert data.test.labels.tolist() == test[layout.label_key]


@pytest.mark.parametrize("layout", [SMALL10, SMALL100], ids=["cifar10", "cifar100"])
@pytest.mark.parametrize("place", ["parent", "folder", "archive beside", "archive", "archive with ./"])
def test_data_are_found_in_every_usual_place(tmp_path: Path, layout: CifarLayout, place: str) -> None:
    files = files_of(layout)
    folder = write_folder(tmp_path / "unpacked" / layout.folder, files)
    archive = tmp_path / "packed" / layout.archive
    write_archive(archive, folder, prefix="./" if place.endswith("./") else "")
    roots = {"parent": folder.parent, "folder": folder, "archive beside": archive.parent}
    before = sorted(tmp_path.rglob("*"))
    assert_holds(read(roots.get(place, archive), layout), files, layout)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("labels_as", ["list", "array"])
def test_copies_repacked_by_any_python_3_are_read(tmp_path: Path, protocol: int, labels_as: str) -> None:
    files = files_of(SMALL10)
    written: dict[str, Any] = {
        name: fields | ({"labels": np.array(fields["labels"])} if labels_as == "array" else {})
        for name, fields in files.items()
    }
    assert_holds(read(write_folder(tmp_path, written, protocol)), files, SMALL10)


def test_byte_keys_are_read_as_text(tmp_path: Path) -> None:
    files = files_of(SMALL10)
    written = {name: {key.encode(): field for key, field in fields.items()} for name, fields in files.items()}
    assert_holds(read(write_folder(tmp_path, written)), files, SMALL10)


def test_keys_that_nobody_needs_may_be_anything(tmp_path: Path) -> None:
    files = files_of(SMALL10)
    written: dict[str, Any] = {name: fields | {b"\xff": 1, 2: 3} for name, fields in files.items()}
    assert_holds(read(write_folder(tmp_path, written)), files, SMALL10)


@pytest.mark.parametrize("layout", [SMALL10, SMALL100], ids=["cifar10", "cifar100"])
def test_published_files_of_python_2_are_read(tmp_path: Path, layout: CifarLayout) -> None:
    files = files_of(layout)
    for name, fields in files.items():
        content = python2_batch(fields["data"], fields[layout.label_key], label_key=layout.label_key)
        assert set(pickle.loads(content, encoding="bytes")) >= {b"data", layout.label_key.encode()}
        (tmp_path / name).write_bytes(content)
    assert_holds(read(tmp_path, layout), files, layout)


@pytest.mark.parametrize(
    ("layout", "name", "num_classes", "mean", "std"),
    [
        (SMALL10, "cifar10", 10, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
        (SMALL100, "cifar100", 100, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    ],
    ids=["cifar10", "cifar100"],
)
def test_the_data_set_says_how_to_use_it(
    tmp_path: Path, layout: CifarLayout, name: str, num_classes: int, mean: tuple[float, ...], std: tuple[float, ...]
) -> None:
    data = read(write_folder(tmp_path, files_of(layout)), layout)
    assert (data.name, data.num_classes, data.image_shape) == (name, num_classes, (3, 32, 32))
    assert data.augmentation == Augmentation(padding=4, flip=True)
    assert (data.mean, data.std) == (mean, std)


class Touch:
    """Pickles as a command that creates a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize("packed", [False, True])
def test_hostile_files_are_named_and_nothing_in_them_runs(tmp_path: Path, packed: bool) -> None:
    marker = tmp_path / "marker"
    files: dict[str, Any] = files_of(SMALL10)
    files["data_batch_3"]["filenames"] = [Touch(marker)]
    root = write_folder(tmp_path / "set" / SMALL10.folder, files)
    if packed:
        root = write_archive(tmp_path / "hostile.tar.gz", root)
    with pytest.raises(ValueError, match=r"data_batch_3 cannot be read safely: it asks for '\w+\.system'"):
        read(root)
    assert not marker.exists()


def broken(**changes: Any) -> dict[str, Any]:
    files: dict[str, Any] = files_of(SMALL10)
    files["data_batch_2"] |= changes
    return files


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"data": np.zeros((3, 3072), dtype=np.uint8)}, r"uint8 of \(3, 3072\), expected uint8 of \(4, 3072\)"),
        ({"data": np.zeros((4, 3071), dtype=np.uint8)}, r"uint8 of \(4, 3071\)"),
        ({"data": np.zeros((4, 3, 32, 32), dtype=np.uint8)}, r"uint8 of \(4, 3, 32, 32\)"),
        ({"data": np.zeros((4, 3072), dtype=np.int64)}, r"int64 of \(4, 3072\)"),
        ({"data": [1, 2]}, "has no array"),
        ({"labels": [0, 1, 2]}, "3 labels for 4 images"),
        ({"labels": [0, 1, 2, 3, 4]}, "5 labels for 4 images"),
        ({"labels": [0, 1, 2, 10]}, "no list of whole numbers 0 .. 9"),
        ({"labels": [0, 1, 2, -1]}, "no list of whole numbers 0 .. 9"),
        ({"labels": [0, 1, 2, 2**80]}, "no list of whole numbers 0 .. 9"),
        ({"labels": [0, 1, 2, True]}, "no list of whole numbers"),
        ({"labels": [0, 1, 2, 1.0]}, "no list of whole numbers"),
        ({"labels": None}, "no list of whole numbers"),
    ],
)
def test_files_that_hold_something_else_are_refused(tmp_path: Path, changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=f"data_batch_2 .*{complaint}"):
        read(write_folder(tmp_path, broken(**changes)))


def test_cifar_10_is_not_mistaken_for_cifar_100(tmp_path: Path) -> None:
    files = files_of(SMALL10)
    renamed = {"train": files["data_batch_1"], "test": files["test_batch"]}
    with pytest.raises(ValueError, match="under 'fine_labels'; it is not a cifar100 file"):
        read(write_folder(tmp_path, renamed), replace(SMALL100, images_per_train_file=4))


def test_published_layouts_expect_the_full_counts(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected uint8 of \(10000, 3072\)"):
        read_cifar(write_folder(tmp_path / "ten", files_of(SMALL10)), CIFAR10)
    with pytest.raises(ValueError, match=r"expected uint8 of \(50000, 3072\)"):
        read_cifar(str(write_folder(tmp_path / "hundred", files_of(SMALL100))), CIFAR100)


def test_a_pickle_that_is_no_dictionary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="data_batch_2 holds a list"):
        read(write_folder(tmp_path, {**files_of(SMALL10), "data_batch_2": [1]}))


@pytest.mark.parametrize("kept", [0, 1, 100, 5000])
def test_truncated_files_are_refused(tmp_path: Path, kept: int) -> None:
    file = write_folder(tmp_path, files_of(SMALL10)) / "test_batch"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ValueError, match="test_batch cannot be read safely"):
        read(tmp_path)


@pytest.mark.parametrize("kept_fraction", [0.0, 0.001, 0.3, 0.9])
def test_truncated_archives_are_refused(tmp_path: Path, kept_fraction: float) -> None:
    archive = write_archive(tmp_path / "a.tar.gz", write_folder(tmp_path / SMALL10.folder, files_of(SMALL10)))
    content = archive.read_bytes()
    archive.write_bytes(content[: int(kept_fraction * len(content))])
    with pytest.raises(ValueError, match=r"a\.tar\.gz.*(damaged|ends early|lacks)"):
        read(archive)


@pytest.mark.parametrize("sound_bytes", [0, 30_000])
def test_an_archive_that_cannot_be_unpacked_is_refused(tmp_path: Path, sound_bytes: int) -> None:
    archive = write_archive(tmp_path / "a.tar.gz", write_folder(tmp_path / SMALL10.folder, files_of(SMALL10)))
    packer = zlib.compressobj(wbits=31)  # with the header of gzip
    sound = packer.compress(gzip.decompress(archive.read_bytes())[:sound_bytes]) + packer.flush(zlib.Z_SYNC_FLUSH)
    archive.write_bytes(sound + b"\xff" * 100)
    with pytest.raises(ValueError, match=r"a\.tar\.gz is not a \.tar\.gz archive, or damaged: "):
        read(archive)


def test_something_else_instead_of_an_archive_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.tar.gz").write_bytes(b"<html>not found</html>")
    with pytest.raises(ValueError, match=r"a\.tar\.gz is not a \.tar\.gz archive"):
        read(tmp_path / "a.tar.gz")
    (tmp_path / "b.tar.gz").write_bytes(gzip.compress(b"hello" * 1000))
    with pytest.raises(ValueError, match=r"b\.tar\.gz is not a \.tar\.gz archive"):
        read(tmp_path / "b.tar.gz")


def test_an_archive_without_all_files_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / SMALL10.folder, files_of(SMALL10))
    (folder / "data_batch_4").unlink()
    with pytest.raises(ValueError, match="lacks cifar-10-batches-py/data_batch_4"):
        read(write_archive(tmp_path / "a.tar.gz", folder))


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE])
def test_links_in_an_archive_are_not_followed(tmp_path: Path, kind: bytes) -> None:
    member = tarfile.TarInfo(f"{SMALL10.folder}/data_batch_1")
    member.type, member.linkname = kind, "/etc/passwd"
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as archive:
        archive.addfile(member)
    with pytest.raises(ValueError, match="data_batch_1 is not a plain file"):
        read(tmp_path / "a.tar.gz")


def test_oversized_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cifar_files, "MAX_FILE_BYTES", 10_000)
    folder = write_folder(tmp_path / SMALL10.folder, files_of(SMALL10))
    with pytest.raises(ValueError, match="data_batch_1: it has more than 10,000 bytes"):
        read(folder)
    with pytest.raises(ValueError, match="data_batch_1 is not a plain file of at most 10,000 bytes"):
        read(write_archive(tmp_path / "a.tar.gz", folder))


def test_files_as_large_as_the_limit_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = files_of(SMALL10)
    folder = write_folder(tmp_path / SMALL10.folder, files)
    archive = write_archive(tmp_path / "a.tar.gz", folder)
    monkeypatch.setattr(cifar_files, "MAX_FILE_BYTES", max(path.stat().st_size for path in folder.iterdir()))
    for root in (folder, archive):
        assert_holds(read(root), files, SMALL10)


def test_missing_data_say_where_they_were_looked_for_and_how_to_get_them(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        read_cifar(tmp_path / "data", CIFAR10)
    message = str(caught.value)
    for part in ("data/cifar-10-batches-py", "data/cifar-10-python.tar.gz", "no such folder"):
        assert part in message
    assert "data.download=true in a recipe or on the command line, download=True in Python" in message


def test_an_incomplete_folder_says_what_it_lacks(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / SMALL10.folder, files_of(SMALL10))
    (folder / "data_batch_4").unlink()
    with pytest.raises(FileNotFoundError, match="cifar-10-batches-py: lacks data_batch_4\n"):
        read(tmp_path)


def test_a_folder_in_the_place_of_a_file_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, files_of(SMALL10))
    (folder / "test_batch").unlink()
    (folder / "test_batch").mkdir()
    with pytest.raises(IsADirectoryError, match=r"cannot read .*test_batch: Is a directory"):
        read(folder)


@pytest.mark.parametrize("layout", [SMALL10, SMALL100], ids=["cifar10", "cifar100"])
def test_a_download_goes_through_torchvision_and_is_then_read(
    tmp_path: Path, layout: CifarLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    downloads = []

    def fetch(root: Path, *, download: bool) -> None:
        downloads.append((root, download))
        write_folder(root / layout.folder, files_of(layout))

    monkeypatch.setattr(torchvision.datasets, layout.name.upper(), fetch)
    for _ in range(2):
        assert_holds(read_cifar(tmp_path, layout, download=True), files_of(layout), layout)
    assert downloads == [(tmp_path, True)]


# The second is what torchvision raises for an archive with another checksum.
@pytest.mark.parametrize("error", [OSError("no route to host"), RuntimeError("File not found or corrupted.")])
def test_a_failed_download_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    monkeypatch.setattr(torchvision.datasets, "CIFAR10", Mock(side_effect=error))
    with pytest.raises(OSError, match=rf"{error}; fetch cifar-10-python\.tar\.gz by other means"):
        read_cifar(tmp_path, CIFAR10, download=True)
    with pytest.raises(ValueError, match="the name of an archive"):
        read_cifar(tmp_path / "cifar-10-python.tar.gz", CIFAR10, download=True)


def test_the_images_may_be_written_to(tmp_path: Path) -> None:
    data = read(write_folder(tmp_path, files_of(SMALL10)))
    data.test.images.zero_()
    assert torch.count_nonzero(data.test.images) == 0


def test_the_order_of_an_archives_files_makes_no_difference(tmp_path: Path) -> None:
    # That of the published archive begins with data_batch_4.
    files = files_of(SMALL10)
    folder = write_folder(tmp_path / SMALL10.folder, files)
    archive = tmp_path / "packed" / SMALL10.archive
    archive.parent.mkdir()
    with tarfile.open(archive, "w:gz") as packed:
        for name in ("data_batch_4", "test_batch", "data_batch_3", "data_batch_2", "data_batch_5", "data_batch_1"):
            packed.add(folder / name, f"{SMALL10.folder}/{name}")
    assert_holds(read(archive), files, SMALL10)
