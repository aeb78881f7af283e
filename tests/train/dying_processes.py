"""Processes that die while they write a run folder, as `python dying_processes.py FOLDER`.

Each scenario forks the process that dies, so that torch is imported once for all deaths, and prints what the survivor
finds as one line of JSON.
"""

import errno
import json
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from strucspars.train.checkpoint import load_checkpoint, save_checkpoint
from strucspars.train.run_folder import RunFolder, RunFolderBusy

STEPS = ("fsync", "link", "replace", "unlink", "open")


def state(epoch: int, size: int = 1000) -> dict[str, Any]:
    return {"epoch": epoch, "weights": torch.full((size,), epoch)}


def in_child(work: Callable[[], None]) -> int:
    """Run the work in a forked process; its number."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(1)
    return child


def consistent_epoch(folder: Path) -> int | None:
    """The epoch of the checkpoint in the folder, -1 where its parts do not belong together."""
    found = load_checkpoint(folder)
    if found is None:
        return None
    return int(found["epoch"]) if bool((found["weights"] == found["epoch"]).all()) else -1


def die_at(fatal_call: int) -> None:
    """Make this process kill itself at its n-th call of any step that changes or synchronises files."""
    calls = 0

    def fatal(step: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            if calls == fatal_call:
                os.kill(os.getpid(), signal.SIGKILL)
            calls += 1
            return step(*arguments, **options)

        return call

    for name in STEPS:
        setattr(os, name, fatal(getattr(os, name)))


def every_step(folder: Path) -> dict[str, Any]:
    """Die at each step of a save, from the first to the one after the last; the next save follows each time."""
    epochs = []
    save_checkpoint(folder, state(-1))
    save_checkpoint(folder, state(0))
    for fatal_call in range(100):

        def die_saving(fatal_call: int = fatal_call) -> None:
            die_at(fatal_call)
            save_checkpoint(folder, state(2 * fatal_call + 1))
            os._exit(0)

        _, status = os.waitpid(in_child(die_saving), 0)
        epochs.append(consistent_epoch(folder))
        if not os.WIFSIGNALED(status):
            # What the deaths have left goes when the next run begins.
            names = sorted(path.name for path in folder.iterdir() if not path.name.startswith(".unfinished-"))
            return {"epochs": epochs, "status": status, "names": names}
        save_checkpoint(folder, state(2 * fatal_call + 2))
    raise RuntimeError("the save never ended")


def every_step_without_links(folder: Path) -> dict[str, Any]:
    """The same where the file system has no hard links."""

    def refuse(*arguments: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    with mock.patch("os.link", refuse):
        return every_step(folder)


def random_moments(folder: Path) -> dict[str, Any]:
    """Die at random moments of an endless loop of rows and checkpoints; each process goes on from the last one's."""
    generator = random.Random(0)
    epochs: list[int] = []
    inside_writes = 0

    def train() -> None:
        epoch = consistent_epoch(folder) or 0
        while True:
            epoch += 1
            RunFolder(folder).append_metrics({"epoch": epoch})
            save_checkpoint(folder, state(epoch, size=300_000))

    while len(epochs) < 10 or (inside_writes < 3 and len(epochs) < 200):
        wanted = len(RunFolder(folder).metrics()) + generator.randint(1, 3)
        child = in_child(train)
        while len(RunFolder(folder).metrics()) < wanted:
            time.sleep(0.001)
        time.sleep(generator.uniform(0, 0.02))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        inside_writes += any(folder.glob(".unfinished-*"))
        epochs.append(consistent_epoch(folder) or 0)
    return {
        "epochs": epochs,
        "inside_writes": inside_writes,
        "rows": [row["epoch"] for row in RunFolder(folder).metrics()],
    }


def limited_file_size(folder: Path) -> dict[str, Any]:
    """Write more than the system lets a file grow to, as on a full disk; then again without the limit."""
    save_checkpoint(folder, state(1))
    RunFolder(folder).append_metrics({"epoch": 1})
    rows = (folder / "metrics.jsonl").stat().st_size
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    messages = []
    writes: list[tuple[int, Callable[[], None]]] = [
        (100_000, lambda: save_checkpoint(folder, state(2, size=300_000))),
        (rows + 5, lambda: RunFolder(folder).append_metrics({"epoch": 2})),
    ]
    for limit, write in writes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        try:
            write()
        except OSError as error:
            messages.append(str(error))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    kept = {"epoch": consistent_epoch(folder), "rows": RunFolder(folder).metrics()}
    names = sorted(path.name for path in folder.iterdir())
    save_checkpoint(folder, state(2, size=300_000))
    return {"messages": messages, "kept": kept, "names": names, "later": consistent_epoch(folder)}


def orphaned_worker(folder: Path) -> dict[str, Any]:
    """Die with the lock held and a forked worker that lives on, as the workers of a data loader do for a while."""
    read_end, write_end = os.pipe()

    def hold() -> None:
        with RunFolder(folder).locked():
            worker = in_child(lambda: time.sleep(60))
            os.write(write_end, f"{worker}\n".encode())
            time.sleep(60)

    child = in_child(hold)
    worker = int(os.read(read_end, 20))
    before = is_free(folder)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    after = is_free(folder)
    os.kill(worker, signal.SIGKILL)
    return {"before": before, "after": after}


def is_free(folder: Path) -> bool:
    try:
        with RunFolder(folder).locked():
            return True
    except RunFolderBusy:
        return False


def child_leaves_the_block(folder: Path) -> dict[str, Any]:
    """A forked process that comes to the end of the block takes neither the lock nor a descriptor with it."""
    with RunFolder(folder).locked():
        child = os.fork()
    if child == 0:
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return {"status": status, "free": is_free(folder)}


if __name__ == "__main__":
    scenarios = [
        every_step,
        every_step_without_links,
        random_moments,
        limited_file_size,
        orphaned_worker,
        child_leaves_the_block,
    ]
    findings = {}
    for scenario in scenarios:
        place = Path(sys.argv[1], scenario.__name__)
        place.mkdir()
        findings[scenario.__name__] = scenario(place)
    print(json.dumps(findings))
