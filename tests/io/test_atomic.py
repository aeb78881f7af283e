import errno
import os
import re
from pathlib import Path

import pytest

from strucspars.io.files import atomic_file, sync_folder, write_bytes_atomic, write_text_atomic


def fail_with(number: int) -> object:
    def fail(*arguments: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    write_text_atomic(path, "old and long")
    write_text_atomic(path, "naïve")
    assert path.read_bytes() == "naïve".encode()
    assert list(tmp_path.iterdir()) == [path]


def test_content_is_on_the_disk_before_the_name_and_the_name_before_the_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = []
    fsync, replace = os.fsync, os.replace

    def recorded_fsync(descriptor: int) -> None:
        events.append("folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "file")
        fsync(descriptor)

    def recorded_replace(source: Path, target: Path) -> None:
        events.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "replace", recorded_replace)
    write_bytes_atomic(tmp_path / "notes", b"new")
    assert events == ["file", "rename", "folder"]


@pytest.mark.parametrize(
    ("number", "complaint"),
    [
        (errno.ENOSPC, "No space left on device; the previous version of it is kept. Free some space on that disk"),
        (errno.EDQUOT, "the previous version of it is kept. Free some of your disk quota"),
        (errno.EROFS, "the previous version of it is kept. Use a disk that is not read-only"),
        (errno.EPERM, "the previous version of it is kept. Make the folder writable"),
        (errno.EIO, "the previous version of it is kept. See to that"),
    ],
)
@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failed_write_keeps_the_old_file_and_leaves_no_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, number: int, complaint: str
) -> None:
    path = tmp_path / "notes"
    write_bytes_atomic(path, b"old")
    monkeypatch.setattr(os, step, fail_with(number))
    with pytest.raises(OSError, match=re.escape(f"cannot write {path}: ")) as caught:
        write_bytes_atomic(path, b"new")
    assert complaint in str(caught.value)
    assert str(caught.value).endswith(", then run the same command again")
    assert caught.value.errno == number
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("interruption", [KeyboardInterrupt(), RuntimeError("mine")])
def test_an_interrupted_block_keeps_the_old_file_and_raises_what_it_raised(
    tmp_path: Path, interruption: BaseException
) -> None:
    path = tmp_path / "notes"
    write_bytes_atomic(path, b"old")

    def write_half() -> None:
        with atomic_file(path) as unfinished:
            unfinished.write_bytes(b"half")
            raise interruption

    with pytest.raises(type(interruption)) as caught:
        write_half()
    assert caught.value is interruption
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_rest_of_a_killed_process_is_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    (tmp_path / ".notes.unfinished").write_bytes(b"a long rest of a process that is gone")
    with atomic_file(path) as unfinished:
        assert unfinished == tmp_path / ".notes.unfinished"
        unfinished.write_bytes(b"new")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_in_the_place_of_the_unfinished_file_is_not_followed(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.write_bytes(b"precious")
    (tmp_path / ".notes.unfinished").symlink_to(foreign)
    (tmp_path / "notes").symlink_to(foreign)
    write_bytes_atomic(tmp_path / "notes", b"new")
    assert foreign.read_bytes() == b"precious"
    assert (tmp_path / "notes").read_bytes() == b"new"


def test_a_missing_folder_is_named_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere/notes: No such file.*Create the folder, then run"):
        write_bytes_atomic(tmp_path / "nowhere" / "notes", b"")


def test_a_file_in_the_place_of_the_folder_is_named_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match=r"file/notes: Not a directory.*Create the folder, then run"):
        write_bytes_atomic(tmp_path / "file" / "notes", b"")


def test_a_failure_without_a_number_is_said_in_its_own_words(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"notes: the cable is loose; the previous"), atomic_file(tmp_path / "notes"):
        raise OSError("the cable is loose")


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
def test_writing_leaves_no_descriptor_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for number in range(3):
        write_text_atomic(tmp_path / "notes.txt", str(number))
    assert len(os.listdir("/proc/self/fd")) == before
