"""Runs as they go: a line each that moves, or a line per epoch where nothing can move."""

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from strucspars.core.checks import FloatArray

# Often enough for the eye; on a CPU every step reports.
SECONDS_BETWEEN_UPDATES = 0.1
BAR_WIDTH = 10
# Below, the numbers need all the room there is.
WIDTH_FOR_BARS = 110


@dataclass
class _Line:
    """What is known of a run that goes on.

    Attributes:
        task: its place on the display; None where there is none.
        start: time and step since when the steps are counted; None before the first one.
        row: of the last epoch.
    """

    run: str
    task: TaskID | None
    stage: str = ""
    epochs: int = 1
    steps: int = 1
    start: tuple[float, int] | None = None
    updated: float = 0.0
    row: Mapping[str, Any] = field(default_factory=dict)

    def pace(self, position: int) -> tuple[float, float] | None:
        """Steps per second, and seconds to the end of the stage; None if it cannot be known yet."""
        now = time.perf_counter()
        if self.start is None:
            self.start = (now, position)
        elapsed, done = now - self.start[0], position - self.start[1]
        if done <= 0 or elapsed <= 0:
            return None
        return done / elapsed, (self.epochs * self.steps - position) * elapsed / done


class RunProgress:
    """Shows what runs tell, from any number of threads. Enter it as a context.

    Args:
        console: where; it decides whether lines can move.
        quiet: show nothing.
    """

    def __init__(self, console: Console, *, quiet: bool = False) -> None:
        self._console, self._quiet = console, quiet
        # The main thread may come here while it is here already: signals are handled between any two instructions.
        self._lock = threading.RLock()
        self._lines: dict[str, _Line] = {}
        self._is_stopping = False
        self._has_bars = console.width >= WIDTH_FOR_BARS
        self._display: Progress | None = None
        if console.is_interactive and not quiet:
            bar = [BarColumn(bar_width=BAR_WIDTH)] if self._has_bars else []
            self._display = Progress(*bar, TextColumn("{task.description}"), console=console, transient=True)

    def __enter__(self) -> "RunProgress":
        if self._display is not None:
            self._display.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._display is not None:
            self._display.stop()

    def run_started(self, run: str) -> None:
        """A run begins: its data and network are being prepared."""
        with self._lock:
            task = None
            if self._display is not None:
                task = self._display.add_task(f"{run}  preparing", total=None)
            self._lines[run] = _Line(run, task)

    def run_ended(self, run: str, words: str) -> None:
        """A run is over, one way or the other; its line gives way to a last word, if there is one."""
        with self._lock:
            line = self._lines.pop(run)
            if self._display is not None and line.task is not None:
                self._display.remove_task(line.task)
            if words:
                self._say(f"{run}: {words}")

    def stopping(self) -> None:
        """Say once that a request to stop has been heard."""
        with self._lock:
            if not self._is_stopping:
                self._is_stopping = True
                self._say("stopping: the state is being saved; once more aborts at once")

    def stage_started(self, run: str, stage: str, *, epochs: int, steps: int, done_epochs: int) -> None:
        """A stage begins, or goes on."""
        with self._lock:
            line = self._lines[run]
            line.stage, line.epochs, line.steps, line.start, line.row = stage, epochs, steps, None, {}
            if done_epochs:
                self._say(f"{run}: {stage} goes on after epoch {done_epochs} of {epochs}")
            self._show(line, done_epochs * steps, done_epochs, None)

    def steps_done(self, run: str, *, epoch: int, step: int) -> None:
        """Some steps more."""
        with self._lock:
            line = self._lines[run]
            now = time.perf_counter()
            if line.start is None or now - line.updated >= SECONDS_BETWEEN_UPDATES:
                line.updated = now
                position = (epoch - 1) * line.steps + step
                self._show(line, position, epoch, line.pace(position))

    def matrices_seen(self, run: str, matrices: Mapping[str, FloatArray]) -> None:
        """Nothing that a line of text could show."""

    def epoch_done(self, run: str, row: Mapping[str, Any]) -> None:
        """An epoch more, or the compression."""
        with self._lock:
            line = self._lines[run]
            if row["stage"] != line.stage:
                self._say(f"{run}: {_compression_words(row)}")
                return
            line.row = row
            position = row["epoch"] * line.steps
            self._show(line, position, row["epoch"], line.pace(position))
            if self._display is None:
                speed = line.steps / row["train_seconds"] if row["train_seconds"] > 0 else 0.0
                numbers = "  ".join([f"epoch {row['epoch']}/{line.epochs}", *_numbers(row), f"{speed:.0f} steps/s"])
                self._say(f"{run}  {line.stage}  {numbers}")

    def _say(self, text: str) -> None:
        if not self._quiet:
            self._console.print(text, markup=False, soft_wrap=True)

    def _show(self, line: _Line, position: int, epoch: int, pace: tuple[float, float] | None) -> None:
        if self._display is None or line.task is None:
            return
        words = [line.run, line.stage, f"epoch {epoch}/{line.epochs}"]
        if pace is not None:
            words += [f"{pace[0]:.0f} steps/s", f"{_clock(pace[1])} left"]
        room = self._console.width - (BAR_WIDTH + 1 if self._has_bars else 0)
        self._display.update(
            line.task,
            total=line.epochs * line.steps,
            completed=position,
            description=_fitted([*words, *_numbers(line.row)], room),
        )


def _numbers(row: Mapping[str, Any]) -> list[str]:
    """The numbers of an epoch that it has."""
    formats = {
        "train_loss": "loss {:.3f}",
        "test_top1": "acc {:.2%}",
        "removed_fraction": "removed {:.1%}",
        "lambda": "lambda {:.1e}",
    }
    return [text.format(row[key]) for key, text in formats.items() if key in row]


def _fitted(words: list[str], width: int) -> str:
    """As many of the words as there is room for."""
    while len("  ".join(words)) > width and len(words) > 1:
        words = words[:-1]
    return "  ".join(words)


def _compression_words(row: Mapping[str, Any]) -> str:
    removed = "channels" if "removed_channel_fraction" in row else "parameters"
    fraction = row.get("removed_channel_fraction", row.get("removed_param_fraction"))
    what = "compressed" if fraction is None else f"compressed, {fraction:.1%} of the {removed} removed"
    return f"{what}: accuracy {row['before_top1']:.2%} before, {row['test_top1']:.2%} after"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"
