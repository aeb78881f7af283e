"""Files appear complete or not at all, and odd files in place of what is read are errors at once."""

import errno
import gzip
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from strucspars.io.files import (
    REMEDIES,
    check_readable,
    open_file,
    read_bytes,
    read_text,
    replace_file,
    sync_folder,
    write_bytes,
    write_text,
)


def fail_with(number: int) -> Callable[..., None]:
    def fail(*arguments: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def contents(folder: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in folder.iterdir()}


def write_together(path: Path, *suffixes: str, follow_link: bool = False, error: BaseException | None = None) -> None:
    with replace_file(path, follow_link=follow_link) as unfinished:
        for suffix in (path.suffix, *suffixes):
            unfinished.with_suffix(suffix).write_text("new")
        if error is not None:
            raise error


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    write_text(path, "old and long")
    write_text(path, "naïve")
    assert path.read_bytes() == "naïve".encode()
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_and_its_companions_appear_together(tmp_path: Path) -> None:
    path = tmp_path / ("long" * 60 + ".xml")
    write_together(path, ".bin")
    assert contents(tmp_path) == {path.name: "new", path.with_suffix(".bin").name: "new"}


def test_content_is_on_the_disk_before_the_names_and_the_names_before_the_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = []
    fsync, replace = os.fsync, os.replace

    def recorded_fsync(descriptor: int) -> None:
        events.append("folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "file")
        fsync(descriptor)

    def recorded_replace(source: Path, target: Path) -> None:
        events.append(target.name)
        replace(source, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "replace", recorded_replace)
    write_together(tmp_path / "a.xml", ".bin")
    # The main file last: where it is, its companion is.
    assert events == ["file", "file", "a.bin", "a.xml", "folder"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EPERM, errno.EFBIG, errno.EIO])
@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failed_write_keeps_the_old_file_and_comes_with_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, number: int
) -> None:
    path = tmp_path / "notes"
    write_bytes(path, b"old")
    monkeypatch.setattr(os, step, fail_with(number))
    remedy = REMEDIES.get(number, "check that path and its disk, or choose another path")
    message = f"cannot write {path}: {os.strerror(number)}; what was there is kept; {remedy}"
    with pytest.raises(OSError, match=f"^{re.escape(message)}$") as caught:
        write_bytes(path, b"new")
    assert caught.value.errno == number
    assert contents(tmp_path) == {"notes": "old"}


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("mine"), OSError("the cable is loose")])
def test_an_interrupted_block_keeps_the_old_file_and_raises_what_it_raised(
    tmp_path: Path, error: BaseException
) -> None:
    write_text(tmp_path / "a.xml", "old")
    with pytest.raises(type(error)) as caught:
        write_together(tmp_path / "a.xml", ".bin", error=error)
    assert caught.value is error
    assert contents(tmp_path) == {"a.xml": "old"}


def test_places_that_take_no_file_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, kind, words in [
        (tmp_path, IsADirectoryError, "choose the path of a file"),
        (tmp_path / "file" / "a.onnx", NotADirectoryError, "a file exists where a folder is needed"),
        (tmp_path / "no" / "a.onnx", FileNotFoundError, "create its folder first"),
    ]:
        with pytest.raises(kind, match=f"^cannot write {path}: .*; {words}"):
            write_text(path, "")


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
def test_a_folder_that_cannot_be_synchronised_at_all_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(os, "fsync", fail_with(number))
    sync_folder(tmp_path)
    monkeypatch.setattr(os, "fsync", fail_with(errno.EIO))
    with pytest.raises(OSError, match="took a new file, but cannot make it last"):
        sync_folder(tmp_path)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="no list of descriptors on this system")
def test_neither_writing_nor_reading_leaves_a_descriptor_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for number in range(3):
        write_text(tmp_path / "notes.txt", str(number))
        read_text(tmp_path / "notes.txt")
        for path in (tmp_path, Path("/dev/null")):
            with pytest.raises((OSError, ValueError)):
                read_bytes(path)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("is_link", [False, True])
def test_a_companion_without_its_file_belongs_to_something_else(tmp_path: Path, is_link: bool) -> None:
    if is_link:
        (tmp_path / "a.bin").symlink_to("nowhere")
    else:
        (tmp_path / "a.bin").write_text("foreign")
    with pytest.raises(FileExistsError, match=r"a\.bin would be replaced .* is there alone.*; move it away"):
        write_together(tmp_path / "a.xml", ".bin")
    assert [file.name for file in tmp_path.iterdir()] == ["a.bin"]
    assert (tmp_path / "a.bin").is_symlink() == is_link


def test_a_former_pair_is_replaced(tmp_path: Path) -> None:
    for name in ("a.xml", "a.bin"):
        (tmp_path / name).write_text("former")
    write_together(tmp_path / "a.xml", ".bin")
    assert contents(tmp_path) == {"a.xml": "new", "a.bin": "new"}


def test_a_link_is_replaced_and_what_it_leads_to_stays(tmp_path: Path) -> None:
    (tmp_path / "foreign").write_bytes(b"precious")
    (tmp_path / "notes").symlink_to(tmp_path / "foreign")
    write_bytes(tmp_path / "notes", b"new")
    assert contents(tmp_path) == {"foreign": "precious", "notes": "new"}
    assert not (tmp_path / "notes").is_symlink()


@pytest.mark.parametrize("is_there", [True, False])
def test_a_link_of_the_user_is_followed_and_stays_a_link(tmp_path: Path, is_there: bool) -> None:
    store = tmp_path / "store"
    store.mkdir()
    if is_there:
        (store / "real.xml").write_text("former")
    (tmp_path / "a.xml").symlink_to("store/real.xml")
    with replace_file(tmp_path / "a.xml", follow_link=True) as unfinished:
        unfinished.write_text("new")
        unfinished.with_suffix(".bin").write_text("new")
    assert contents(store) == {"real.xml": "new", "real.bin": "new"}
    assert {file.name for file in tmp_path.iterdir() if file.is_symlink()} == {"a.xml"}


def test_text_comes_back_without_the_mark_that_some_editors_begin_with(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"\xef\xbb\xbfna\xc3\xafve")
    assert read_text(tmp_path / "a") == "naïve"
    (tmp_path / "a").write_bytes(b"na\xefve")
    with pytest.raises(ValueError, match=f"{tmp_path}/a is not UTF-8 text"):
        read_text(tmp_path / "a")


def named_pipe(path: Path) -> None:
    os.mkfifo(path)


def endless_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def bound_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


def sparse_file(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


def circle(path: Path) -> None:
    path.symlink_to(path.name)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (named_pipe, "it is a pipe, a socket or a device; give a regular file"),
        (endless_device, "it is a pipe, a socket or a device; give a regular file"),
        (bound_socket, "it is a pipe, a socket or a device; give a regular file"),
        (sparse_file, "it has more than 1,000 bytes"),
        (circle, "Too many levels of symbolic links; it is a link"),
        (os.mkdir, "Is a directory; choose the path of a file"),
        (lambda path: None, "No such file or directory; create its folder first, or choose an existing path"),
    ],
)
def test_what_is_no_regular_file_of_a_fitting_size_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], None], words: str
) -> None:
    # The name of a socket is short.
    monkeypatch.chdir(tmp_path)
    make(Path("odd"))
    for read in (read_bytes, open_file, check_readable):
        with pytest.raises((OSError, ValueError), match=f"^cannot read odd: {words}"):
            read("odd", limit=1000)


def test_a_file_without_a_size_is_read_up_to_the_limit() -> None:
    assert read_bytes("/proc/self/status", limit=100_000)
    with pytest.raises(ValueError, match="more than 10 bytes"):
        read_bytes("/proc/self/status", limit=10)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"text", "is not a gzip file, or damaged"),
        (gzip.compress(b"text" * 100)[:-10], "is not a gzip file, or damaged"),
        (gzip.compress(b"text")[:-6] + b"other!", "is not a gzip file, or damaged"),
        (gzip.compress(b"x" * 1001), "has more than 1,000 bytes"),
    ],
    # Not by their bytes, which hold the time: every process of a test run must know a test by the same name.
    ids=["text", "cut off", "wrong checksum", "too large"],
)
def test_a_packed_file_that_is_damaged_or_becomes_too_large_is_named(
    tmp_path: Path, content: bytes, complaint: str
) -> None:
    (tmp_path / "notes.gz").write_bytes(content)
    with pytest.raises(ValueError, match=f"notes.gz.* {complaint}"):
        read_bytes(tmp_path / "notes.gz", limit=1000)
