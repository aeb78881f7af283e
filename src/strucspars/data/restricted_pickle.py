"""Reading pickled arrays from untrusted files, without importing or calling anything that they name.

A pickle is a program. This reader maps the few names that numpy's own pickles use to stand-ins, which only record the
array's shape, type and bytes, and refuses any other name. A first pass over the instructions refuses sizes that would
cost memory or time before anything is built.
"""

import io
import math
import pickle
import pickletools
from collections.abc import Callable

import numpy as np

MEMO_WRITES = frozenset({"PUT", "BINPUT", "LONG_BINPUT"})
TUPLES = frozenset({"TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"})
# An array takes six. Hashing nested tuples follows each reference, so n levels cost 2**n.
MAX_TUPLES = 24
INTEGER_TYPES = frozenset({"u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8"})
MAX_DIMENSIONS = 4
LONGEST_QUOTE = 80


def load_plain_pickle(data: bytes, *, source: str) -> object:
    """The value pickled in `data`, if it is made of numbers, text, bytes, lists, tuples, dicts and integer arrays only.

    Text of Python 2 comes back as bytes.

    Args:
        data: the whole pickle, of any protocol, from Python 2 or 3.
        source: the file's name, for errors.

    Raises:
        ValueError: the pickle wants anything else, or is damaged. Nothing of it has been executed.
    """
    try:
        _check_claims(data)
        return _PlainUnpickler(io.BytesIO(data), encoding="bytes").load()
    except Exception as error:  # damaged pickles raise almost any type
        raise ValueError(f"{source} cannot be read safely: {str(error) or type(error).__name__}") from error


def plain_array(value: object) -> np.ndarray | None:
    """The array in a value of `load_plain_pickle`; None if it is no complete array."""
    return value.array if isinstance(value, _Array) else None


def _check_claims(data: bytes) -> None:
    """Refuse claims of more than the file can hold."""
    tuples = 0
    for count, (opcode, argument, position) in enumerate(pickletools.genops(data)):
        # The memo is a table as long as its largest index, and a frame is allocated before it is read.
        if opcode.name in MEMO_WRITES and argument is not None and argument > count:
            raise ValueError(f"it claims {argument} remembered values after {count} instructions")
        if opcode.name == "FRAME" and argument is not None and argument > len(data):
            raise ValueError(f"it claims a frame of {argument} bytes, but has {len(data)}")
        if opcode.name == "DUP":
            raise ValueError(f"it uses the instruction DUP (byte {position}), which no pickler writes")
        tuples += opcode.name in TUPLES
        if tuples > MAX_TUPLES:
            raise ValueError(f"it has more than {MAX_TUPLES} tuples, which no plain array needs")


class _PlainUnpickler(pickle.Unpickler):
    """Finds stand-ins, and nothing else."""

    def find_class(self, module: str, name: str, /) -> object:
        stand_in = STAND_INS.get((module, name))
        if stand_in is None:
            raise ValueError(f"it asks for {_quoted(f'{module}.{name}')}, which no plain array needs")
        return stand_in


class _StandIn:
    """A callable that a pickle cannot alter, unlike a function, whose attributes it could set."""

    __slots__ = ("_make",)

    def __init__(self, make: Callable[..., object]) -> None:
        self._make = make

    def __call__(self, *arguments: object) -> object:
        return self._make(*arguments)

    def __setstate__(self, state: object) -> None:
        raise ValueError("it tries to alter numpy")


class _Type:
    """Stands for a dtype; integers only, so that bytes can mean nothing but numbers."""

    __slots__ = ("byte_order", "code")

    def __init__(self, code: object, *_: object) -> None:
        self.code = _text(code)
        self.byte_order = "="
        if self.code not in INTEGER_TYPES:
            raise ValueError(f"it asks for an array of type {_quoted(self.code)}; only whole numbers are plain")

    def __setstate__(self, state: object) -> None:
        # (version, byte order, subarray, names, fields, item size, alignment, flags)
        if not isinstance(state, tuple) or len(state) < 5 or state[2:5] != (None, None, None):
            raise ValueError("it asks for an array of records; only whole numbers are plain")
        self.byte_order = _text(state[1])
        if self.byte_order not in ("<", ">", "|", "="):
            raise ValueError(f"it has the byte order {_quoted(self.byte_order)}")


class _Array:
    """Stands for an array, which is made when its state has been read and checked."""

    __slots__ = ("array",)

    def __init__(self, *_: object) -> None:
        self.array: np.ndarray | None = None

    def __setstate__(self, state: object) -> None:
        if not isinstance(state, tuple) or len(state) != 5:
            raise ValueError("it has an array without shape, type and bytes")
        _, shape, dtype, fortran_order, content = state
        self.array = _array(content, dtype, shape, order="F" if fortran_order else "C")


def _array(content: object, dtype: object, shape: object, *, order: str) -> np.ndarray:
    """A read-only array over the bytes; nothing is allocated."""
    if not isinstance(content, bytes | bytearray) or not isinstance(dtype, _Type) or not isinstance(shape, tuple):
        raise ValueError("it has an array without shape, type and bytes")
    if len(shape) > MAX_DIMENSIONS or not all(type(length) is int and length >= 0 for length in shape):
        raise ValueError(f"it has an array whose shape is not made of up to {MAX_DIMENSIONS} whole numbers")
    needed = math.prod(shape) * int(dtype.code[1:])
    if needed != len(content):
        raise ValueError(
            f"it claims an array of {_quoted(str(shape))}, which is {needed} bytes, but has {len(content)}"
        )
    flat = np.frombuffer(bytes(content), dtype=np.dtype(dtype.byte_order + dtype.code))
    return flat.reshape(shape, order="F" if order == "F" else "C")


def _array_of_buffer(content: object, dtype: object, shape: object, order: object) -> _Array:
    """For numpy's `_frombuffer`, which protocol 5 uses."""
    result = _Array()
    result.array = _array(content, dtype, shape, order=_text(order))
    return result


def _latin1_bytes(text: object, encoding: object) -> bytes:
    """For `_codecs.encode`, by which Python 3 writes bytes under the protocols of Python 2."""
    if not isinstance(text, str) or _text(encoding) not in ("latin1", "latin-1"):
        raise ValueError(f"it asks for the encoding {_quoted(_text(encoding))}")
    return text.encode("latin1")


def _never(*_: object) -> object:
    """For `numpy.ndarray`, which is passed on to `_reconstruct` and never called."""
    raise ValueError("it calls numpy.ndarray")


def _text(value: object) -> str:
    if isinstance(value, bytes):
        return value.decode("latin1")
    return value if isinstance(value, str) else type(value).__name__


def _quoted(text: str) -> str:
    return repr(text if len(text) <= LONGEST_QUOTE else text[:LONGEST_QUOTE] + "...")


STAND_INS = {
    ("_codecs", "encode"): _StandIn(_latin1_bytes),
    ("numpy", "dtype"): _StandIn(_Type),
    ("numpy", "ndarray"): _StandIn(_never),
    **{
        (f"numpy.{core}.{module}", name): _StandIn(make)
        for core in ("core", "_core")
        for module, name, make in (("multiarray", "_reconstruct", _Array), ("numeric", "_frombuffer", _array_of_buffer))
    },
}
