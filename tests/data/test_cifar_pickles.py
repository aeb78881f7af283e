import builtins
import importlib.util
import operator
import os
import pickle
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strucspars.data.cifar import load_plain_pickle

ARRAY = np.arange(24, dtype=np.uint8).reshape(4, 6)
PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)


class Call:
    """Pickles as a call of anything."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self.function = function
        self.arguments = arguments

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.function, self.arguments


def read(value: object, protocol: int = pickle.DEFAULT_PROTOCOL) -> Any:
    return load_plain_pickle(pickle.dumps(value, protocol=protocol), source="batch_7")


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_arrays_and_containers_come_back_whatever_the_protocol(protocol: int) -> None:
    value = read(
        {"data": ARRAY, b"labels": [1, 2, 300, -1], "nested": [(1, "a"), {"x": None, "y": 1.5}, True]}, protocol
    )
    np.testing.assert_array_equal(value.pop("data"), ARRAY)
    assert value == {b"labels": [1, 2, 300, -1], "nested": [(1, "a"), {"x": None, "y": 1.5}, True]}


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(
    "array",
    [
        np.asfortranarray(ARRAY),
        ARRAY[::2, ::3],
        np.array([1, -2, 2**40]),
        np.array([1, -2, 30000], dtype=">i2"),
        np.array(7, dtype=np.int32),
        np.arange(24).reshape(1, 2, 3, 4),
    ],
    ids=["fortran", "strided", "int64", "big-endian", "scalar", "four dimensions"],
)
def test_arrays_of_any_order_and_width_come_back(array: np.ndarray, protocol: int) -> None:
    result = read(array, protocol)
    assert result.dtype == array.dtype
    np.testing.assert_array_equal(result, array)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_calls_are_refused_by_name_and_not_made(tmp_path: Path, protocol: int) -> None:
    marker = tmp_path / "marker"
    calls = {
        "system": Call(os.system, f"touch {marker}"),
        "eval": Call(builtins.eval, f"open({str(marker)!r}, 'w')"),
        "exec": Call(builtins.exec, f"open({str(marker)!r}, 'w')"),
        "getattr": Call(builtins.getattr, "text", "upper"),
        "call": Call(subprocess.call, ["touch", str(marker)]),
        "open": Call(open, str(marker), "w"),
        "load": Call(np.load, str(marker)),
        "memmap": Call(np.memmap, str(marker), "uint8", "w+", 0, (1,)),
        "attrgetter": Call(operator.attrgetter, "system"),
        "find_spec": Call(importlib.util.find_spec, "os"),
    }
    for name, call in calls.items():
        for value in (call, {"data": call}, [[call]]):
            with pytest.raises(ValueError, match=rf"batch_7 cannot be read safely: it asks for '[\w.]+\.{name}'"):
                read(value, protocol)
    assert not marker.exists()


def test_the_same_calls_would_work_in_an_ordinary_unpickler(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    pickle.loads(pickle.dumps(Call(os.system, f"touch {marker}")))
    assert marker.exists()


def test_calls_hidden_in_an_object_array_are_not_made(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    array = np.array([Call(os.system, f"touch {marker}")], dtype=object)
    with pytest.raises(ValueError, match=r"asks for 'posix.system'"):
        read(array)
    with pytest.raises(ValueError, match="an array of type object"):
        read(np.array([None, 1], dtype=object))
    assert not marker.exists()


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(2),
        np.array(["a"]),
        np.array([b"a"]),
        np.zeros(1, dtype=[("a", "u1")]),
        np.zeros(1, dtype="datetime64[s]"),
    ],
    ids=["float", "text", "bytes", "record", "time"],
)
def test_arrays_of_anything_but_whole_numbers_are_refused(array: np.ndarray) -> None:
    with pytest.raises(ValueError, match="only whole numbers are allowed"):
        read(array)


def claim(shape: bytes, content: bytes = b"U\x01a") -> bytes:
    """An array of bytes, of a shape given as a pickled tuple."""
    empty = b"\x80\x02cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR"
    return empty + b"(K\x01" + shape + b"cnumpy\ndtype\n(U\x02u1tR\x89" + content + b"tb."


HUGE = struct.pack("<Q", 2**62)


@pytest.mark.parametrize(
    "data",
    [
        claim(b"(J\xff\xff\xff\x7fJ\xff\xff\xff\x7ft"),
        claim(b"(K\x02t"),
        claim(b"(U\x01at"),
        claim(b"(" + b"K\x01" * 100 + b"t"),
        claim(b"(K\x01t", content=b"]"),
        b"\x80\x04\x8e" + HUGE + b"abc.",
        b"\x80\x04\x8d" + HUGE + b"abc.",
        b"\x80\x05\x96" + HUGE + b"abc.",
        b"\x80\x04\x95" + HUGE + b"N.",
        b"\x80\x02T\xff\xff\xff\x7fabc.",
    ],
)
def test_arrays_and_texts_larger_than_their_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="batch_7 cannot be read safely"):
        load_plain_pickle(data, source="batch_7")


@pytest.mark.parametrize(
    "data",
    [
        b"(ios\nsystem\n.",
        b"(cnumpy\nndarray\no.",
        b"\x80\x02cnumpy\nndarray\n)\x81.",
        b"\x80\x02\x82\x01.",
        b"Pname\n.",
        b"\x80\x05\x97.",
    ],
    ids=["INST", "OBJ", "NEWOBJ", "EXT1", "PERSID", "NEXT_BUFFER"],
)
def test_no_other_instruction_makes_anything_either(data: bytes) -> None:
    with pytest.raises(ValueError, match="batch_7 cannot be read safely"):
        load_plain_pickle(data, source="batch_7")


@pytest.mark.parametrize(
    "call", [b"cnumpy\nndarray\n)R.", b"c_codecs\nencode\n(X\x01\x00\x00\x00aU\x06rot_13tR.", b"K\x01)R."]
)
def test_known_names_do_only_what_arrays_need(call: bytes) -> None:
    with pytest.raises(ValueError, match="batch_7 cannot be read safely"):
        load_plain_pickle(b"\x80\x02" + call, source="batch_7")


def test_every_truncation_is_an_error() -> None:
    data = pickle.dumps({"data": ARRAY, "labels": [1, 2]}, protocol=4)
    for length in range(len(data)):
        with pytest.raises(ValueError, match="batch_7 cannot be read safely"):
            load_plain_pickle(data[:length], source="batch_7")


def test_damaged_bytes_never_raise_anything_but_value_errors() -> None:
    original = pickle.dumps({"data": ARRAY, "labels": [1, 2]}, protocol=2)
    generator = np.random.default_rng(0)
    for _ in range(1000):
        damaged = bytearray(original)
        for place in generator.integers(len(original), size=3):
            damaged[place] = generator.integers(256)
        try:
            load_plain_pickle(bytes(damaged), source="batch_7")
        except ValueError as error:
            assert "batch_7" in str(error)  # noqa: PT017  # most of them, but not all, are errors


def test_long_names_are_quoted_in_part() -> None:
    with pytest.raises(ValueError, match=r"asks for 'x{79},") as caught:
        load_plain_pickle(b"c" + b"x" * 5000 + b"\ny\n.", source="batch_7")
    assert len(str(caught.value)) < 250


def test_an_array_cannot_be_written_to() -> None:
    for protocol in PROTOCOLS:
        assert not read(ARRAY, protocol).flags.writeable


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02Nr\xff\xff\xff\x7f.",
        b"Np2147483647\n.",
        b"\x80\x02}K\x01" + b"2\x86" * 50 + b"Ns.",
        b"\x80\x02})q\x00" + b"h\x00\x86q\x00h\x00" * 60 + b"Ns.",
    ],
)
def test_a_small_pickle_that_costs_much_is_refused_at_once(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"batch_7 cannot be read safely: instruction \d+ needs more memory or time"):
        load_plain_pickle(data, source="batch_7")
