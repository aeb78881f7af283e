"""A report's folder is replaced whole or not at all, and nobody else's files go."""

import errno
import os
import stat
from pathlib import Path

import pytest

from strucspars.io.files import MANIFEST, replace_folder


def write(out: Path, *names: str, error: BaseException | None = None) -> None:
    with replace_folder(out) as folder:
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(name)
        if error is not None:
            raise error


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_a_new_report_replaces_the_earlier_one_whole(tmp_path: Path) -> None:
    write(tmp_path / "out", "index.html", "figures/old.svg")
    write(tmp_path / "out", "index.html", "figures/new.svg")
    assert files(tmp_path / "out") == {"index.html", "figures/new.svg", MANIFEST}
    assert files(tmp_path) == {f"out/{name}" for name in files(tmp_path / "out")}


def test_folders_around_it_are_made_and_an_empty_one_is_used(tmp_path: Path) -> None:
    write(tmp_path / "a" / "b", "index.html")
    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty", "index.html")
    assert files(tmp_path / "empty") == {"index.html", MANIFEST}


def test_the_folder_is_as_readable_as_any_other(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    write(tmp_path / "out", "index.html")
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("other", "out")}
    assert len(modes) == 1


@pytest.mark.parametrize("error", [ValueError("wrong"), KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left")])
def test_a_failure_keeps_the_earlier_report_and_leaves_nothing(tmp_path: Path, error: BaseException) -> None:
    write(tmp_path / "out", "index.html")
    with pytest.raises(type(error)):
        write(tmp_path / "out", "half.html", error=error)
    assert files(tmp_path) == {"out/index.html", f"out/{MANIFEST}"}


def test_a_failure_of_the_last_step_brings_the_earlier_report_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "out", "index.html")
    replace, calls = os.replace, []

    def failing(source: Path, target: Path) -> None:
        calls.append(target)
        if len(calls) == 2:
            raise OSError(errno.EIO, "Input/output error")
        replace(source, target)

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(OSError, match="what was there is kept"):
        write(tmp_path / "out", "other.html")
    assert files(tmp_path) == {"out/index.html", f"out/{MANIFEST}"}


def test_files_that_no_report_has_written_are_never_replaced(tmp_path: Path) -> None:
    write(tmp_path / "out", "index.html")
    (tmp_path / "out" / "my notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"my notes\.txt, which no report has written; .* --out"):
        write(tmp_path / "out", "index.html")
    assert (tmp_path / "out" / "my notes.txt").read_text() == "mine"


@pytest.mark.parametrize("manifest", ["", "[]", "{}", '{"format": "other", "files": ["a"]}', "[" * 100_000])
def test_a_folder_without_a_good_manifest_is_somebody_elses(tmp_path: Path, manifest: str) -> None:
    (tmp_path / "a").write_text("mine")
    (tmp_path / MANIFEST).write_text(manifest)
    with pytest.raises(FileExistsError, match="no report has written"):
        write(tmp_path, "index.html")
    assert (tmp_path / "a").read_text() == "mine"


@pytest.mark.parametrize("target", ["elsewhere", "nowhere"])
def test_links_that_no_report_has_made_are_never_replaced(tmp_path: Path, target: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    write(tmp_path / "out", "index.html")
    (tmp_path / "out" / "link").symlink_to(tmp_path / target)
    with pytest.raises(FileExistsError, match="holds link, which no report has written"):
        write(tmp_path / "out", "index.html")
    assert (tmp_path / "out" / "link").is_symlink()


def test_many_foreign_files_are_counted_not_listed(tmp_path: Path) -> None:
    for number in range(9):
        (tmp_path / f"{number}.txt").touch()
    with pytest.raises(FileExistsError, match=r"0\.txt, 1\.txt, 2\.txt and 6 more"):
        write(tmp_path, "index.html")


def test_a_file_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(FileExistsError, match="is a file"):
        write(tmp_path / "out", "index.html")


def test_below_a_file_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OSError, match="exists where a folder is needed"):
        write(tmp_path / "file" / "out", "index.html")


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    write(tmp_path / "real", "index.html")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write(tmp_path / "link", "other.html")
    assert (tmp_path / "link").is_symlink()
    assert files(tmp_path / "real") == {"other.html", MANIFEST}


def test_a_link_to_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to("out")
    with pytest.raises(FileExistsError, match="out is a file; choose another folder with --out"):
        write(tmp_path / "out", "index.html")
    assert (tmp_path / "out").is_symlink()
