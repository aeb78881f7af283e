import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from threadpoolctl import threadpool_info
from torch import nn

import strucspars as ss
from strucspars.train.pipeline import run_pipeline
from strucspars.train.recipe import Recipe
from strucspars.train.solver_pool import MOST_WORKERS, default_workers, solver_pool


@pytest.fixture(scope="module")
def pool() -> Iterator[Executor]:
    with solver_pool(2) as executor:
        assert executor is not None
        yield executor


def sparsifier(executor: Executor | None) -> ss.Sparsifier:
    torch.manual_seed(0)
    widths = [8, 32, 16, 24, 64]
    layers = [nn.Conv2d(before, after, 3) for before, after in pairwise(widths)]
    config = ss.SparsifyConfig(target=0.5, epochs=9, lambda_warmup=0)
    return ss.Sparsifier(nn.Sequential(*layers), config, executor=executor)


def test_workers_learn_the_same_orders(pool: Executor) -> None:
    alone, helped = sparsifier(None), sparsifier(pool)
    for _ in range(2):
        reports = [candidate.end_epoch() for candidate in (alone, helped)]
        assert reports[0].layers == reports[1].layers
    torch.testing.assert_close(
        {name: layer["out_perm"] for name, layer in alone.state_dict()["layers"].items()},
        {name: layer["out_perm"] for name, layer in helped.state_dict()["layers"].items()},
    )
    assert alone.plan() == helped.plan()


def test_a_run_with_workers_ends_as_one_without(
    pool: Executor,
    small_recipe: Callable[..., Recipe],
    tmp_path: Path,
    assert_same_outcome: Callable[..., None],
) -> None:
    run_pipeline(small_recipe(), tmp_path / "alone")
    run_pipeline(small_recipe(), tmp_path / "helped", executor=pool)
    assert_same_outcome(tmp_path / "alone", tmp_path / "helped")


def test_dead_workers_cost_time_but_not_the_run(caplog: pytest.LogCaptureFixture) -> None:
    with solver_pool(1) as executor:
        assert executor is not None
        orphan = executor.submit(os.getpid)
        os.kill(orphan.result(), signal.SIGKILL)
        helped = sparsifier(executor)
    assert "a worker process died" in caplog.text
    assert helped.plan() == sparsifier(None).plan()


def test_a_worker_survives_ctrl_c_which_the_main_process_handles() -> None:
    with solver_pool(1) as executor:
        assert executor is not None
        worker = executor.submit(os.getpid).result()
        os.kill(worker, signal.SIGINT)
        assert executor.submit(os.getpid).result() == worker


DYING_WORKER = """
import os, signal, time
from strucspars.train.solver_pool import solver_pool
if __name__ == "__main__":
    with solver_pool(2) as pool:
        idle = 0
        while not idle:
            busy = pool.submit(time.sleep, 1)
            answered = pool.submit(os.getpid).result()
            idle = 0 if busy.done() else answered
        # It waits for work, and dies with the lock of the queue.
        os.kill(idle, signal.SIGKILL)
        print(type(busy.exception()).__name__, flush=True)
"""


def test_a_pool_whose_worker_is_killed_ends_with_its_other_workers(tmp_path: Path) -> None:
    script = tmp_path / "main.py"
    script.write_text(DYING_WORKER)
    # It would wait for its other worker forever.
    outcome = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=True)
    assert outcome.stdout == "BrokenProcessPool\n"


def test_no_workers_means_no_pool() -> None:
    with solver_pool(0) as executor:
        assert executor is None
    assert default_workers(on_gpu=False) == 0
    assert 0 <= default_workers(on_gpu=True) <= MOST_WORKERS


@pytest.mark.parametrize(("cores", "workers"), [(None, 0), (1, 0), (2, 0), (3, 1), (6, 4), (64, MOST_WORKERS)])
def test_beside_a_gpu_two_cores_are_left_to_the_training(
    cores: int | None, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert default_workers(on_gpu=True) == workers


def test_a_worker_multiplies_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "2")
    with solver_pool(1) as executor:
        assert executor is not None
        libraries = executor.submit(threadpool_info).result()
    assert {each["num_threads"] for each in libraries if each["user_api"] == "blas"} == {1}


SCRIPT = """
import os, sys
from strucspars.train.solver_pool import solver_pool
if __name__ == "__main__":
    with solver_pool(1) as pool:
        print(pool.submit(os.getpid).result(), flush=True)
        sys.stdin.read()
"""


def test_a_worker_does_not_outlive_a_killed_main_process(tmp_path: Path) -> None:
    script = tmp_path / "main.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as main:
        assert main.stdout is not None
        worker = int(main.stdout.readline())
        assert is_alive(worker)
        main.send_signal(signal.SIGKILL)
    for _ in range(200):
        if not is_alive(worker):
            return
        time.sleep(0.05)
    os.kill(worker, signal.SIGKILL)
    pytest.fail("the worker was still there after ten seconds")


def is_alive(process: int) -> bool:
    try:
        # A dead one that nobody has waited for still has a number.
        return "State:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
