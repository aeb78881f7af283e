import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> Any:
    script = Path(__file__).with_name("dying_processes.py")
    command = [sys.executable, str(script), str(tmp_path_factory.mktemp("runs"))]
    variables = os.environ | {"OMP_NUM_THREADS": "1"}  # forking is for processes of one thread
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=300, env=variables, check=False)
    assert outcome.returncode == 0, outcome.stderr
    return json.loads(outcome.stdout)


@pytest.mark.parametrize("scenario", ["every_step", "every_step_without_links"])
def test_death_at_any_step_of_a_save_leaves_the_old_or_the_new_checkpoint(findings: Any, scenario: str) -> None:
    found = findings[scenario]
    assert len(found["epochs"]) > 6
    for death, epoch in enumerate(found["epochs"]):
        assert epoch in (2 * death, 2 * death + 1), "neither the checkpoint before nor the one that was being written"
    assert found["epochs"][0] == 0
    assert found["epochs"][-1] % 2 == 1
    assert found["status"] == 0
    assert found["names"] == ["last.pt", "previous.pt"]


def test_death_at_random_moments_never_loses_a_checkpoint(findings: Any) -> None:
    found = findings["random_moments"]
    assert len(found["epochs"]) >= 10
    assert found["inside_writes"] >= 3
    assert found["epochs"] == sorted(found["epochs"])
    assert 0 < found["epochs"][-1] <= found["rows"][-1]
    # A row is on the disk before its checkpoint; a process writes again at most what the one before it had begun.
    assert set(range(1, found["epochs"][-1] + 1)) <= set(found["rows"])
    assert all(later - earlier in (0, 1) for earlier, later in pairwise(found["rows"]))


def test_a_write_that_the_system_refuses_keeps_what_was_there(findings: Any) -> None:
    found = findings["limited_file_size"]
    assert found["kept"] == {"epoch": 1, "rows": [{"epoch": 1}]}
    assert found["names"] == ["last.pt", "metrics.jsonl"]
    checkpoint, row = found["messages"]
    remedy = "File too large; what was there is kept; raise the limit on the size of files (ulimit -f)"
    assert f"last.pt: {remedy}" in checkpoint
    assert f"metrics.jsonl: {remedy}" in row
    assert found["later"] == 2


def test_a_killed_processs_lock_is_free_at_once_even_if_its_workers_live_on(findings: Any) -> None:
    assert findings["orphaned_worker"] == {"before": False, "after": True}


def test_a_forked_process_may_leave_the_locked_block(findings: Any) -> None:
    assert findings["child_leaves_the_block"] == {"status": 0, "free": True}
