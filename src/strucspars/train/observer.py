"""The events of runs, and the TensorBoard log that records them. Imports torch for pictures only."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from typing_extensions import override

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from strucspars.core.checks import FloatArray

# Larger importance matrices are averaged down to this side.
LARGEST_SIDE = 128


class RunFailed(RuntimeError):
    """A run did not reach its result; the message says why."""


class RunObserver:
    """Receives the events of runs, by their folders' names and from several threads; by default, ignores them."""

    def run_started(self, run: str) -> None:
        """A run starts or resumes; its data and network are being prepared."""

    def run_ended(self, run: str, words: str) -> None:
        """A run has ended; `words` say how."""

    def stage_started(self, run: str, stage: str, *, epochs: int, steps: int, done_epochs: int) -> None:
        """A stage of training starts, or resumes after `done_epochs`."""

    def steps_done(self, run: str, *, epoch: int, step: int) -> None:
        """The epoch has reached this step; called every few steps."""

    def matrices_seen(self, run: str, matrices: Mapping[str, "FloatArray"]) -> None:
        """Importance matrices of some layers in their present orders; before the row of the epoch."""

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
    def matrices_seen(self, run: str, matrices: Mapping[str, "FloatArray"]) -> None:
        for layer, matrix in matrices.items():
            self._writer.add_image(f"importance/{layer}", _picture(matrix), self._rows + 1, dataformats="HW")

    @override
    def epoch_done(self, run: str, row: Mapping[str, Any]) -> None:
        self._rows += 1
        for key, value in row.items():
            if isinstance(value, int | float) and key != "epoch":
                self._writer.add_scalar(f"{row['stage']}/{key}", value, self._rows)
        self._writer.flush()


def _picture(matrix: "FloatArray") -> "npt.NDArray[np.uint8]":
    """Means over blocks, scaled so that the largest is 255."""
    import torch
    from torch.nn import functional

    height, width = (min(side, LARGEST_SIDE) for side in matrix.shape)
    means = functional.adaptive_avg_pool2d(torch.from_numpy(matrix)[None], (height, width))[0]
    brightest = means.max().clamp(min=torch.finfo(means.dtype).tiny)
    picture: npt.NDArray[np.uint8] = (255 * means / brightest).round().to(torch.uint8).numpy()
    return picture
