"""Runs that are killed again and again until they finish, as `python killed_runs.py FOLDER`. Run by test_survival.

Every run is a forked process, so that torch is imported once for all of them, and is killed by this one from outside.
What was killed when is printed as one line of JSON.
"""

import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sklearn.datasets
import sklearn.model_selection  # noqa: F401  # imported once for all runs

from strucspars.train.observer import RunObserver
from strucspars.train.pipeline import run_pipeline
from strucspars.train.recipe_reading import read_recipe

EPOCHS = 3
STEPS = 6
HARD = (
    "model.name=small_networks:hard_to_repeat",
    "finetune.recalibrate_bn=true",
    *(f"stage{stage}.{option}" for stage in (1, 2) for option in (f"epochs={EPOCHS}", "ema=0.8")),
)
OPTIONS = {
    "masked": (*HARD, "finetune.form=masked"),
    "grouped": (*HARD, "finetune.form=grouped"),
    "slimming": (*HARD, "kind=slimming", "model.name=small_networks:slimmable"),
}
# Positions in a run count steps and ends of epochs.
FIRST_STAGE_DONE = EPOCHS * (STEPS + 1)
COMPRESSED = FIRST_STAGE_DONE + 1
FINISHED = COMPRESSED + EPOCHS * (STEPS + 1)
LONGEST_DELAY_SECONDS = 0.05
MOST_TRIES = 20


class Reporter(RunObserver):
    """Tells the process that will kill this one how far it has come, by a pipe: `stage epoch step`."""

    def __init__(self, pipe: int) -> None:
        self._pipe, self._stage = pipe, ""

    def stage_started(self, run: str, stage: str, *, epochs: int, steps: int, done_epochs: int) -> None:
        assert steps == STEPS
        self._stage = stage

    def steps_done(self, run: str, *, epoch: int, step: int) -> None:
        os.write(self._pipe, f"{self._stage} {epoch} {step}\n".encode())

    def epoch_done(self, run: str, row: Mapping[str, Any]) -> None:
        os.write(self._pipe, f"{row['stage']} {row['epoch']} {STEPS + 1}\n".encode())


@dataclass(frozen=True)
class Progress:
    """How far a run has come, and a number that grows with it."""

    stage: str
    epoch: int
    step: int

    @property
    def position(self) -> int:
        if self.stage == "compress":
            return COMPRESSED
        before = COMPRESSED if self.stage == "finetune" else 0
        return before + (self.epoch - 1) * (STEPS + 1) + self.step


class Child:
    """A run in a process of its own."""

    def __init__(self, options: tuple[str, ...], folder: Path) -> None:
        read_end, write_end = os.pipe()
        self._process = os.fork()
        if self._process == 0:
            os.close(read_end)
            _run(options, folder, write_end)
        os.close(write_end)
        self._events = os.fdopen(read_end)

    def until(self, position: int) -> Progress | None:
        """Wait until the run has come that far; None if it ended before."""
        for line in self._events:
            stage, epoch, step = line.split()
            progress = Progress(stage, int(epoch), int(step))
            if progress.position >= position:
                return progress
        return None

    def kill(self) -> bool:
        """Whether it was still alive."""
        os.kill(self._process, signal.SIGKILL)
        return self.status() == -signal.SIGKILL

    def status(self) -> int:
        """Wait for its end; its exit status."""
        self.until(FINISHED + 1)
        self._events.close()
        return os.waitstatus_to_exitcode(os.waitpid(self._process, 0)[1])


def _run(options: tuple[str, ...], folder: Path, pipe: int) -> None:
    status = 1
    try:
        run_pipeline(
            read_recipe(Path(__file__).with_name("small_recipe.yaml"), options), folder, observers=[Reporter(pipe)]
        )
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def killed_inside_a_write(options: tuple[str, ...], folder: Path) -> bool:
    """Start a run, kill it as soon as it has begun to write a checkpoint; whether the write was really cut short."""
    checkpoints = folder / "checkpoints"
    # What an earlier death has left.
    before = set(checkpoints.glob(".unfinished-*"))
    child = Child(options, folder)
    deadline = time.monotonic() + 30
    while not set(checkpoints.glob(".unfinished-*")) - before:
        if time.monotonic() > deadline:
            raise TimeoutError(f"no checkpoint was begun in {folder}")
    return child.kill() and bool(set(checkpoints.glob(".unfinished-*")) - before)


def kill_until_finished(options: tuple[str, ...], folder: Path, *, kills: int, seed: int) -> dict[str, Any]:
    """Kill a run at random moments all over both stages, twice inside a write, then let it finish."""
    generator = random.Random(seed)
    # One out of each part of the run, and one between the stages, where nothing is trained.
    targets = [generator.randint(part * FINISHED // kills + 1, (part + 1) * FINISHED // kills) for part in range(kills)]
    targets = sorted([*targets, generator.choice([FIRST_STAGE_DONE, COMPRESSED])])
    stages, inside_writes = [], 0
    for number, target in enumerate(targets):
        child = Child(options, folder)
        progress = child.until(target)
        time.sleep(generator.uniform(0, LONGEST_DELAY_SECONDS))
        if child.kill() and progress is not None:
            stages.append(progress.stage)
        if number in (kills // 4, 3 * kills // 4):
            inside_writes += any(killed_inside_a_write(options, folder) for _ in range(MOST_TRIES))
    return {"killed_in": stages, "inside_writes": inside_writes, "status": Child(options, folder).status()}


def main(place: Path) -> None:
    findings = {}
    for seed, (name, options) in enumerate(OPTIONS.items()):
        whole = Child(options, place / f"{name}-whole").status()
        kills = 12 if name == "masked" else 3
        outcome = kill_until_finished(options, place / f"{name}-killed", kills=kills, seed=seed)
        findings[name] = outcome | {"whole_status": whole}
    print(json.dumps(findings))


if __name__ == "__main__":
    # A killed process loses nothing that it has written; only a power failure does.
    os.fsync = os.fstat  # type: ignore[assignment]
    main(Path(sys.argv[1]))
