"""The machine and the versions that a result was computed with."""

import os
import platform
import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from strucspars._version import __version__

_PACKAGES = ("torch", "torchvision", "numpy", "scipy", "lightning-fabric")
_RUNTIMES = ("onnx", "onnxscript", "onnxruntime", "openvino")
# The widest of these decides how fast float32 can be.
_VECTOR_UNITS = ("avx512f", "avx2", "avx", "asimd")
_PACKAGE_FOLDER = Path(__file__).resolve().parent.parent


def environment() -> dict[str, Any]:
    """The environment as plain JSON values; None for what is missing. No host, user or path is in it."""
    versions = {"strucspars": __version__, "python": platform.python_version()}
    return {
        "versions": versions | {name: _version(name) for name in _PACKAGES} | {"cuda": torch.version.cuda},
        "system": platform.system(),
        "cpu": _cpu_info("model name") or platform.processor() or None,
        "cores": os.cpu_count(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "commit": commit_of(_PACKAGE_FOLDER),
    }


def environment_after(former: Any) -> dict[str, Any]:
    """The environment of a resumed run; different ones that it was computed in before are under `earlier`."""
    now = environment()
    if not isinstance(former, dict):
        return now
    last = dict(former)
    known = last.pop("earlier", None)
    known = [*(known if isinstance(known, list) else []), last]
    earlier = [each for each in known if isinstance(each, dict) and not each.items() <= now.items()]
    return now | ({"earlier": earlier} if earlier else {})


def hardware(known: Mapping[str, Any]) -> dict[str, Any]:
    """Processor, cores and vector unit, from the environment and the processor's flags; None for what is unknown."""
    flags = (_cpu_info("flags") or _cpu_info("features") or "").split()
    unit = next((unit for unit in _VECTOR_UNITS if unit in flags), None)
    return {name: known[name] for name in ("cpu", "cores", "system")} | {"vector_unit": unit}


def versions(known: Mapping[str, Any]) -> dict[str, str | None]:
    """Versions of the environment and of the runtimes; None for what is not installed."""
    return dict(known["versions"]) | {name: _version(name) for name in _RUNTIMES}


def commit_of(package_folder: Path) -> str | None:
    """The commit of the checkout that a package is in, with '+changes' where it differs; None if installed."""
    if _git(package_folder, "rev-parse", "--show-prefix") != f"src/{package_folder.name}/":
        return None
    commit = _git(package_folder, "rev-parse", "--short=12", "HEAD")
    if not commit:
        return None
    changes = _git(package_folder, "status", "--porcelain", "--", ".")
    return commit if changes == "" else f"{commit}+changes"


def _git(folder: Path, *arguments: str) -> str | None:
    # Inside a git hook these variables point to the repository of the hook.
    variables = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    try:
        outcome = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20, env=variables)
    except (OSError, subprocess.SubprocessError):
        return None
    return outcome.stdout.strip()


def _cpu_info(entry: str) -> str | None:
    """An entry about the first processor, on Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    pairs = (line.partition(":") for line in lines)
    return next((value.strip() for key, _, value in pairs if key.strip().lower() == entry), None)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
