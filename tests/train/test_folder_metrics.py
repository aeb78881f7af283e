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

from strucspars.train.run_folder import RunFolder

ROWS = [{"epoch": number, "loss": 1 / (number + 1), "stage": "größer\nals"} for number in range(5)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "metrics.jsonl"
    for row in ROWS:
        RunFolder(path.parent).append_metrics(row)
    return path


def test_rows_come_back_in_order(path: Path) -> None:
    assert RunFolder(path.parent).metrics() == ROWS
    assert len(path.read_bytes().splitlines()) == len(ROWS)


def test_there_are_no_rows_without_a_file(tmp_path: Path) -> None:
    assert RunFolder(tmp_path).metrics() == []
    RunFolder(tmp_path).rewind_metrics(0)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), np.float64("nan")])
def test_numbers_that_json_lacks_become_null(tmp_path: Path, value: float) -> None:
    RunFolder(tmp_path).append_metrics({"loss": value, "levels": [1, value], "by_layer": {"conv": value}})
    assert RunFolder(tmp_path).metrics() == [{"loss": None, "levels": [1, None], "by_layer": {"conv": None}}]
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
        RunFolder(path.parent).append_metrics(row)
    assert RunFolder(path.parent).metrics() == ROWS


def test_a_file_cut_anywhere_reads_as_its_whole_rows_and_grows_on_from_there(tmp_path: Path, path: Path) -> None:
    content = path.read_bytes()
    torn = tmp_path / "torn" / "metrics.jsonl"
    torn.parent.mkdir()
    for length in range(len(content)):
        torn.write_bytes(content[:length])
        whole = ROWS[: content[:length].count(b"\n")]
        assert RunFolder(torn.parent).metrics() == whole
        if length % 7 == 0:  # writing waits for the disk
            RunFolder(torn.parent).append_metrics({"epoch": 99})
            assert RunFolder(torn.parent).metrics() == [*whole, {"epoch": 99}]


def test_a_long_torn_row_is_cut_off_too(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b'{"by_layer": "' + b"x" * 100_000)
    RunFolder(path.parent).append_metrics({"epoch": 99})
    assert RunFolder(path.parent).metrics() == [*ROWS, {"epoch": 99}]
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
        RunFolder(path.parent).metrics()
    with pytest.raises(ValueError, match=complaint):
        RunFolder(path.parent).rewind_metrics(3)
    RunFolder(path.parent).rewind_metrics(2)
    assert RunFolder(path.parent).metrics() == ROWS[:2]


@pytest.mark.parametrize("count", range(6))
def test_exactly_the_first_rows_are_kept(path: Path, count: int) -> None:
    RunFolder(path.parent).rewind_metrics(count)
    assert RunFolder(path.parent).metrics() == ROWS[:count]
    RunFolder(path.parent).append_metrics({"epoch": 99})
    assert RunFolder(path.parent).metrics() == [*ROWS[:count], {"epoch": 99}]


def test_more_rows_than_there_are_cannot_be_kept(path: Path) -> None:
    with pytest.raises(ValueError, match=r"has 5 whole rows, but the checkpoint was made after 6; restore"):
        RunFolder(path.parent).rewind_metrics(6)
    assert RunFolder(path.parent).metrics() == ROWS


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
        RunFolder(path.parent).append_metrics({"epoch": 99})
    assert path.read_bytes() == before


def test_an_interrupted_row_is_taken_back(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = path.read_bytes()
    monkeypatch.setattr(os, "fsync", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        RunFolder(path.parent).append_metrics({"epoch": 99})
    assert path.read_bytes() == before


def test_a_row_that_the_system_takes_in_pieces_is_whole(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, offset: pwrite(descriptor, data[:5], offset))
    RunFolder(path.parent).append_metrics({"epoch": 99, "stage": "finetune"})
    assert RunFolder(path.parent).metrics() == [*ROWS, {"epoch": 99, "stage": "finetune"}]


def test_a_link_is_not_followed_to_a_foreign_file(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.write_text("precious")
    folder = RunFolder(tmp_path)
    folder.metrics_path.symlink_to(foreign)
    with pytest.raises(OSError, match=r"cannot write .*metrics\.jsonl"):
        folder.append_metrics({"epoch": 0})
    assert foreign.read_text() == "precious"


@given(st.binary(max_size=200))
def test_any_bytes_are_rows_or_a_value_error(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any" / "metrics.jsonl"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    try:
        rows = RunFolder(path.parent).metrics()
    except ValueError as error:
        complaint = str(error)
    else:
        assert all(isinstance(row, dict) for row in rows)
        assert len(rows) == content.count(b"\n")
        return
    assert "metrics.jsonl, line" in complaint


def test_rows_are_added_behind_a_file_longer_than_the_window_that_is_searched(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for epoch in range(5):
        RunFolder(path.parent).append_metrics({"epoch": epoch, "text": "x" * 2000})
    assert [row["epoch"] for row in RunFolder(path.parent).metrics()] == list(range(5))


def test_the_name_of_a_new_file_is_on_the_disk_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = []
    fsync = os.fsync

    def recorded(descriptor: int) -> None:
        events.append("folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "file")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", recorded)
    for _ in range(2):
        RunFolder(tmp_path).append_metrics({"epoch": 0})
    assert events == ["file", "folder", "file"]
