import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strucspars.io.arrays import load_arrays, save_arrays


class Hostile:
    """Unpickling creates the marker file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


ARRAYS: dict[str, np.ndarray[Any, Any]] = {
    "layer1.0.conv": np.arange(6, dtype=np.int16).reshape(2, 3),
    "file": np.zeros((0, 4), dtype=np.float32),
    "../../etc/passwd": np.array(0.5),
    "/absolute": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "": np.array([True, False]),
    "100%2F\\\x00 ü😀\ud800.npy": np.arange(10, dtype=">u4")[::3],
}


def test_arrays_come_back_exactly_under_their_names(tmp_path: Path) -> None:
    save_arrays(tmp_path / "all.npz", ARRAYS)
    loaded = load_arrays(tmp_path / "all.npz")
    assert list(loaded) == list(ARRAYS)
    for name, array in ARRAYS.items():
        assert loaded[name].dtype == array.dtype
        np.testing.assert_array_equal(loaded[name], array, strict=True)
    save_arrays(tmp_path / "none.npz", {})
    assert load_arrays(tmp_path / "none.npz") == {}


@given(st.dictionaries(st.text(max_size=20), st.integers(-9, 9), max_size=4))
def test_any_names_come_back(tmp_path_factory: pytest.TempPathFactory, entries: dict[str, int]) -> None:
    path = tmp_path_factory.getbasetemp() / "names.npz"
    save_arrays(path, {name: np.array(value) for name, value in entries.items()})
    assert {name: int(array) for name, array in load_arrays(path).items()} == entries


def test_no_entry_of_the_file_leaves_its_folder_when_unpacked_by_other_tools(tmp_path: Path) -> None:
    save_arrays(tmp_path / "all.npz", ARRAYS)
    with zipfile.ZipFile(tmp_path / "all.npz") as archive:
        assert all("/" not in name and "\\" not in name for name in archive.namelist())


def test_numpy_reads_the_file_too(tmp_path: Path) -> None:
    save_arrays(tmp_path / "all.npz", {"layer1.0.conv": np.arange(3)})
    with np.load(tmp_path / "all.npz") as loaded:
        np.testing.assert_array_equal(loaded["layer1.0.conv"], np.arange(3))


def test_the_same_arrays_give_the_same_bytes_and_zeros_take_little_room(tmp_path: Path) -> None:
    for name in "ab":
        save_arrays(tmp_path / name, {"zeros": np.zeros(10_000)})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert (tmp_path / "a").stat().st_size < 1000


@pytest.mark.parametrize(
    "array", [np.array([object()]), np.array([(1, None)], dtype=[("a", int), ("b", object)])], ids=["plain", "record"]
)
def test_arrays_of_objects_are_not_written(tmp_path: Path, array: Any) -> None:
    with pytest.raises(ValueError, match="Object arrays cannot be saved"):
        save_arrays(tmp_path / "all.npz", {"conv": array})
    assert not list(tmp_path.iterdir())


def test_a_pickle_inside_is_refused_and_not_executed(tmp_path: Path) -> None:
    marker, path = tmp_path / "marker", tmp_path / "hostile.npz"
    array = np.array([Hostile(marker)])
    np.savez(path, conv=array)
    with pytest.raises(ValueError, match=r"hostile\.npz is damaged or holds more than arrays: Object arrays"):
        load_arrays(path)
    array.dump(path)
    with pytest.raises(ValueError, match=r"hostile\.npz is damaged or holds more than arrays"):
        load_arrays(path)
    assert not marker.exists()
    with path.open("rb") as file:
        np.load(file, allow_pickle=True)
    assert marker.exists(), "the file was not hostile"


def entry(name: str, data: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(name, data)
    return buffer.getvalue()


def huge() -> bytes:
    header = "{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000000,), }\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode()


def npy(array: np.ndarray[Any, Any]) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, array, allow_pickle=False)
    return buffer.getvalue()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"PK\x03\x04 and no more",
        entry("conv.npy", b"no array"),
        entry("conv.npy", huge()),
        entry("conv.txt", b""),
    ],
    # Not by their bytes, which hold the time: every process of a test run must know a test by the same name.
    ids=["empty", "cut off", "no array", "huge", "other file"],
)
def test_a_file_that_is_no_set_of_arrays_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "odd.npz").write_bytes(content)
    with pytest.raises(ValueError, match=r"odd\.npz is damaged or holds more than arrays"):
        load_arrays(tmp_path / "odd.npz")


def test_a_flipped_bit_never_gives_other_arrays(tmp_path: Path) -> None:
    path = tmp_path / "all.npz"
    save_arrays(path, {"conv.weight": np.arange(8)})
    content = path.read_bytes()
    refused = 0
    for place in range(len(content)):
        path.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
        try:
            loaded = load_arrays(path)
        except ValueError:
            refused += 1
        else:
            assert list(loaded) == ["conv.weight"]
            np.testing.assert_array_equal(loaded["conv.weight"], np.arange(8), strict=True)
    assert refused > len(content) / 2


def test_missing_arrays_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there are no arrays at .*nowhere"):
        load_arrays(tmp_path / "nowhere.npz")


def test_a_file_does_not_depend_on_the_clock(tmp_path: Path) -> None:
    save_arrays(tmp_path / "arrays.npz", {"one": np.arange(3), "other": np.ones(2)})
    with zipfile.ZipFile(tmp_path / "arrays.npz") as archive:
        assert {entry.date_time for entry in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}
