"""What all commands share: options, shell completion, output, progress, and the check that a file can be written."""

import json
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text
from typing_extensions import override

from strucspars.train.observer import RunObserver

ImageShape = tuple[int, int, int]


def complete_recipe(incomplete: str) -> list[str]:
    """Recipes of the package."""
    names = (entry.name for entry in (files("strucspars") / "recipes").iterdir())
    return _beginning((name.removesuffix(".yaml") for name in names if not name.startswith("_")), incomplete)


def complete_key(incomplete: str) -> list[str]:
    """Keys of a recipe, such as `stage1.epochs=`."""
    # From a file: the dataclasses would import torch. A test keeps the file up to date.
    keys = (files("strucspars") / "recipes" / "_keys.txt").read_text(encoding="utf-8").split()
    return _beginning((f"{key}=" for key in keys), incomplete)


def complete_model(incomplete: str) -> list[str]:
    """Networks by name: ours, torchvision's classifiers, and `timm:` with those of timm."""
    if incomplete.startswith("timm:"):
        return _beginning((f"timm:{name}" for name in _registered("timm", "**/*.py")), incomplete)
    ours = ("preact-resnet20", "preact-resnet56", "preact-resnet110", "cifar-resnet20", "cifar-resnet56", "timm:")
    return _beginning((*ours, *_registered("torchvision", "*.py")), incomplete)


def _registered(package: str, pattern: str) -> set[str]:
    """Models that a package registers, read from its source because importing it takes seconds."""
    spec = find_spec(package)
    folder = Path(spec.origin).parent / "models" if spec and spec.origin else Path("nowhere")
    registration = re.compile(r"^@register_model\(?.*\)?\n(?:@.*\n)*def (\w+)", re.MULTILINE)
    return {name for file in folder.glob(pattern) for name in registration.findall(file.read_text(encoding="utf-8"))}


def _beginning(names: Iterable[str], incomplete: str) -> list[str]:
    return sorted(name for name in names if name.startswith(incomplete))


def from_home(path: Path | None) -> Path | None:
    """A path with its `~` resolved: shells do not expand it in `--out=~/runs`."""
    return None if path is None else path.expanduser()


def parse_seeds(text: str | None) -> list[int] | None:
    """Seeds from a comma-separated list, without duplicates; None for none.

    >>> parse_seeds("0, 1,2,2")
    [0, 1, 2]
    """
    if text is None:
        return None
    if re.fullmatch(r"\s*[0-9]+\s*(,\s*[0-9]+\s*)*", text, re.ASCII) is None:
        raise ValueError(f"--seeds must be whole numbers separated by commas, such as 0,1,2; got {text!r}")
    return list(dict.fromkeys(int(part) for part in text.split(",")))


def parse_image_shape(text: str | None) -> ImageShape | None:
    """Channels, height and width; None for none.

    >>> parse_image_shape("3x32x32")
    (3, 32, 32)
    """
    if text is None:
        return None
    match = re.fullmatch(r"([1-9][0-9]*)x([1-9][0-9]*)x([1-9][0-9]*)", text.strip())
    if match is None:
        raise ValueError(f"--image-shape must be channels, height and width, such as 3x224x224; got {text!r}")
    channels, height, width = map(int, match.groups())
    return channels, height, width


Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Changes to the recipe, such as stage1.epochs=3; strucspars run --options lists them.",
        autocompletion=complete_key,
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        help="The network of a checkpoint; for a run, only if its network is a function of your own: that function.",
        autocompletion=complete_model,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead, for scripts.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only the outcome.")]
Seeds = Annotated[str | None, typer.Option(metavar="0,1,2", help="One run per seed.")]
Jobs = Annotated[int, typer.Option(metavar="N", min=1, help="Number of runs at the same time.")]
Classes = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="Number of classes.", show_default="10 for CIFAR networks, else 1000"),
]
ImageShapeOption = Annotated[
    str | None,
    typer.Option(
        metavar="3x224x224",
        help="Channels, height and width of an image.",
        show_default="3x32x32 for CIFAR networks, else 3x224x224",
    ),
]
MinChannelsPerGroup = Annotated[
    int, typer.Option(metavar="N", min=1, help="Fewest channels of a group; CPU runtimes are slow below 16.")
]
Orders = Annotated[
    str, typer.Option(help="Which layers share channel orders: free, shared, one-shuffle, or package.module:function.")
]
Levels = Annotated[
    str, typer.Option(help="Without images: one threshold for all layers, or a knapsack of their kept norms.")
]
WidenGroupsBelow = Annotated[
    int | None,
    typer.Option(
        metavar="CHANNELS",
        min=1,
        help="Merge groups narrower than this into wider ones, padded with zeros.",
        show_default="16 for ONNX Runtime and OpenVINO, 32 for ONNX Runtime in int8, else 1",
    ),
]
RunOrCheckpoint = Annotated[
    str,
    typer.Argument(
        metavar="RUN_OR_CHECKPOINT",
        help="The folder of a finished run; or with --model a .safetensors, .pt or .pth file.",
    ),
]
OutFolder = Annotated[Path, typer.Option(help="The folder to put the run folders in.", callback=from_home)]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing file.")]
# `main` looks for it in the unparsed arguments, because parsing may be what fails.
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


Int8 = Annotated[
    bool, typer.Option("--int8", help="Quantise to 8 bits, for ONNX Runtime or OpenVINO; checked against float32.")
]
CalibrationImages = Annotated[int, typer.Option(metavar="N", min=1, help="With --int8: images to calibrate with.")]
MaxDrop = Annotated[
    float, typer.Option(metavar="POINTS", help="With --int8: points of top-1 accuracy that may be lost.")
]


def path_option(help: str, show_default: str | None = None, **options: Any) -> Any:
    """An option for a path, whose `~` is resolved."""
    return typer.Option(help=help, show_default=show_default or True, callback=from_home, **options)


def examples(*commands: str) -> str:
    """The commands to copy below a help text; typer prints every paragraph on its own line."""
    return "\n\n".join(("Examples:", *commands))


def check_can_be_written(out: Path, *, force: bool = False) -> None:
    """Raise an `OSError` with a remedy if a file cannot be written; call it before the work that makes the content."""
    from strucspars.io.files import followed

    if out.is_dir():
        raise IsADirectoryError(f"{out} is a folder; name a file with --out")
    if out.exists() and not force:
        raise FileExistsError(f"{out} exists already; replace it with --force, or write elsewhere with --out")
    folder = followed(out).parent
    if not folder.is_dir():
        raise FileNotFoundError(f"{out}: the folder {folder} does not exist; create it, or change --out")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(f"{out}: you may not write to the folder {folder}; change its permissions, or --out")


def is_first_process() -> bool:
    """Whether this is the only process, or the first of those that torchrun has started."""
    return os.environ.get("RANK", "0") == "0"


class Output:
    """Prints for one command, in the first process; with `as_json`, all but the outcome to the standard error."""

    def __init__(self, *, as_json: bool, quiet: bool = False) -> None:
        self._as_json = as_json
        self.is_quiet = quiet
        self.console = Console(stderr=as_json, highlight=False, quiet=not is_first_process())

    def remark(self, text: str) -> None:
        """Print a line that is not part of the outcome, unless quiet."""
        if not self.is_quiet:
            self.console.print(text, markup=False, soft_wrap=True)

    def outcome(self, text: str, document: Mapping[str, Any]) -> None:
        """Print the result of the command, as text or as JSON; an empty text prints nothing."""
        from strucspars.io.records import plain

        if self._as_json:
            text = json.dumps(plain(document, "the document"), indent=2, ensure_ascii=False)
        if text and is_first_process():
            # Not by rich, which would wrap a table that is wider than the terminal.
            print(text, file=sys.stdout, flush=True)


@contextmanager
def work_progress(output: Output) -> Iterator[Callable[[str, float], None]]:
    """Show a progress bar, on a terminal only; yields a function of a description and the fraction that is done."""
    if output.is_quiet or not output.console.is_interactive:
        yield lambda words, done: None
        return
    columns = (BarColumn(bar_width=20), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=output.console, transient=True) as progress:
        task = progress.add_task("", total=1.0)
        yield lambda words, done: progress.update(task, description=words, completed=done)


@dataclass
class _Line:
    """The progress of one run."""

    task: TaskID
    stage: str = ""
    epochs: int = 1
    steps: int = 1
    numbers: str = ""


class _Words(ProgressColumn):
    """The run and its pace, then as many numbers as the terminal has space for."""

    @override
    def render(self, task: Task) -> Text:
        words = [task.description]
        if task.speed is not None and task.time_remaining is not None:
            words += [f"{task.speed:.0f} steps/s", f"{timedelta(seconds=task.time_remaining)} left"]
        return Text("  ".join([*words, task.fields["numbers"]]), no_wrap=True, overflow="ellipsis")


class RunProgress(RunObserver):
    """Shows the progress of runs: a bar for each on a terminal, else a line per epoch. Any thread may report."""

    def __init__(self, console: Console, *, quiet: bool = False) -> None:
        self._console, self._quiet = console, quiet
        self._lock = threading.Lock()
        self._lines: dict[str, _Line] = {}
        self._is_stopping = False
        self._has_display = console.is_interactive and not quiet
        columns = (BarColumn(bar_width=10), _Words())
        self._display = Progress(*columns, console=console, transient=True, disable=not self._has_display)

    def __enter__(self) -> "RunProgress":
        self._display.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._display.stop()

    @override
    def run_started(self, run: str) -> None:
        self._lines[run] = _Line(self._display.add_task(f"{run}  preparing", total=None, numbers=""))

    @override
    def run_ended(self, run: str, words: str) -> None:
        self._display.remove_task(self._lines.pop(run).task)
        if words:
            self._say(f"{run}: {words}")

    def stopping(self) -> None:
        """Say once that a request to stop has been received."""
        with self._lock:
            is_known, self._is_stopping = self._is_stopping, True
        if not is_known:
            self._say("stopping: saving the state; a second signal aborts at once")

    @override
    def stage_started(self, run: str, stage: str, *, epochs: int, steps: int, done_epochs: int) -> None:
        line = self._lines[run] = _Line(self._lines[run].task, stage, epochs, steps)
        if done_epochs:
            self._say(f"{run}: {stage} continues after epoch {done_epochs} of {epochs}")
        # The speed is measured from here.
        self._display.reset(line.task, total=epochs * steps, completed=done_epochs * steps, numbers="")

    @override
    def steps_done(self, run: str, *, epoch: int, step: int) -> None:
        line = self._lines[run]
        words, position = f"{run}  {line.stage}  epoch {epoch}/{line.epochs}", (epoch - 1) * line.steps + step
        self._display.update(line.task, completed=position, description=words, numbers=line.numbers)

    @override
    def epoch_done(self, run: str, row: Mapping[str, Any]) -> None:
        line = self._lines[run]
        if row["stage"] != line.stage:
            removed = "channels" if "removed_channel_fraction" in row else "parameters"
            fraction = row.get("removed_channel_fraction", row.get("removed_param_fraction"))
            share = "" if fraction is None else f", {fraction:.1%} of the {removed} removed"
            accuracies = f"accuracy {row['before_top1']:.2%} before, {row['test_top1']:.2%} after"
            self._say(f"{run}: compressed{share}: {accuracies}")
            return
        formats = {
            "train_loss": "loss {:.3f}",
            "test_top1": "acc {:.2%}",
            "removed_fraction": "removed {:.1%}",
            "lambda": "lambda {:.1e}",
            "annealed": "annealed {:.0%}",
        }
        line.numbers = "  ".join(text.format(row[key]) for key, text in formats.items() if key in row)
        self.steps_done(run, epoch=row["epoch"], step=line.steps)
        if not self._has_display:
            speed = line.steps / row["train_seconds"] if row["train_seconds"] > 0 else 0.0
            self._say(f"{run}  {line.stage}  epoch {row['epoch']}/{line.epochs}  {line.numbers}  {speed:.0f} steps/s")

    def _say(self, text: str) -> None:
        if not self._quiet:
            self._console.print(text, markup=False, soft_wrap=True)
