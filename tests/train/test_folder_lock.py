import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from strucspars.train import run_folder
from strucspars.train.run_folder import RunFolder, RunFolderBusy

HOLDER = """
import fcntl, os, sys
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
print(os.getpid(), file=file, flush=True)
print("held", flush=True)
sys.stdin.read()
"""


def test_a_second_opening_is_refused_until_the_first_ends(tmp_path: Path) -> None:
    with RunFolder(tmp_path).locked():
        with pytest.raises(RunFolderBusy, match=f"{tmp_path} is in use by process {os.getpid()}; wait for it"):
            RunFolder(tmp_path).locked().__enter__()
        with pytest.raises(RunFolderBusy):
            RunFolder(tmp_path).locked().__enter__()
    with RunFolder(tmp_path).locked():
        pass


def test_the_lock_ends_with_an_exception(tmp_path: Path) -> None:
    with pytest.raises(KeyError), RunFolder(tmp_path).locked():
        raise KeyError
    with RunFolder(tmp_path).locked():
        pass


def test_the_process_that_holds_the_folder_is_named_and_its_death_frees_it(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text("999999999 of a long dead process")
    command = [sys.executable, "-c", HOLDER, str(tmp_path / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(RunFolderBusy, match=f"in use by process {holder.pid};"):
            RunFolder(tmp_path).locked().__enter__()
        holder.kill()
        holder.wait()
        with RunFolder(tmp_path).locked():
            assert (tmp_path / ".lock").read_text() == f"{os.getpid()}\n"


def test_a_lock_file_with_anything_in_it_is_not_repeated_in_the_message(tmp_path: Path) -> None:
    with (tmp_path / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write("\x1b[2Jhostile")
        file.flush()
        with pytest.raises(RunFolderBusy, match="in use by another process;"):
            RunFolder(tmp_path).locked().__enter__()


@pytest.mark.parametrize("kind", ["missing", "file", "below a file"])
def test_a_path_that_is_no_folder_is_named(tmp_path: Path, kind: str) -> None:
    (tmp_path / "file").touch()
    path = {"missing": tmp_path / "nowhere", "file": tmp_path / "file", "below a file": tmp_path / "file" / "x"}[kind]
    with pytest.raises(OSError, match=rf"cannot lock {path}/\.lock: .*(create its folder first|choose another path)"):
        RunFolder(path).locked().__enter__()


@pytest.mark.parametrize(("number", "kind"), [(errno.EACCES, PermissionError), (errno.EROFS, OSError)])
def test_a_folder_that_cannot_be_written_is_named_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[OSError]
) -> None:
    def refuse(*arguments: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(kind, match=f"lock {tmp_path}/.lock: {os.strerror(number)}; (change its|choose a disk)"):
        RunFolder(tmp_path).locked().__enter__()


def test_a_file_system_without_locks_is_named_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(OSError, match=r"refuses locks .*put the run folder on a local disk"):
        RunFolder(tmp_path).locked().__enter__()
    monkeypatch.undo()
    with RunFolder(tmp_path).locked():
        pass


def test_a_link_in_the_place_of_the_lock_file_is_not_followed(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.write_text("precious")
    (tmp_path / "run").mkdir()
    folder = RunFolder(tmp_path / "run")
    folder.lock_path.symlink_to(foreign)
    with pytest.raises(OSError, match=r"run/\.lock: .*; it is a link; delete it"):
        folder.locked().__enter__()
    assert foreign.read_text() == "precious"


def test_nothing_of_a_longer_process_number_stays(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text("99999999999999999999\n")
    with RunFolder(tmp_path).locked():
        assert (tmp_path / ".lock").read_text() == f"{os.getpid()}\n"


def test_a_forked_child_closes_no_descriptor_of_a_lock_that_has_ended(tmp_path: Path) -> None:
    with RunFolder(tmp_path).locked():
        assert len(run_folder._held) == 1
    with pytest.raises(KeyError), RunFolder(tmp_path).locked():
        raise KeyError
    # The number may be that of another file by now.
    assert not run_folder._held


def test_a_folder_in_the_place_of_the_lock_file_is_named(tmp_path: Path) -> None:
    (tmp_path / ".lock").mkdir()
    with pytest.raises(IsADirectoryError, match=r"cannot lock .*\.lock: Is a directory"):
        RunFolder(tmp_path).locked().__enter__()


@pytest.mark.parametrize("is_held", [True, False])
def test_who_must_be_first_is_refused_where_somebody_was_before(tmp_path: Path, is_held: bool) -> None:
    assert not RunFolder(tmp_path).was_locked
    with RunFolder(tmp_path).locked(is_first=True):
        assert RunFolder(tmp_path).was_locked
        if is_held:
            with pytest.raises(RunFolderBusy, match=f"has just begun a run in {tmp_path}"):
                RunFolder(tmp_path).locked(is_first=True).__enter__()
    with pytest.raises(RunFolderBusy, match=f"has just begun a run in {tmp_path}"):
        RunFolder(tmp_path).locked(is_first=True).__enter__()
    assert (tmp_path / ".lock").read_text() == f"{os.getpid()}\n"


def test_a_link_to_nowhere_in_the_place_of_the_lock_file_counts_as_one(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.lock_path.symlink_to("nowhere")
    assert folder.was_locked


def test_a_named_pipe_in_the_place_of_the_lock_file_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ".lock")
    with pytest.raises(ValueError, match=r"\.lock is not a regular file; delete it"):
        RunFolder(tmp_path).locked().__enter__()
