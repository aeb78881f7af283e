"""The metrics as TensorBoard events, live."""

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from strucspars.training.observer import Silence


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

    def epoch_done(self, run: str, row: Mapping[str, Any]) -> None:
        """Write one row of the metrics."""
        self._rows += 1
        for key, value in row.items():
            if isinstance(value, int | float) and key != "epoch":
                self._writer.add_scalar(f"{row['stage']}/{key}", value, self._rows)
        self._writer.flush()
