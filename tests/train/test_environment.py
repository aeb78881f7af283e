import getpass
import json
import os
import platform
import socket
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

import strucspars as ss
from strucspars.bench import machine as module
from strucspars.bench.machine import commit_of, environment, environment_after


def test_versions_and_hardware_are_said() -> None:
    found = environment()
    assert found["versions"]["strucspars"] == ss.__version__
    assert found["versions"]["numpy"] == np.__version__
    assert found["versions"]["python"] == platform.python_version()
    assert set(found["versions"]) >= {"torch", "torchvision", "scipy", "lightning-fabric"}
    assert found["cores"] == os.cpu_count()
    assert found["system"] == platform.system()


def test_every_other_environment_of_before_is_kept_once() -> None:
    here = environment()
    there, elsewhere = here | {"device": "another GPU"}, here | {"cores": 1000}
    assert environment_after(here) == environment_after(None) == here
    assert environment_after(there | {"earlier": [here, elsewhere]}) == here | {"earlier": [elsewhere, there]}
    assert environment_after(here | {"earlier": [there]}) == here | {"earlier": [there]}


def test_what_others_noted_about_before_is_kept_and_what_an_older_version_did_not_know_is_no_difference() -> None:
    here = environment()
    noted = here | {"gpu_minutes": 6.7}
    assert environment_after(noted) == here | {"earlier": [noted]}
    assert environment_after({"cores": here["cores"]}) == here


@pytest.mark.parametrize("former", [[], "a GPU", {"earlier": None}, {"earlier": 3}, {"earlier": ["a GPU", 3, {}]}, {}])
def test_a_file_that_says_nothing_about_before_does_no_harm(former: object) -> None:
    assert environment_after(former) == environment()


def test_it_is_plain_json() -> None:
    found = environment()
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_it_names_no_host_user_or_path() -> None:
    text = json.dumps(environment())
    assert str(Path(ss.__file__).parent) not in text
    assert str(Path.home()) not in text.replace("\\/", "/") or str(Path.home()) == "/"
    # Short names could be part of any word.
    for private in (socket.gethostname(), getpass.getuser()):
        assert len(private) < 5 or private not in text
    assert "/" not in text.replace(str(environment()["cpu"]), "").replace(str(environment()["device"]), "")


def test_a_missing_package_and_a_missing_gpu_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PACKAGES", ("no-such-package",))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = environment()
    assert found["versions"]["no-such-package"] is None
    assert found["device"] is None


def test_the_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
    assert environment()["device"] == "Some GPU"


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=nobody", "-c", "user.email=nobody@example.org", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    package = tmp_path / "src" / "strucspars"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    return package


def test_a_checkout_gives_its_commit_and_marks_changes_of_the_package(checkout: Path) -> None:
    commit = git(checkout, "rev-parse", "--short=12", "HEAD")
    assert commit_of(checkout) == commit
    (checkout.parent / "results.json").write_text("{}")
    assert commit_of(checkout) == commit
    (checkout / "new.py").write_text("")
    assert commit_of(checkout) == f"{commit}+changes"


def test_variables_of_a_git_hook_do_not_mislead(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = commit_of(checkout)
    monkeypatch.setenv("GIT_DIR", str(checkout / "nowhere"))
    assert commit_of(checkout) == commit


def test_a_package_installed_inside_a_foreign_repository_has_no_commit(checkout: Path) -> None:
    installed = checkout.parent.parent / ".venv" / "lib" / "strucspars"
    installed.mkdir(parents=True)
    assert commit_of(installed) is None


def test_without_git_or_without_a_repository_there_is_no_commit(
    checkout: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert commit_of(tmp_path_factory.mktemp("plain")) is None
    monkeypatch.setenv("PATH", str(checkout))
    assert commit_of(checkout) is None


def test_a_repository_without_a_commit_has_none(checkout: Path) -> None:
    git(checkout, "update-ref", "-d", "HEAD")
    assert commit_of(checkout) is None


def test_where_git_cannot_tell_changes_there_may_be_some(checkout: Path) -> None:
    commit = commit_of(checkout)
    (checkout.parent.parent / ".git" / "index").write_bytes(b"damaged")
    assert commit_of(checkout) == f"{commit}+changes"


def test_asking_for_the_commit_leaves_the_repository_alone(checkout: Path) -> None:
    index = checkout.parent.parent / ".git" / "index"
    before = index.read_bytes()
    # Git would note the new date.
    os.utime(checkout / "__init__.py", (10**9, 10**9))
    commit_of(checkout)
    assert index.read_bytes() == before


@pytest.mark.parametrize(
    ("text", "processor", "expected"),
    [
        ("processor\t: 0\nmodel name\t: Some CPU: fast\nmodel name\t: Other CPU\n", "x86_64", "Some CPU: fast"),
        ("processor\t: 0\nCPU part\t: 0xd0c\n", "aarch64", "aarch64"),
        ("processor\t: 0\nCPU part\t: 0xd0c\n", "", None),
        (None, "arm", "arm"),
        (None, "", None),
    ],
)
def test_the_processor_is_named_where_the_system_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, processor: str, expected: str | None
) -> None:
    if text is not None:
        (tmp_path / "cpuinfo").write_text(text)
    monkeypatch.setattr(module, "Path", lambda _: tmp_path / "cpuinfo")
    monkeypatch.setattr(platform, "processor", lambda: processor)
    assert environment()["cpu"] == expected
