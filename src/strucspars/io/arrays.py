"""Named arrays in one compressed npz file. Nothing in it is ever unpickled or extracted.

Entries are the percent-encoded names, because layer names may hold any character. `numpy.load` reads the files too.
"""

import io
import os
import zipfile
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, unquote

import numpy as np

from strucspars.io.files import ARRAYS_BYTES, read_bytes, write_bytes

_SUFFIX = ".npy"


def save_arrays(path: str | os.PathLike[str], arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Write arrays under their names, all or nothing; the same arrays give the same bytes.

    Raises:
        ValueError: an entry is not an array of plain values.
        OSError: the file cannot be written; the previous one is kept.
    """
    entries = {_encoded(name): _as_npy(name, array) for name, array in arrays.items()}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for entry, data in entries.items():
            # A ZipInfo is dated 1980, so the file does not depend on the clock.
            archive.writestr(zipfile.ZipInfo(entry), data, compress_type=zipfile.ZIP_DEFLATED)
    write_bytes(path, buffer.getvalue())


def load_arrays(path: str | os.PathLike[str]) -> dict[str, np.ndarray[Any, Any]]:
    """Read all arrays of a file, checked by the file's own checksums.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is damaged, or holds anything but arrays of plain values.
    """
    try:
        content = read_bytes(path, limit=ARRAYS_BYTES)
    except FileNotFoundError:
        raise FileNotFoundError(f"there are no arrays at {path}") from None
    # The parsers of zip, deflate and npy raise errors of many kinds.
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            entries = archive.infolist()
            # Reading an entry stops at the size that it claims.
            size = sum(entry.file_size for entry in entries)
            if size > ARRAYS_BYTES:
                raise ValueError(f"it would become {size:,} bytes, and {ARRAYS_BYTES:,} are allowed")
            arrays = {_decoded(entry.filename): _from_npy(archive.read(entry)) for entry in entries}
        if len(arrays) < len(entries):
            raise ValueError("a name stands twice in it")
    except Exception as error:
        raise ValueError(
            f"{path} is damaged or holds more than plain arrays: {error}; restore it from a copy or delete it"
        ) from error
    return arrays


def _encoded(name: str) -> str:
    if not isinstance(name, str):
        raise ValueError(f"names of arrays must be text, got {name!r}")
    return quote(name, safe="", errors="surrogatepass") + _SUFFIX


def _decoded(entry: str) -> str:
    name = unquote(entry.removesuffix(_SUFFIX), errors="surrogatepass")
    if _encoded(name) != entry:
        raise ValueError(f"entry {entry!r} is not named as an array")
    return name


def _as_npy(name: str, array: np.ndarray[Any, Any]) -> bytes:
    if not isinstance(array, np.ndarray):
        raise ValueError(f"{name!r} must be a numpy array, got {type(array).__name__}")
    if array.dtype.hasobject:
        raise ValueError(f"{name!r} holds Python objects; give it a dtype of plain values")
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, array, allow_pickle=False)
    return buffer.getvalue()


def _from_npy(data: bytes) -> np.ndarray[Any, Any]:
    buffer = io.BytesIO(data)
    array: np.ndarray[Any, Any] = np.lib.format.read_array(buffer, allow_pickle=False)
    if buffer.read(1):
        raise ValueError("bytes follow an array's end")
    return array
