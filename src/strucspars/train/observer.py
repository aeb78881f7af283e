"""The events of runs, and the TensorBoard log that writes them down."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from typing_extensions import override


class RunFailed(RuntimeError):
    """A run did not reach its result; the message says why."""


class RunObserver:
    """Receives the events of runs, in order; a subclass ignores those it does not define.

    Several runs may share one observer, each under the name of its folder and from a thread of its own.
    """

    def run_started(self, run: str) -> None:
        """A run starts or resumes; its data and network are being prepared."""

    def run_ended(self, run: str, words: str) -> None:
        """A run has ended, in the way that `words` say."""

    def stage_started(self, run: str, stage: str, *, epochs: int, steps: int, done_epochs: int) -> None:
        """A stage of training starts, or resumes after `done_epochs`."""

    def steps_done(self, run: str, *, epoch: int, step: int) -> None:
        """The epoch has reached this step; called every few steps."""

    def epoch_done(self, run: str, row: Mapping[str, Any]) -> None:
        """An epoch is over; `row` is its line of `metrics.jsonl`."""


@final
class TensorBoardLog(RunObserver):
    """Writes the numbers of every epoch; the epochs of all stages share one axis, in the order they ran."""

    def __init__(self, folder: Path, *, done_rows: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Hides what a killed run wrote after its last checkpoint.
        self._writer = SummaryWriter(str(folder), purge_step=done_rows + 1)
        self._rows = done_rows

    def close(self) -> None:
        """Write what is left and close the file."""
        self._writer.close()

    @override
    def epoch_done(self, run: str, row: Mapping[str, Any]) -> None:
        self._rows += 1
        for key, value in row.items():
            if isinstance(value, int | float) and key != "epoch":
                self._writer.add_scalar(f"{row['stage']}/{key}", value, self._rows)
        self._writer.flush()
