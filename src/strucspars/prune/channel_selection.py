"""The outcome of Network Slimming, and all that narrowing needs: which channels of which batch norm stay."""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from strucspars.core.checks import IntArray, checked_at_least, checked_fraction, is_number, is_whole_number

FORMAT = "strucspars-channel-selection"
FORMAT_VERSION = 1
FIGURES = ("threshold", "removed_param_fraction", "removed_mac_fraction")


@dataclass(frozen=True, eq=False)
class ChannelSelection:
    """Which channels a network keeps.

    Attributes:
        kept: name of a batch norm to the channels that stay, ascending, read-only, at least one; in network order.
        widths: name of a batch norm to the number of channels it had.
        threshold: largest absolute scale that was removed; None for channels chosen by hand.
        removed_param_fraction: fraction of all the network's parameters that goes; None likewise.
        removed_mac_fraction: the same of the multiply-accumulates; None where the input size was not known.

    >>> selection = ChannelSelection({"bn1": np.array([0, 2]), "bn2": np.array([1])}, {"bn1": 4, "bn2": 2})
    >>> selection.kept_channels, selection.removed_channel_fraction
    (3, 0.5)
    >>> ChannelSelection.from_json(selection.to_json()) == selection
    True
    """

    kept: Mapping[str, IntArray]
    widths: Mapping[str, int]
    _: KW_ONLY
    threshold: float | None = None
    removed_param_fraction: float | None = None
    removed_mac_fraction: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.kept, Mapping) or not isinstance(self.widths, Mapping):
            raise ValueError("kept and widths must map names of batch norms to channels and to numbers of channels")
        if set(self.kept) != set(self.widths):
            differing = sorted(set(self.kept) ^ set(self.widths), key=str)
            raise ValueError(f"kept and widths must name the same batch norms; only one of them has {differing[:3]}")
        widths = {name: checked_at_least(f"width of {name!r}", self.widths[name], 1) for name in self.kept}
        kept = {name: _checked_channels(name, channels, widths[name]) for name, channels in self.kept.items()}
        object.__setattr__(self, "kept", MappingProxyType(kept))
        object.__setattr__(self, "widths", MappingProxyType(widths))
        if self.threshold is not None:
            if not is_number(self.threshold) or not (math.isfinite(self.threshold) and self.threshold >= 0):
                raise ValueError(f"threshold must be a number from 0 on, got {self.threshold!r}")
            object.__setattr__(self, "threshold", float(self.threshold))
        for field in ("removed_param_fraction", "removed_mac_fraction"):
            value = getattr(self, field)
            if value is not None:
                object.__setattr__(self, field, checked_fraction(field, value))

    @property
    def kept_channels(self) -> int:
        """Number of channels that stay, over all batch norms."""
        return sum(len(channels) for channels in self.kept.values())

    @property
    def removed_channel_fraction(self) -> float:
        """Fraction of the batch norms' channels that goes: what the tables of other papers call the pruning ratio."""
        channels = sum(self.widths.values())
        return (channels - self.kept_channels) / max(channels, 1)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ChannelSelection):
            return NotImplemented
        return self._plain() == other._plain()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and other processes get the selection as JSON: a read-only mapping cannot be pickled."""
        return ChannelSelection.from_json, (self.to_json(),)

    def _plain(self) -> dict[str, Any]:
        """The fields as JSON values."""
        norms = {name: {"width": self.widths[name], "kept": kept.tolist()} for name, kept in self.kept.items()}
        return {**{name: getattr(self, name) for name in FIGURES}, "norms": norms}

    def digest(self) -> str:
        """SHA-256 of which channels stay, as hexadecimal text; threshold and fractions do not count."""
        return hashlib.sha256(json.dumps(self._plain()["norms"], sort_keys=True).encode()).hexdigest()

    def to_json(self) -> str:
        """The selection as JSON text."""
        return json.dumps({"format": FORMAT, "format_version": FORMAT_VERSION, **self._plain()})

    @classmethod
    def from_json(cls, text: str) -> "ChannelSelection":
        """Read a selection and check all of it; text that is damaged, foreign or newer is a `ValueError`."""
        document = _document(text)
        _check_keys("channel selection", document, {"format", "format_version", *FIGURES, "norms"})
        norms = document["norms"]
        if not isinstance(norms, dict):
            raise ValueError(f"channel selection: 'norms' must be an object, got {type(norms).__name__}")
        for name, entry in norms.items():
            _check_keys(f"batch norm {name!r}", entry, {"width", "kept"})
        kept = {name: entry["kept"] for name, entry in norms.items()}
        widths = {name: entry["width"] for name, entry in norms.items()}
        return cls(kept, widths, **{name: document[name] for name in FIGURES})

    def check_matches(self, widths: Mapping[str, int]) -> None:
        """Raise a `ValueError` unless the network has just these batch norms, with these numbers of channels."""
        missing, unknown = [name for name in widths if name not in self.kept], sorted(set(self.kept) - set(widths))
        if missing or unknown:
            raise ValueError(
                f"the channel selection is that of another network: it lacks {missing[:3]} and has {unknown[:3]} "
                "besides; build the network that it was made for"
            )
        for name, width in widths.items():
            if width != self.widths[name]:
                raise ValueError(
                    f"batch norm {name!r} has {width} channels, but the selection was made for {self.widths[name]}; "
                    "build the network that it was made for"
                )


def _checked_channels(name: str, channels: Any, width: int) -> IntArray:
    """The channels as a read-only array, or a `ValueError` that names the batch norm."""
    if not isinstance(channels, list | tuple | np.ndarray):
        raise ValueError(f"batch norm {name!r}: kept channels must be a list of whole numbers, got {channels!r}")
    values = list(channels)
    if not values:
        raise ValueError(f"batch norm {name!r}: no channel is kept; keep at least one")
    for value in values:
        if not is_whole_number(value) or not 0 <= value < width:
            raise ValueError(f"batch norm {name!r}: kept channels must lie in [0, {width}), got {value!r}")
    array = np.array(values, dtype=np.int64)
    if (np.diff(array) <= 0).any():
        raise ValueError(f"batch norm {name!r}: kept channels must be ascending and differ, got {values[:8]}")
    array.setflags(write=False)
    return array


def _document(text: str) -> dict[str, Any]:
    """The JSON object, in a format that we can read."""
    try:
        document = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"channel selection is not valid JSON: {error}") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ValueError(f"not a channel selection: a JSON object with 'format' {FORMAT!r} was expected")
    version = document.get("format_version")
    if not is_whole_number(version) or version < 1:
        raise ValueError(f"channel selection has no usable 'format_version': {version!r}")
    if version > FORMAT_VERSION:
        raise ValueError(
            f"channel selection has format version {version}, this reads up to {FORMAT_VERSION}: upgrade strucspars"
        )
    return document


def _check_keys(where: str, entry: Any, expected: Iterable[str]) -> None:
    if not isinstance(entry, dict) or set(entry) != set(expected):
        found = sorted(entry) if isinstance(entry, dict) else type(entry).__name__
        raise ValueError(f"{where} must be an object with {sorted(expected)}, got {found}")
