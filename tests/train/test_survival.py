"""A run that is killed again and again ends as one that never was: the same weights, plan and metrics, bit by bit."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("killed_runs.py")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("killed-runs")


@pytest.fixture(scope="module")
def findings(place: Path) -> Any:
    # Forking is for processes of one thread.
    variables = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), str(place)]
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=500, env=variables, check=False)
    assert outcome.returncode == 0, outcome.stderr
    return json.loads(outcome.stdout)


@pytest.mark.parametrize("name", ["masked", "grouped", "slimming"])
def test_a_killed_run_ends_as_the_one_that_was_left_alone(
    findings: Any, place: Path, name: str, assert_same_outcome: Callable[..., None]
) -> None:
    assert findings[name]["whole_status"] == findings[name]["status"] == 0
    assert_same_outcome(place / f"{name}-whole", place / f"{name}-killed")


def test_the_kills_came_in_both_stages_between_them_and_inside_writes(findings: Any) -> None:
    stages = Counter(findings["masked"]["killed_in"])
    assert stages.total() >= 10
    assert min(stages["sparsify"], stages["finetune"]) >= 3
    assert findings["masked"]["inside_writes"] >= 2
    for name in ("grouped", "slimming"):
        assert len(findings[name]["killed_in"]) + findings[name]["inside_writes"] >= 4


def test_a_killed_run_leaves_no_unfinished_files_behind(findings: Any, place: Path) -> None:
    assert findings["masked"]["status"] == 0
    assert not list((place / "masked-killed").rglob(".unfinished-*"))
