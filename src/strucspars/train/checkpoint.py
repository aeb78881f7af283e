"""Checkpoints of a run, of which at every instant a complete one exists.

A file is a mark of eight bytes, the SHA-256 of the rest, and the rest: what `torch.save` writes. The digest finds
damage that the zip inside does not; reading allows data only (`weights_only`), so a file from anywhere runs no code.
"""

import hashlib
import io
import logging
import os
import re
from pathlib import Path
from typing import Any

import torch

from strucspars.io.files import CHECKPOINT_BYTES, check_not_packed, read_bytes, replace_file

LAST = "last.pt"
PREVIOUS = "previous.pt"

_MARK = b"sspckpt1"
_HEADER_BYTES = len(_MARK) + hashlib.sha256().digest_size
# In torch's message about a value that is not data.
_FOREIGN = re.compile(r"(?<=GLOBAL )[\w.]+")
_REMEDY = "restore one from a copy, or delete them to train from the beginning"

_logger = logging.getLogger(__name__)


def save_checkpoint(folder: Path, state: dict[str, Any]) -> None:
    """Write the state to `last.pt`; the former file becomes `previous.pt`. One of them is always complete."""
    former: Path | None = folder / PREVIOUS
    try:
        _checked_payload(folder / LAST)
    except (OSError, ValueError):
        former = None  # a damaged `last.pt` must not replace a good `previous.pt`
    _save(folder / LAST, state, former)


def load_checkpoint(folder: Path) -> dict[str, Any] | None:
    """The last complete checkpoint, its tensors on the CPU; None where none was ever written."""
    failures = []
    for path in (folder / LAST, folder / PREVIOUS):
        try:
            state = _unpacked(_checked_payload(path), str(path))
        except FileNotFoundError:
            failures.append(f"{path} is missing")
        except ValueError as error:
            failures.append(str(error))
        else:
            if failures:
                _logger.warning("%s; resuming from %s instead", failures[0], path)
            return state
    if not any(os.path.lexists(folder / name) for name in (LAST, PREVIOUS)):
        return None
    raise ValueError(f"no checkpoint can be used: {'; '.join(failures)}; {_REMEDY}")


def save_named(folder: Path, name: str, state: dict[str, Any]) -> None:
    """Write a checkpoint that no later one replaces, to `NAME.pt`."""
    _save(folder / f"{name}.pt", state, None)


def load_named(folder: Path, name: str) -> dict[str, Any] | None:
    """The checkpoint that `save_named` wrote under the name, its tensors on the CPU; None where there is none."""
    path = folder / f"{name}.pt"
    try:
        return _unpacked(_checked_payload(path), str(path))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{error}; {_REMEDY}") from error


def _save(path: Path, state: dict[str, Any], former: Path | None) -> None:
    # In memory: torch's own writer reports a full disk as an error of its zip code.
    buffer = io.BytesIO()
    torch.save(state, buffer)
    # Not `getbuffer()`: Python 3.12 crashes if a failed write leaves such a view behind.
    payload = buffer.getvalue()
    # A state that cannot be loaded must fail now, not when the run is resumed.
    _unpacked(payload, "the state to save")
    with replace_file(path, former=former) as unfinished, unfinished.open("wb") as file:
        file.write(_MARK + hashlib.sha256(payload).digest())
        file.write(payload)


def _checked_payload(path: Path) -> memoryview:
    try:
        content = memoryview(read_bytes(path, limit=CHECKPOINT_BYTES))
    except (FileNotFoundError, PermissionError):
        raise
    except OSError as error:
        raise ValueError(str(error)) from error
    if len(content) < _HEADER_BYTES or content[: len(_MARK)] != _MARK:
        raise ValueError(f"{path} is not a checkpoint of strucspars, or incomplete")
    payload = content[_HEADER_BYTES:]
    if hashlib.sha256(payload).digest() != content[len(_MARK) : _HEADER_BYTES]:
        raise ValueError(f"{path} is damaged: its content does not match its checksum")
    return payload


def _unpacked(payload: bytes | memoryview, where: str) -> dict[str, Any]:
    file = io.BytesIO(payload)
    # Bytes with a right checksum may still be anything; any failure of the reader means the same here.
    try:
        check_not_packed(file)
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=False)
    except Exception as error:
        # Only the name or first line: torch advises to switch the protection off.
        reason = _FOREIGN.search(str(error)) or str(error).splitlines()[:1] or [type(error).__name__]
        raise ValueError(f"{where} holds more than data, or none: {reason[0]}") from error
    if type(state) is not dict:
        raise ValueError(f"{where} is a {type(state).__name__} instead of a dict")
    return state
