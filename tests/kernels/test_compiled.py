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


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """One entry for every kernel; in another process, because this one may interpret kernels."""
    environment = os.environ | {
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")),
        "PYTHONPATH": os.pathsep.join([str(HELPERS), *sys.path]),
    }
    command = [sys.executable, str(HELPERS / "compiled_kernels.py")]
    outcome = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stderr
    return [json.loads(line) for line in outcome.stdout.splitlines()]


def test_everything_compiles(compiled: list[dict[str, Any]]) -> None:
    assert len(compiled) > 30
    assert [each for each in compiled if "error" in each] == []


def test_pieces_are_read_in_wide_accesses(compiled: list[dict[str, Any]]) -> None:
    for each in compiled:
        if "pieces of 1" not in each["what"] and "kernel 5x5" not in each["what"]:
            assert each["wide copies"] + each["wide loads"] > 0, each


def test_padded_pixels_are_read_in_wide_accesses(compiled: list[dict[str, Any]]) -> None:
    stems = [each for each in compiled if each["what"].startswith("PooledStem")]
    assert stems
    assert all(each["wide copies"] > each["other copies"] for each in stems)
