"""What a time depends on beside the network: processor, instruction set, and the versions of the runtimes."""

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from strucspars.runs.environment import environment

_PACKAGES = ("onnx", "onnxscript", "onnxruntime", "openvino")
# The widest of these decides how fast float32 can be.
_VECTOR_UNITS = ("avx512f", "avx2", "avx", "asimd")


def hardware() -> dict[str, Any]:
    """Processor, cores and vector unit as plain values; None for what cannot be told.

    >>> sorted(hardware())
    ['cores', 'cpu', 'system', 'vector_unit']
    """
    known = environment()
    return {name: known[name] for name in ("cpu", "cores", "system")} | {"vector_unit": _vector_unit()}


def versions() -> dict[str, str | None]:
    """Versions of everything that runs networks; None for what is not installed."""
    known: dict[str, str | None] = environment()["versions"]
    return known | {name: _version(name) for name in _PACKAGES}


def _vector_unit() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    flags = {
        flag for line in lines if line.lower().startswith(("flags", "features")) for flag in line.split(":")[-1].split()
    }
    return next((unit for unit in _VECTOR_UNITS if unit in flags), None)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
