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
    """Write arrays of plain values under their names, all or nothing; the same arrays give the same bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, array in arrays.items():
            npy = io.BytesIO()
            np.lib.format.write_array(npy, array, allow_pickle=False)
            # A ZipInfo is dated 1980, so the file does not depend on the clock.
            entry = zipfile.ZipInfo(quote(name, safe="", errors="surrogatepass") + _SUFFIX)
            archive.writestr(entry, npy.getvalue(), compress_type=zipfile.ZIP_DEFLATED)
    write_bytes(path, buffer.getvalue())


def load_arrays(path: str | os.PathLike[str]) -> dict[str, np.ndarray[Any, Any]]:
    """Read all arrays of a file, checked by the file's own checksums."""
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
            return {
                unquote(entry.filename.removesuffix(_SUFFIX), errors="surrogatepass"): np.lib.format.read_array(
                    io.BytesIO(archive.read(entry)), allow_pickle=False
                )
                for entry in entries
            }
    except Exception as error:
        raise ValueError(f"{path} is damaged or holds more than arrays: {error}; restore or delete it") from error
