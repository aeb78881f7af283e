"""What a run tells whoever watches it. The pipeline itself prints nothing."""

from collections.abc import Mapping
from typing import Any, Protocol

from strucspars.core.arrays import FloatArray


class Observer(Protocol):
    """Gets told what happens, in the order in which it happens.

    Several runs may share one, each under the name of its folder, and each from a thread of its own.
    """

    def run_started(self, run: str) -> None:
        """A run begins, or goes on: its data and network are being prepared."""

    def run_ended(self, run: str, words: str) -> None:
        """A run is over, one way or another, in words; empty if it was over before."""

    def stage_started(self, run: str, stage: str, *, epochs: int, steps: int, done_epochs: int) -> None:
        """A stage of training begins, or goes on after `done_epochs`."""

    def steps_done(self, run: str, *, epoch: int, step: int) -> None:
        """The present epoch has come to this step; called every some steps."""

    def matrices_seen(self, run: str, matrices: Mapping[str, FloatArray]) -> None:
        """How the importance matrices of some layers look in their present orders; before the row of the epoch."""

    def epoch_done(self, run: str, row: Mapping[str, Any]) -> None:
        """An epoch is over; the row is what `metrics.jsonl` got."""


class Silence:
    """Watches, and says nothing."""

    def run_started(self, run: str) -> None:
        """Say nothing."""

    def run_ended(self, run: str, words: str) -> None:
        """Say nothing."""

    def stage_started(self, run: str, stage: str, *, epochs: int, steps: int, done_epochs: int) -> None:
        """Say nothing."""

    def steps_done(self, run: str, *, epoch: int, step: int) -> None:
        """Say nothing."""

    def matrices_seen(self, run: str, matrices: Mapping[str, FloatArray]) -> None:
        """Say nothing."""

    def epoch_done(self, run: str, row: Mapping[str, Any]) -> None:
        """Say nothing."""


class Several:
    """Passes everything on to several observers."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    def run_started(self, run: str) -> None:
        """Pass it on."""
        for observer in self._observers:
            observer.run_started(run)

    def run_ended(self, run: str, words: str) -> None:
        """Pass it on."""
        for observer in self._observers:
            observer.run_ended(run, words)

    def stage_started(self, run: str, stage: str, *, epochs: int, steps: int, done_epochs: int) -> None:
        """Pass it on."""
        for observer in self._observers:
            observer.stage_started(run, stage, epochs=epochs, steps=steps, done_epochs=done_epochs)

    def steps_done(self, run: str, *, epoch: int, step: int) -> None:
        """Pass it on."""
        for observer in self._observers:
            observer.steps_done(run, epoch=epoch, step=step)

    def matrices_seen(self, run: str, matrices: Mapping[str, FloatArray]) -> None:
        """Pass it on."""
        for observer in self._observers:
            observer.matrices_seen(run, matrices)

    def epoch_done(self, run: str, row: Mapping[str, Any]) -> None:
        """Pass it on."""
        for observer in self._observers:
            observer.epoch_done(run, row)
