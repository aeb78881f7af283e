"""Checkpoints of a run, of which at every instant a complete one exists.

A file is a mark of eight bytes, the SHA-256 of the rest, and the rest: what `torch.save` writes. The digest finds
damage that the zip inside does not; reading allows data only (`weights_only`), so a file from anywhere runs no code.
"""

import hashlib
import io
import logging
import os
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import torch

from strucspars.io.files import CHECKPOINT_BYTES, check_not_packed, read_bytes, replace_file

LAST = "last.pt"
PREVIOUS = "previous.pt"

_MARK = b"sspckpt1"
_HEADER_BYTES = len(_MARK) + hashlib.sha256().digest_size
_LEAVES = {type(None), bool, int, float, str, bytes, torch.Tensor, torch.nn.Parameter, torch.Size}
_LEAVES |= {torch.dtype, torch.device}
_MAPPINGS = {dict, OrderedDict, Counter}
_SEQUENCES = {list, tuple, set}
_REMEDY = "restore one from a copy, or delete them to train from the beginning"

_logger = logging.getLogger(__name__)


def save_checkpoint(folder: Path, state: dict[str, Any]) -> None:
    """Write the state to `last.pt`; what was there becomes `previous.pt`.

    Killed at any instant, the folder holds a complete checkpoint under one of the two names. The state consists of
    tensors, numbers, texts, and lists, tuples and dictionaries of them; anything else is refused.
    """
    # A damaged file must not push out a good one.
    former = folder / PREVIOUS if _is_whole(folder / LAST) else None
    _save(folder / LAST, state, former)


def load_checkpoint(folder: Path) -> dict[str, Any] | None:
    """The last complete checkpoint, its tensors on the CPU; None where none was ever written."""
    failures = []
    for path in (folder / LAST, folder / PREVIOUS):
        try:
            state = _load(path)
        except FileNotFoundError:
            failures.append(f"{path} is missing")
        except ValueError as error:
            failures.append(str(error))
        else:
            if failures:
                _logger.warning("%s; going on from %s instead", failures[0], path)
            return state
    if not any(os.path.lexists(folder / name) for name in (LAST, PREVIOUS)):
        return None
    raise ValueError(f"no checkpoint can be used: {'; '.join(failures)}; {_REMEDY}")


def save_named(folder: Path, name: str, state: dict[str, Any]) -> None:
    """Write a checkpoint that is kept for good, to `NAME.pt`; otherwise as `save_checkpoint`."""
    _save(folder / f"{name}.pt", state, None)


def load_named(folder: Path, name: str) -> dict[str, Any] | None:
    """The checkpoint that `save_named` wrote under the name, its tensors on the CPU; None where there is none."""
    try:
        return _load(folder / f"{name}.pt")
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{error}; {_REMEDY}") from error


def _save(path: Path, state: dict[str, Any], former: Path | None) -> None:
    if type(state) is not dict:
        raise ValueError(f"a checkpoint's state must be a dict, got {type(state).__name__}")
    _check_loadable(state, "state")
    # In memory: torch's own writer hides a full disk behind an error of its zip code.
    buffer = io.BytesIO()
    torch.save(state, buffer)
    # Not its buffer: Python 3.12 crashes where a failing write leaves one behind.
    payload = buffer.getvalue()
    with replace_file(path, former=former) as unfinished:
        _write(unfinished, (_MARK + hashlib.sha256(payload).digest(), payload))


def _check_loadable(value: object, where: str) -> None:
    """Refuse now what loading would refuse when the run is resumed, which is too late. Subclasses count as foreign."""
    kind = type(value)
    if isinstance(value, dict) and kind in _MAPPINGS:
        for key, entry in value.items():
            _check_loadable(key, f"a key of {where}")
            _check_loadable(entry, f"{where}[{key!r}]")
    elif isinstance(value, list | tuple | set) and kind in _SEQUENCES:
        for place, entry in enumerate(value):
            _check_loadable(entry, f"{where}[{place}]")
    elif kind not in _LEAVES:
        raise ValueError(
            f"{where} is a {kind.__module__}.{kind.__name__}, which a checkpoint cannot hold; "
            "make it a tensor, a number, a text, or a list or dict of them"
        )


def _write(path: Path, pieces: tuple[bytes, bytes]) -> None:
    with path.open("wb") as file:
        for piece in pieces:
            file.write(piece)


def _is_whole(path: Path) -> bool:
    try:
        _checked_payload(path)
    except (OSError, ValueError):
        return False
    return True


def _checked_payload(path: Path) -> memoryview:
    try:
        content = memoryview(read_bytes(path, limit=CHECKPOINT_BYTES))
    except (FileNotFoundError, PermissionError):
        raise
    except OSError as error:
        raise ValueError(str(error)) from error
    if len(content) < _HEADER_BYTES or content[: len(_MARK)] != _MARK:
        raise ValueError(f"{path} is no checkpoint of strucspars, or cut short")
    payload = content[_HEADER_BYTES:]
    if hashlib.sha256(payload).digest() != content[len(_MARK) : _HEADER_BYTES]:
        raise ValueError(f"{path} is damaged: its content does not match its checksum")
    return payload


def _load(path: Path) -> dict[str, Any]:
    payload = io.BytesIO(_checked_payload(path))
    # Bytes with a right checksum may still be anything; any failure of the reader means the same here.
    try:
        check_not_packed(payload)
        state = torch.load(payload, map_location="cpu", weights_only=True, mmap=False)
    except Exception as error:
        raise ValueError(f"{path} holds more than data, or none: {_first_line(error)}") from error
    if type(state) is not dict:
        raise ValueError(f"{path} holds a {type(state).__name__} instead of a run's state")
    return state


def _first_line(error: Exception) -> str:
    # Torch's advice goes on with how to switch the protection off.
    return (str(error).splitlines() or [type(error).__name__])[0]
