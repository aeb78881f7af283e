"""Two real processes of torchrun that are stopped, or fail: as one process would, and without traces."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

LAUNCHER = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
# Any process's output is in a file of its own: torchrun adds a report of its own to the common one.
APART = ("--log-dir", "logs", "--redirects", "3")
PATIENCE_SECONDS = 120
LOST = r"error: another process of this run has ended; .*the last checkpoint\n"
FAILING = """
import os
import signal

import torch
from tiny_networks import small
from torch import nn


class Failing(nn.Module):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.training and os.environ["RANK"] == "1":
            if os.environ.get("KILLED"):
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("cats/7.png is no image;\\n  remove it")
        return images


def failing(num_classes: int) -> nn.Module:
    return nn.Sequential(Failing(), small(num_classes))
"""


@dataclass(frozen=True)
class Rank:
    """What one of the processes has said."""

    out: str
    err: str


@dataclass(frozen=True)
class Outcome:
    """What the processes came to.

    Attributes:
        ranks: what each has said.
        report: what torchrun has.
    """

    ranks: Sequence[Rank]
    report: str


def started(networks: Path, arguments: Sequence[str]) -> subprocess.Popen[str]:
    path = os.pathsep.join((str(networks), os.environ.get("PYTHONPATH", "")))
    variables = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.Popen(
        [*LAUNCHER, *APART, "-m", "strucspars", *arguments],
        cwd=networks,
        env=os.environ | variables,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def said(networks: Path, rank: int, stream: str) -> str:
    return "".join(path.read_text() for path in networks.glob(f"logs/*/attempt_0/{rank}/{stream}.log"))


def ended(networks: Path, process: subprocess.Popen[str]) -> Outcome:
    _, report = process.communicate(timeout=PATIENCE_SECONDS)
    return Outcome(
        [Rank(*(said(networks, rank, stream) for stream in ("stdout", "stderr"))) for rank in (0, 1)], report
    )


@pytest.fixture
def arguments(tiny: tuple[str, ...]) -> list[str]:
    return ["run", "demo", *tiny, "engine.solver_workers=0"]


def test_processes_that_are_stopped_say_once_how_to_resume_together(networks: Path, arguments: list[str]) -> None:
    arguments += ["stage1.epochs=200", "--seeds", "0,1"]
    process = started(networks, arguments)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while "epoch 1/" not in said(networks, 0, "stdout"):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    first, second = ended(networks, process).ranks
    assert first.err.startswith("stopped by SIGTERM; everything so far is saved:\n  runs/demo: stopped ")
    assert "\n  runs/demo-seed1: not begun\n" in first.err
    assert first.err.endswith(f"to resume: torchrun --nproc-per-node 2 -m strucspars {' '.join(arguments)}\n")
    assert second == Rank("", "")
    assert (networks / "runs" / "demo" / "checkpoints" / "last.pt").is_file()
    assert not (networks / "runs" / "demo-seed1").exists()


def test_processes_whose_runs_diverge_go_on_to_the_next_and_say_so(networks: Path, arguments: list[str]) -> None:
    outcome = ended(networks, started(networks, [*arguments, "stage1.lr=1e18", "--seeds", "0,1", "--json", "--quiet"]))
    first, second = outcome.ranks
    assert [run["folder"] for run in json.loads(first.out)["failed"]] == ["runs/demo", "runs/demo-seed1"]
    for rank in outcome.ranks:
        assert rank.err.startswith("error: the loss became nan in epoch 1 of sparsify")
        assert rank.err.count("\n") == 1
    assert second.out == ""
    assert "exitcode  : 1" in outcome.report


def test_where_one_process_fails_in_the_middle_of_training_none_leaves_a_trace(
    networks: Path, arguments: list[str]
) -> None:
    (networks / "failing_networks.py").write_text(FAILING)
    outcome = ended(networks, started(networks, [*arguments, "model.name=failing_networks:failing", "--quiet"]))
    first, second = outcome.ranks
    assert second.err == "error: cats/7.png is no image; remove it\n"
    assert re.fullmatch(LOST, first.err)
    assert "exitcode  : 2" in outcome.report


def test_where_one_process_is_killed_the_other_says_so_in_a_sentence(
    networks: Path, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (networks / "failing_networks.py").write_text(FAILING)
    monkeypatch.setenv("KILLED", "1")
    outcome = ended(networks, started(networks, [*arguments, "model.name=failing_networks:failing", "--quiet"]))
    assert outcome.ranks[1].err == ""
    assert re.fullmatch(LOST, outcome.ranks[0].err)
    assert "Signal 9" in outcome.report
