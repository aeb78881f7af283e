"""Files appear together and complete, or not at all."""

import os
from pathlib import Path

import pytest

from strucspars.export.whole_files import written_whole


def test_a_file_and_its_companions_appear_together(tmp_path: Path) -> None:
    path = tmp_path / ("long" * 60 + ".xml")
    with written_whole(path) as unfinished:
        unfinished.write_text("main")
        unfinished.with_suffix(".bin").write_text("weights")
        assert not path.exists()
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {
        path.name: "main",
        path.with_suffix(".bin").name: "weights",
    }


@pytest.mark.parametrize("error", [ValueError("spoilt"), KeyboardInterrupt()])
def test_a_failure_leaves_what_was_there(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "a.xml"
    path.write_text("former")

    def fail() -> None:
        with written_whole(path) as unfinished:
            unfinished.write_text("new")
            raise error

    with pytest.raises(type(error)):
        fail()
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {"a.xml": "former"}


def test_a_failed_rename_brings_the_former_companion_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.xml"
    for suffix in (".xml", ".bin"):
        path.with_suffix(suffix).write_text("former")
    real = os.replace

    def failing(source: Path, target: Path) -> None:
        if target == path:
            raise PermissionError(1, "Operation not permitted")
        real(source, target)

    def write() -> None:
        with written_whole(path) as unfinished:
            unfinished.write_text("new")
            unfinished.with_suffix(".bin").write_text("new")

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(PermissionError, match=r"cannot write .*a\.xml: Operation not permitted; make the folder"):
        write()
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {"a.xml": "former", "a.bin": "former"}


def write_pair(path: Path) -> None:
    with written_whole(path) as unfinished:
        unfinished.write_text("new")
        unfinished.with_suffix(".bin").write_text("new")


def contents(folder: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in folder.iterdir()}


def test_a_companion_that_is_there_alone_is_someone_elses_and_stays(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_text("foreign")
    with pytest.raises(FileExistsError, match=r"a\.bin would be replaced .* is there alone.*; move it away"):
        write_pair(tmp_path / "a.xml")
    assert contents(tmp_path) == {"a.bin": "foreign"}


def test_a_former_pair_is_replaced(tmp_path: Path) -> None:
    for name in ("a.xml", "a.bin"):
        (tmp_path / name).write_text("former")
    write_pair(tmp_path / "a.xml")
    assert contents(tmp_path) == {"a.xml": "new", "a.bin": "new"}


def test_a_failed_rename_leaves_no_new_companion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.replace

    def failing(source: Path, target: Path) -> None:
        if target.name == "a.xml":
            raise PermissionError(1, "Operation not permitted")
        real(source, target)

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(PermissionError, match="Operation not permitted"):
        write_pair(tmp_path / "a.xml")
    assert contents(tmp_path) == {}


@pytest.mark.parametrize("is_there", [True, False])
def test_a_link_is_followed_and_stays_a_link(tmp_path: Path, is_there: bool) -> None:
    store = tmp_path / "store"
    store.mkdir()
    if is_there:
        (store / "real.xml").write_text("former")
    (tmp_path / "a.xml").symlink_to("store/real.xml")
    write_pair(tmp_path / "a.xml")
    assert contents(store) == {"real.xml": "new", "real.bin": "new"}
    assert (tmp_path / "a.xml").is_symlink()
    assert {file.name for file in tmp_path.iterdir()} == {"a.xml", "store"}


def test_places_that_take_no_file_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(IsADirectoryError, match="choose the path of a file"), written_whole(tmp_path):
        pass
    with pytest.raises(NotADirectoryError, match="folders are folders"), written_whole(tmp_path / "file" / "a.onnx"):
        pass
    with pytest.raises(FileNotFoundError, match="make the folder first"), written_whole(tmp_path / "no" / "a.onnx"):
        pass
