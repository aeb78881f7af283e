import math
from pathlib import Path

import pytest

from strucspars.core.budget import Shuffle
from strucspars.cost.latency import LatencyTable, cache_folder, read_table, write_table

TABLE = LatencyTable(
    machine="some processor",
    runtime="some runtime 1.0",
    network="key",
    dense_ms=4.0,
    layers={"a": (2.0, 1.0), "b": (1.0, 1.5, 0.5), "c": (0.5, 0.5)},
    shuffles=(Shuffle(0.25, ("a", "b")), Shuffle(0.125, ("c",), free_sides=0)),
)


def test_the_time_of_a_plan_is_that_of_its_layers_and_copies() -> None:
    assert TABLE.expected_ms({}) == TABLE.expected_ms({"a": 1, "b": 1, "c": 1}) == 4.0
    assert TABLE.expected_ms({"a": 2}) == 3.0
    assert TABLE.expected_ms({"a": 2, "b": 3}) == 4.0 - 1.0 - 0.5 + 0.25
    assert TABLE.expected_ms({"c": 2}) == 4.125


def test_levels_beyond_those_measured_take_as_long_as_the_last() -> None:
    assert TABLE.ms_by_level("a", 4) == (2.0, 1.0, 1.0, 1.0)
    assert TABLE.ms_by_level("not called", 2) == (0.0, 0.0)


def test_layers_that_no_level_makes_faster_are_named() -> None:
    assert TABLE.layers_without_gain() == ("c",)


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_table(tmp_path / "new" / "table.json", TABLE)
    assert read_table(tmp_path / "new" / "table.json") == TABLE


@pytest.mark.parametrize("content", ["", "{", "{}", '{"format": "strucspars-latency", "format_version": 1}'])
def test_a_damaged_table_is_an_error_that_names_it(tmp_path: Path, content: str) -> None:
    path = tmp_path / "table.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"table\.json"):
        read_table(path)


@pytest.mark.parametrize("dense_ms", [0.0, -1.0, math.nan])
def test_a_table_has_positive_times(dense_ms: float) -> None:
    with pytest.raises(ValueError, match="milliseconds must be positive"):
        LatencyTable(machine="", runtime="", network="", dense_ms=dense_ms, layers={})


def test_tables_are_kept_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("STRUCSPARS_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path / "latency"
    monkeypatch.delenv("STRUCSPARS_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "strucspars" / "latency"
