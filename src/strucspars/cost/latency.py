"""Milliseconds of a network's layers by group level, as measured on one machine, and the folder that keeps them."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from strucspars.core.budget import Shuffle
from strucspars.io.files import read_text, user_cache, write_text
from strucspars.io.records import as_record, check_header, parse_json, to_json

FORMAT: Mapping[str, str | int] = {"format": "strucspars-latency", "format_version": 1}


@dataclass(frozen=True, kw_only=True)
class LatencyTable:
    """How long the layers of a network take for one call on a machine, at the group levels that were measured.

    Attributes:
        machine: processor and the unit that decides how fast it is.
        runtime: that the network was measured in, and its version.
        network: what was measured, as `network_key` gives it.
        dense_ms: of the whole dense network.
        layers: by layer, milliseconds at the group levels 1, 2, ...; deeper levels take as long as the last one.
        shuffles: where layers with orders of their own make copies; their costs are milliseconds.
    """

    machine: str
    runtime: str
    network: str
    dense_ms: float
    layers: Mapping[str, tuple[float, ...]]
    shuffles: tuple[Shuffle, ...] = ()

    def __post_init__(self) -> None:
        if not self.dense_ms > 0 or not all(ms and min(ms) >= 0 for ms in self.layers.values()):
            raise ValueError("milliseconds must be positive, with one entry per level for every layer")

    def ms_by_level(self, name: str, num_levels: int) -> tuple[float, ...]:
        """Milliseconds of a layer at so many levels; 0 where it was not called."""
        measured = self.layers.get(name, (0.0,))
        return tuple(measured[min(level, len(measured)) - 1] for level in range(1, num_levels + 1))

    def expected_ms(self, group_levels: Mapping[str, int]) -> float:
        """Milliseconds of the whole network at these levels.

        >>> table = LatencyTable(
        ...     machine="", runtime="", network="", dense_ms=3.0, layers={"a": (1.0, 0.5), "b": (1.0, 0.75)},
        ...     shuffles=(Shuffle(0.125, ("a", "b")),),
        ... )
        >>> table.expected_ms({"a": 2, "b": 1}), table.expected_ms({"a": 2, "b": 2})
        (2.5, 2.375)
        """
        saved = sum(
            levels[0] - levels[-1] for levels in (self.ms_by_level(name, level) for name, level in group_levels.items())
        )
        return self.dense_ms - saved + sum(shuffle.cost * shuffle.num_copies(group_levels) for shuffle in self.shuffles)

    def layers_without_gain(self) -> tuple[str, ...]:
        """Layers for which no group level is faster than none."""
        return tuple(name for name, ms in self.layers.items() if len(ms) > 1 and min(ms[1:]) >= ms[0])


def network_key(*parts: object) -> str:
    """A short text that differs wherever what was measured differs."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def read_table(path: Path) -> LatencyTable:
    """A table that `write_table` wrote; a `ValueError` names the file and what is wrong."""
    where = str(path)
    return as_record(LatencyTable, check_header(parse_json(read_text(path), where), where, **FORMAT), where)


def write_table(path: Path, table: LatencyTable) -> None:
    """Write a table as JSON, with its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, to_json({**FORMAT} | {name: getattr(table, name) for name in LatencyTable.__dataclass_fields__}))


def cache_folder() -> Path:
    """Where tables are kept."""
    return user_cache("latency")
