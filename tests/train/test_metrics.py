import errno
import os
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from strucspars.train.metrics import append_row, keep_rows, read_rows

ROWS = [{"epoch": number, "loss": 1 / (number + 1), "stage": "größer\nals"} for number in range(5)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "metrics.jsonl"
    for row in ROWS:
        append_row(path, row)
    return path


def test_rows_come_back_in_order(path: Path) -> None:
    assert read_rows(path) == ROWS
    assert len(path.read_bytes().splitlines()) == len(ROWS)


def test_there_are_no_rows_without_a_file(tmp_path: Path) -> None:
    assert read_rows(tmp_path / "metrics.jsonl") == []
    keep_rows(tmp_path / "metrics.jsonl", 0)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), np.float64("nan")])
def test_numbers_that_json_lacks_become_null(tmp_path: Path, value: float) -> None:
    append_row(tmp_path / "metrics.jsonl", {"loss": value, "levels": [1, value], "by_layer": {"conv": value}})
    assert read_rows(tmp_path / "metrics.jsonl") == [{"loss": None, "levels": [1, None], "by_layer": {"conv": None}}]
    assert b"N" not in (tmp_path / "metrics.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"loss": torch.tensor(1.0)}, r"row\['loss'\] is a torch.Tensor, which JSON cannot hold.*\.item\(\)"),
        ({"by_layer": [{"conv": np.float32(1)}]}, r"row\['by_layer'\]\[0\]\['conv'\] is a numpy.float32"),
        ({"loss": {1: 2}}, r"row\['loss'\]: the key 1 is a int"),
        ({"loss": b"1"}, r"row\['loss'\] is a builtins.bytes"),
        ({"stage": np.str_("sparsify")}, r"row\['stage'\] is a numpy.str_"),
    ],
)
def test_a_value_that_json_cannot_hold_is_named_and_nothing_is_written(
    path: Path, row: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        append_row(path, row)
    assert read_rows(path) == ROWS


def test_a_file_cut_anywhere_reads_as_its_whole_rows_and_grows_on_from_there(tmp_path: Path, path: Path) -> None:
    content = path.read_bytes()
    torn = tmp_path / "torn.jsonl"
    for length in range(len(content)):
        torn.write_bytes(content[:length])
        whole = ROWS[: content[:length].count(b"\n")]
        assert read_rows(torn) == whole
        if length % 7 == 0:  # writing waits for the disk
            append_row(torn, {"epoch": 99})
            assert read_rows(torn) == [*whole, {"epoch": 99}]


def test_a_long_torn_row_is_cut_off_too(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b'{"by_layer": "' + b"x" * 100_000)
    append_row(path, {"epoch": 99})
    assert read_rows(path) == [*ROWS, {"epoch": 99}]
    # Others read the file, too, and not all of them leave out a torn line.
    assert path.read_bytes().endswith(b'{"epoch":99}\n')


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (b'{"epoch": 2, "lo', "line 3: is not valid JSON"),
        (b"\xff\xfe", "line 3: is not valid JSON"),
        (b"[1]", "line 3: must be a JSON object, got list"),
        (b'{"loss": NaN}', "line 3: is not valid JSON: NaN is not a number"),
        (b"", "line 3: is not valid JSON"),
        (b"[" * 100_000, "line 3: is not valid JSON"),
    ],
)
def test_a_damaged_line_in_the_middle_is_named(path: Path, damage: bytes, complaint: str) -> None:
    lines = path.read_bytes().split(b"\n")
    lines[2] = damage
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(ValueError, match=complaint):
        read_rows(path)
    with pytest.raises(ValueError, match=complaint):
        keep_rows(path, 3)
    keep_rows(path, 2)
    assert read_rows(path) == ROWS[:2]


@pytest.mark.parametrize("count", range(6))
def test_exactly_the_first_rows_are_kept(path: Path, count: int) -> None:
    keep_rows(path, count)
    assert read_rows(path) == ROWS[:count]
    append_row(path, {"epoch": 99})
    assert read_rows(path) == [*ROWS[:count], {"epoch": 99}]


def test_more_rows_than_there_are_cannot_be_kept(path: Path) -> None:
    with pytest.raises(ValueError, match=r"has 5 whole rows, but the checkpoint was made after 6; restore"):
        keep_rows(path, 6)
    assert read_rows(path) == ROWS


@pytest.mark.parametrize("step", ["pwrite", "fsync"])
def test_a_row_that_does_not_fit_on_the_disk_is_taken_back(
    path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    before = path.read_bytes()
    pwrite = os.pwrite

    def fill(descriptor: int, data: bytes, offset: int) -> int:
        if offset > len(before):
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(descriptor, data[:5], offset)

    def refuse(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, step, fill if step == "pwrite" else refuse)
    with pytest.raises(
        OSError, match=rf"cannot write {path}: No space left.*; what was there is kept; free some space"
    ):
        append_row(path, {"epoch": 99})
    assert path.read_bytes() == before


def test_an_interrupted_row_is_taken_back(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = path.read_bytes()
    monkeypatch.setattr(os, "fsync", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        append_row(path, {"epoch": 99})
    assert path.read_bytes() == before


def test_a_row_that_the_system_takes_in_pieces_is_whole(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, offset: pwrite(descriptor, data[:5], offset))
    append_row(path, {"epoch": 99, "stage": "finetune"})
    assert read_rows(path) == [*ROWS, {"epoch": 99, "stage": "finetune"}]


def test_a_link_is_not_followed_to_a_foreign_file(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.write_text("precious")
    (tmp_path / "metrics.jsonl").symlink_to(foreign)
    with pytest.raises(OSError, match=r"cannot write .*metrics\.jsonl"):
        append_row(tmp_path / "metrics.jsonl", {"epoch": 0})
    assert foreign.read_text() == "precious"


@given(st.binary(max_size=200))
def test_any_bytes_are_rows_or_a_value_error(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    path.write_bytes(content)
    try:
        rows = read_rows(path)
    except ValueError as error:
        complaint = str(error)
    else:
        assert all(isinstance(row, dict) for row in rows)
        assert len(rows) == content.count(b"\n")
        return
    assert "any.jsonl, line" in complaint


def test_rows_are_added_behind_a_file_longer_than_the_window_that_is_searched(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for epoch in range(5):
        append_row(path, {"epoch": epoch, "text": "x" * 2000})
    assert [row["epoch"] for row in read_rows(path)] == list(range(5))


def test_the_name_of_a_new_file_is_on_the_disk_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = []
    fsync = os.fsync

    def recorded(descriptor: int) -> None:
        events.append("folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "file")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", recorded)
    for _ in range(2):
        append_row(tmp_path / "metrics.jsonl", {"epoch": 0})
    assert events == ["file", "folder", "file"]
