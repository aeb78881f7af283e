"""What a run measures, one JSON object per line, on the disk as soon as it is written."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from strucspars.io.files import disk_error, read_bytes, sync_folder, write_bytes
from strucspars.io.records import RecordError, parse_json, plain


def append_row(path: Path, row: Mapping[str, Any]) -> None:
    """Add one row and wait until it is on the disk; NaN and infinity become null.

    The torn rest of a killed process's row is removed first. A row that cannot be written whole is taken back.
    """
    line = json.dumps(plain(row, "row"), allow_nan=False, separators=(",", ":")).encode() + b"\n"
    is_new = not path.exists()
    try:
        # Links are not followed: in a hostile folder they lead to files of the user.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        with open(descriptor, "r+b", buffering=0) as file:
            end = file.read().rfind(b"\n") + 1
            _write_at(descriptor, end, line)
    except OSError as error:
        raise disk_error("write", path, error, "what was there is kept; ") from error
    if is_new:
        sync_folder(path.parent)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All rows, none where there is no file; the torn last line of a killed process is left out."""
    return [_parsed(path, number, line) for number, line in enumerate(_whole_lines(path), start=1)]


def keep_rows(path: Path, count: int) -> None:
    """Cut the file after its first `count` rows, all or nothing.

    A resumed run goes back to its last checkpoint, so the rows that were written after it will be written again.
    """
    lines = _whole_lines(path)
    if len(lines) < count:
        raise ValueError(
            f"{path} has {len(lines)} whole rows, but the checkpoint was made after {count}; "
            "restore the file from a copy, or start again in another folder"
        )
    for number, line in enumerate(lines[:count], start=1):
        _parsed(path, number, line)
    if path.exists():
        write_bytes(path, b"".join(line + b"\n" for line in lines[:count]))


def _whole_lines(path: Path) -> list[bytes]:
    try:
        content = read_bytes(path)
    except FileNotFoundError:
        return []
    return content.split(b"\n")[:-1]


def _parsed(path: Path, number: int, line: bytes) -> dict[str, Any]:
    where = f"{path}, line {number}"
    row = parse_json(line, where)
    if not isinstance(row, dict):
        raise RecordError(where, "", f"must be a JSON object, got {type(row).__name__}")
    return row


def _write_at(descriptor: int, end: int, line: bytes) -> None:
    try:
        os.ftruncate(descriptor, end)
        written = 0
        while written < len(line):
            written += os.pwrite(descriptor, line[written:], end + written)
        os.fsync(descriptor)
    except BaseException:
        os.ftruncate(descriptor, end)
        raise
