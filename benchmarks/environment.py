"""What a measurement must say about itself: command, commit, hardware and versions."""

import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def describe(packages: Sequence[str]) -> dict[str, object]:
    """The environment of this run as plain JSON values."""
    return {
        "command": " ".join(["python", Path(sys.argv[0]).resolve().relative_to(ROOT).as_posix(), *_arguments()]),
        "commit": _commit(),
        "hardware": {"cpu": _cpu_model(), "cores": os.cpu_count(), "system": platform.system()},
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in packages},
    }


def _arguments() -> list[str]:
    """The command's arguments without the place of the output, which may name a folder of this machine."""
    arguments = sys.argv[1:]
    if "--out" in arguments:
        place = arguments.index("--out")
        del arguments[place : place + 2]
    return arguments


def _commit() -> str:
    """The commit that was measured, with a mark where the tree holds uncommitted changes, old results aside.

    On a machine that has the files without their history, or with a part of it, the variable COMMIT says it.
    """
    if "COMMIT" in os.environ:
        return os.environ["COMMIT"]
    commit = _git("rev-parse", "--short=12", "HEAD")
    if not commit:
        return "unknown"
    changes = _git("status", "--porcelain", "--", ".", ":(exclude)results")
    return f"{commit}+changes" if changes else commit


def _git(*arguments: str) -> str:
    outcome = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    return outcome.stdout.strip()


def _cpu_model() -> str:
    """The processor's name with its instruction set, which virtual machines often hide in the name alone."""
    try:
        info = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    fields = dict(line.split(":", 1) for line in info if ":" in line)
    names = {key.strip(): value.strip() for key, value in fields.items()}
    vector = "AVX-512" if "avx512f" in names.get("flags", "").split() else "no AVX-512"
    return f"{names.get('model name', 'unknown')} (family {names.get('cpu family')}, {vector})"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
