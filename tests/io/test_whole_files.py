"""Files appear together and complete, or not at all."""

import errno
import os
from pathlib import Path

import pytest

from strucspars.io.files import written_whole


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


def write_three(path: Path) -> None:
    with written_whole(path) as unfinished:
        for suffix in (".xml", ".bin", ".data"):
            unfinished.with_suffix(suffix).write_text("new")


@pytest.mark.parametrize("former", [{}, {"a.xml": "xml", "a.bin": "bin", "a.data": "data"}])
def test_a_failed_rename_brings_every_companion_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, former: dict[str, str]
) -> None:
    for name, text in former.items():
        (tmp_path / name).write_text(text)
    real = os.replace

    def failing(source: Path, target: Path) -> None:
        if target.name == "a.xml":
            raise PermissionError(1, "Operation not permitted")
        real(source, target)

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(PermissionError, match="Operation not permitted"):
        write_three(tmp_path / "a.xml")
    assert contents(tmp_path) == former


def test_every_companion_may_be_someone_elses(tmp_path: Path) -> None:
    (tmp_path / "a.data").write_text("foreign")
    with pytest.raises(FileExistsError, match=r"a\.data would be replaced"):
        write_three(tmp_path / "a.xml")
    assert contents(tmp_path) == {"a.data": "foreign"}


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


def test_a_companion_that_is_a_link_is_followed_and_stays_a_link(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    for path in (tmp_path / "a.xml", store / "weights.bin"):
        path.write_text("former")
    (tmp_path / "a.bin").symlink_to("store/weights.bin")
    write_pair(tmp_path / "a.xml")
    assert (tmp_path / "a.bin").is_symlink()
    assert (tmp_path / "a.xml").read_text() == (store / "weights.bin").read_text() == "new"


def test_a_companion_that_leads_nowhere_is_someone_elses_too(tmp_path: Path) -> None:
    (tmp_path / "a.bin").symlink_to("nowhere")
    with pytest.raises(FileExistsError, match=r"a\.bin would be replaced"):
        write_pair(tmp_path / "a.xml")
    assert [file.name for file in tmp_path.iterdir()] == ["a.bin"]
    assert (tmp_path / "a.bin").is_symlink()


def test_an_interruption_between_two_renames_brings_the_former_pair_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a.xml", "a.bin"):
        (tmp_path / name).write_text("former")
    real = os.replace

    def interrupted(source: Path, target: Path) -> None:
        if target.name == "a.xml":
            raise KeyboardInterrupt
        real(source, target)

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_pair(tmp_path / "a.xml")
    assert contents(tmp_path) == {"a.xml": "former", "a.bin": "former"}


def test_files_are_on_the_disk_before_they_get_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    real = os.replace

    def replaced(source: Path, target: Path) -> None:
        done.append(target.name)
        real(source, target)

    monkeypatch.setattr(os, "fsync", lambda descriptor: done.append("synced"))
    monkeypatch.setattr(os, "replace", replaced)
    write_pair(tmp_path / "a.xml")
    # The main file last: where it is, its companion is.
    assert done == ["synced", "synced", "a.bin", "a.xml"]


def test_places_that_take_no_file_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(IsADirectoryError, match="choose the path of a file"), written_whole(tmp_path):
        pass
    with pytest.raises(NotADirectoryError, match="folders are folders"), written_whole(tmp_path / "file" / "a.onnx"):
        pass
    with pytest.raises(FileNotFoundError, match="make the folder first"), written_whole(tmp_path / "no" / "a.onnx"):
        pass


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.EROFS, "choose a disk that is not read-only"),
        (errno.ENAMETOOLONG, "choose a shorter name"),
        (errno.EDQUOT, "free some of your disk quota"),
        (errno.EFBIG, r"raise the limit on the size of files \(ulimit -f\)"),
        (errno.EIO, "see to that, or choose another path"),
    ],
)
def test_a_failure_of_the_system_comes_with_its_remedy(tmp_path: Path, number: int, remedy: str) -> None:
    told = f"^cannot write {tmp_path / 'a.onnx'}: {os.strerror(number)}; {remedy}$"
    with pytest.raises(OSError, match=told) as caught, written_whole(tmp_path / "a.onnx"):
        raise OSError(number, os.strerror(number))
    assert caught.value.errno == number
