"""The compiler for GPUs accepts all kernels, with the arguments that they run with, and keeps memory accesses wide."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

HELPERS = Path(__file__).parent.parent / "helpers"


def compiled(cache: Path) -> list[dict[str, Any]]:
    """One entry for every kernel; in another process, because this one may interpret kernels."""
    environment = os.environ | {
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(cache),
        "PYTHONPATH": os.pathsep.join([str(HELPERS), *sys.path]),
    }
    command = [sys.executable, str(HELPERS / "compiled_kernels.py")]
    outcome = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stderr
    return [json.loads(line) for line in outcome.stdout.splitlines()]


def test_everything_compiles_and_keeps_accesses_wide(tmp_path: Path) -> None:
    kernels = compiled(tmp_path)
    assert len(kernels) > 30
    assert [each for each in kernels if "error" in each] == []
    for each in kernels:
        if "pieces of 1" not in each["what"] and "kernel 5x5" not in each["what"]:
            assert each["wide copies"] + each["wide loads"] > 0, each
    stems = [each for each in kernels if each["what"].startswith("PooledStem")]
    assert stems
    assert all(each["wide copies"] > each["other copies"] for each in stems)
