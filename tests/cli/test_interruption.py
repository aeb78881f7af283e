"""Signals, with real processes."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import pytest

from strucspars.cli.errors import StopRequest
from strucspars.train.run import RunInterrupted

# More epochs than could pass while the signal is on its way.
LONG = ("stage1.epochs=15", "stage2.epochs=1")


def started(networks: Path, arguments: list[str]) -> subprocess.Popen[str]:
    path = os.pathsep.join((str(networks), os.environ.get("PYTHONPATH", "")))
    return subprocess.Popen(
        [sys.executable, "-m", "strucspars", *arguments],
        cwd=networks,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_first_epoch(stream: IO[str] | None) -> str:
    """What the process has printed up to the line of its first epoch."""
    assert stream is not None
    said = ""
    for line in stream:
        said += line
        if "epoch 1/" in line:
            break
    return said


@pytest.fixture
def arguments(tiny: tuple[str, ...]) -> list[str]:
    return ["run", "demo", *tiny, *LONG]


def test_a_run_that_is_stopped_says_how_to_resume_and_resumes(networks: Path, arguments: list[str], call: Any) -> None:
    process = started(networks, arguments)
    wait_for_first_epoch(process.stdout)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "stopping" in out
    assert "stopped by SIGINT; everything so far is saved" in err
    assert f"to resume: python -m strucspars {' '.join(arguments)}\n" in err
    assert "\x1b" not in out + err

    again = call(*arguments)
    assert again.status == 0
    assert "resuming in runs/demo: sparsify, epoch" in again.out
    assert "epoch 1/15" not in again.out
    assert "saved network" in again.out


def test_a_polite_kill_is_heard_by_several_runs_and_those_that_failed_before_are_named(
    networks: Path, arguments: list[str]
) -> None:
    (networks / "runs" / "demo-seed1").mkdir(parents=True)
    (networks / "runs" / "demo-seed1" / "thesis.tex").write_text("mine")
    process = started(networks, [*arguments, "--seeds", "1,0,2,3", "--jobs", "2", "--json"])
    wait_for_first_epoch(process.stderr)
    process.terminate()
    out, err = process.communicate(timeout=60)
    assert process.returncode == 143
    assert out == ""
    assert "runs/demo: stopped in epoch" in err or "runs/demo: stopped after epoch" in err
    assert "runs/demo-seed3: not begun" in err
    assert "runs/demo-seed1 failed before: runs/demo-seed1" in err


def test_a_process_that_stops_because_another_was_signalled_has_a_status_too(
    call: Any, tiny: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(recipes: Mapping[Path, object], **options: object) -> dict[Path, Exception]:
        return {path: RunInterrupted("stopped after epoch 1 of sparsify") for path in recipes}

    monkeypatch.setattr("strucspars.train.side_by_side.run_side_by_side", stopped)
    said = call("run", "demo", *tiny)
    assert said.status == 143
    assert "stopped by SIGTERM; everything so far is saved:\n  runs/demo: stopped after epoch 1" in said.err


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_ends_the_process_at_once(second: signal.Signals) -> None:
    code = (
        "import os, signal, time\n"
        "from strucspars.cli.errors import StopRequest\n"
        "with StopRequest() as stop:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    assert stop()\n"
        "    print('heard', flush=True)\n"
        f"    os.kill(os.getpid(), {second:d})\n"
        "    time.sleep(60)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout == "heard\n"
    assert done.returncode == -second


def test_a_signal_that_comes_twice_at_once_is_one_request() -> None:
    code = (
        "import time\n"
        "from strucspars.cli.errors import StopRequest\n"
        "with StopRequest() as stop:\n"
        "    print('ready', flush=True)\n"
        "    while not stop():\n"
        "        time.sleep(0.001)\n"
        "    time.sleep(0.5)\n"
        "    print('tidied up', flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=60)
    assert (rest, process.returncode) == ("tidied up\n", 0)


@pytest.fixture
def own_handler() -> Iterator[list[int]]:
    calls: list[int] = []
    former = signal.signal(signal.SIGTERM, lambda number, frame: calls.append(number))
    yield calls
    signal.signal(signal.SIGTERM, former)


def test_former_handlers_are_back_afterwards(own_handler: list[int]) -> None:
    with StopRequest() as stop:
        assert not stop()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop()
        assert stop.signal_number == signal.SIGTERM
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(0.01)
    assert own_handler == [signal.SIGTERM]


def test_a_signal_shows_the_cursor_of_a_terminal_again(monkeypatch: pytest.MonkeyPatch) -> None:
    screen, terminal = os.openpty()
    with os.fdopen(screen, "rb", buffering=0) as shown, os.fdopen(terminal, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop()
        stderr.write("\n")  # else a cursor that is not shown would be waited for
        stderr.flush()
        assert shown.read(100).startswith(b"\x1b[?25h")


def test_only_what_failed_is_said_to_have_failed(
    call: Any, tiny: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(recipes: Mapping[Path, object], **options: object) -> dict[Path, Exception]:
        failed, interrupted = recipes
        return {failed: ValueError("no image"), interrupted: RunInterrupted("stopped after epoch 1 of sparsify")}

    monkeypatch.setattr("strucspars.train.side_by_side.run_side_by_side", stopped)
    said = call("run", "demo", *tiny, "--seeds", "0,1")
    assert said.err.count("failed before") == 1
    assert "runs/demo failed before: no image" in said.err
