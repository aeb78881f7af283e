"""Recorded outcomes: how they are made independent of clock and machine, written, read and compared.

`GOLDEN_WRITE=1` makes the golden tests write what they find instead of comparing it.
"""

import dataclasses
import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

VARIES = "varies"
# What clock, machine, versions and rounding decide. Below these keys only the keys are recorded.
VOLATILE = frozenset(
    {
        *("seconds", "train_seconds", "solver_seconds", "ms", "ms_low", "ms_high", "frames_per_second", "rounds"),
        *("calls", "median", "low", "high", "max_relative_error"),
        *("commit", "hardware", "versions", "strucspars_version"),
    }
)
DIGITS = 6
# Five of the 450 images: rounding may move images over the border between two classes.
FEW_IMAGES = 5.5 / 450


def settled(value: Any, *, varying: bool = False) -> Any:
    """As JSON has it, without what differs from machine to machine and from call to call."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return settled({field.name: getattr(value, field.name) for field in fields}, varying=varying)
    if isinstance(value, Mapping):
        return {str(key): settled(each, varying=varying or key in VOLATILE) for key, each in value.items()}
    if varying:
        return VARIES
    if isinstance(value, list | tuple):
        return [settled(each) for each in value]
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    return value


def fingerprint(numbers: Iterable[int]) -> str:
    """Stands for an order of channels."""
    text = json.dumps([int(number) for number in numbers])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def fingerprint_of_groups(num_groups: int, out_perm: Sequence[int], in_perm: Sequence[int]) -> str:
    """Stands for the connections of a layer. Rounding, and so the CPU, decides which of the groups comes first."""
    widths = len(out_perm) // num_groups, len(in_perm) // num_groups
    groups = [
        [
            sorted(perm[group * width : (group + 1) * width])
            for perm, width in zip((out_perm, in_perm), widths, strict=True)
        ]
        for group in range(num_groups)
    ]
    return hashlib.sha256(json.dumps(sorted(groups)).encode()).hexdigest()[:12]


def differences(found: Any, expected: Any, *, rel: float, where: str = "") -> list[str]:
    """What differs, by place: floats by more than the tolerance, shares by more than a few images, all else at all."""
    if isinstance(found, dict) and isinstance(expected, dict):
        missing = [f"{where}/{key}: is missing" for key in sorted(expected.keys() - found.keys())]
        new = [f"{where}/{key}: is not recorded" for key in sorted(found.keys() - expected.keys())]
        common = sorted(found.keys() & expected.keys())
        parts = [differences(found[key], expected[key], rel=rel, where=f"{where}/{key}") for key in common]
        return [*missing, *new, *(line for part in parts for line in part)]
    if isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        pairs = enumerate(zip(found, expected, strict=True))
        parts = [differences(one, other, rel=rel, where=f"{where}/{place}") for place, (one, other) in pairs]
        return [line for part in parts for line in part]
    if isinstance(found, float) and isinstance(expected, float):
        is_share = where.endswith(("top1", "top5"))
        same = math.isclose(found, expected, rel_tol=rel, abs_tol=FEW_IMAGES if is_share else 1e-6)
    else:
        same = type(found) is type(expected) and found == expected
    return [] if same else [f"{where}: {found!r}, recorded is {expected!r}"]


def readable(value: Any) -> str:
    """Sorted JSON with short lists on a line."""
    text = json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False)
    return re.sub(r"\[\n\s*([^\[\]{}]*?)\n\s*\]", lambda found: f"[{_one_line(found[1])}]", text) + "\n"


def _one_line(text: str) -> str:
    return re.sub(r"\n\s*", " ", text)


class Record:
    """The recorded outcomes in a folder, one file each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.is_written = os.environ.get("GOLDEN_WRITE") == "1"

    def check(self, name: str, found: Any, *, rel: float = 1e-3) -> None:
        """Compare an outcome with the recorded one, or record it."""
        path = self.folder / f"{name}.json"
        outcome = settled(found)
        if self.is_written:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(readable(outcome), encoding="utf-8")
        assert path.is_file(), f"nothing is recorded as {name}; GOLDEN_WRITE=1 records it"
        lines = differences(json.loads(json.dumps(outcome)), json.loads(path.read_text(encoding="utf-8")), rel=rel)
        assert not lines, f"differs from {path.name}:\n" + "\n".join(lines[:40])


def shapes(tensors: Mapping[str, Any]) -> dict[str, str]:
    """Shape and type of each, as `16x3x3x3 float32`."""
    return {
        name: f"{'x'.join(map(str, tensor.shape)) or 'scalar'} {str(tensor.dtype).removeprefix('torch.')}"
        for name, tensor in tensors.items()
    }


def some_numbers(values: Sequence[float], number: int = 12) -> list[float]:
    """The first ones."""
    return [float(value) for value in values[:number]]
