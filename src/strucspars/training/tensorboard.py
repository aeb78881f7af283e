"""The metrics as TensorBoard events, live."""

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional
from torch.utils.tensorboard import SummaryWriter

from strucspars.core.arrays import FloatArray
from strucspars.training.observer import Silence

LARGEST_SIDE = 128


class TensorBoardLog(Silence):
    """Writes the numbers of every epoch; epochs of all stages stand on one axis, in the order they ran."""

    def __init__(self, folder: Path, *, done_rows: int) -> None:
        # What a killed run wrote beyond its last checkpoint is hidden.
        self._writer = SummaryWriter(str(folder), purge_step=done_rows + 1)
        self._rows = done_rows

    def __enter__(self) -> "TensorBoardLog":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.close()

    def matrices_seen(self, run: str, matrices: Mapping[str, FloatArray]) -> None:
        """Write pictures of the matrices, each as bright as its brightest entry."""
        for layer, matrix in matrices.items():
            self._writer.add_image(f"importance/{layer}", _picture(matrix), self._rows + 1, dataformats="HW")

    def epoch_done(self, run: str, row: Mapping[str, Any]) -> None:
        """Write one row of the metrics."""
        self._rows += 1
        for key, value in row.items():
            if isinstance(value, int | float) and key != "epoch":
                self._writer.add_scalar(f"{row['stage']}/{key}", value, self._rows)
        self._writer.flush()


def _picture(matrix: FloatArray) -> npt.NDArray[np.uint8]:
    """Means over blocks, from 0 to 255."""
    height, width = (min(side, LARGEST_SIDE) for side in matrix.shape)
    means = functional.adaptive_avg_pool2d(torch.from_numpy(matrix)[None], (height, width))[0]
    brightest = means.max().clamp(min=torch.finfo(means.dtype).tiny)
    picture: npt.NDArray[np.uint8] = (255 * means / brightest).round().to(torch.uint8).numpy()
    return picture
