"""Options that several commands share, and the values that are written in a form of their own."""

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from strucspars.io.files import followed
from strucspars.io.records import plain


def is_first_process() -> bool:
    """Whether this is the only process, or the first of those that torchrun has started."""
    return os.environ.get("RANK", "0") == "0"


class Output:
    """The voice of one command. Of several processes only the first has one.

    Attributes:
        console: for progress; the standard error with `as_json`, so that the JSON is alone on the standard output.
        is_quiet: whether to print the outcome only.
    """

    def __init__(self, *, as_json: bool, quiet: bool = False) -> None:
        self._as_json = as_json
        self.is_quiet = quiet
        self.console = Console(stderr=as_json, highlight=False, quiet=not is_first_process())

    def remark(self, text: str) -> None:
        """Say something by the way; not when quiet."""
        if not self.is_quiet:
            self.console.print(text, markup=False, soft_wrap=True)

    def outcome(self, text: str, document: Mapping[str, Any]) -> None:
        """Print what the command came to, as a text or as JSON; no text where there is nothing to say."""
        if self._as_json:
            text = json.dumps(plain(document, "the document"), indent=2, ensure_ascii=False)
        if text and is_first_process():
            # Not through rich: a table that is wider than the terminal would be wrapped.
            print(text, file=sys.stdout, flush=True)


Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Changes to the recipe, such as stage1.epochs=3.", show_default=False),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead, for scripts.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print the outcome only.")]
Seeds = Annotated[str | None, typer.Option(metavar="0,1,2", help="One run per seed.", show_default=False)]
Jobs = Annotated[int, typer.Option(min=1, help="How many runs at a time.")]
Classes = Annotated[
    int | None, typer.Option(min=1, help="Number of classes.", show_default="10 for CIFAR networks, else 1000")
]
ImageShapeOption = Annotated[
    str | None,
    typer.Option(
        metavar="3x224x224",
        help="Channels, height and width of an image.",
        show_default="3x32x32 for CIFAR networks, else 3x224x224",
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Replace a file that is there.")]
# Read by `main`, before anything is parsed: what fails may be the parsing.
Debug = Annotated[bool, typer.Option("--debug", help="Show where in the code an error comes from.")]


def from_home(path: Path | None) -> Path | None:
    """A path, its `~` resolved: shells leave that of `--out=~/runs` as it is."""
    return None if path is None else path.expanduser()


def examples(*commands: str) -> str:
    """An epilogue of commands to copy; typer puts every paragraph on a line of its own."""
    return "\n\n".join(("Examples:", *commands))


def parsed_seeds(text: str) -> list[int]:
    """Seeds out of a list with commas.

    >>> parsed_seeds("0, 1,2")
    [0, 1, 2]
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"[0-9]+", part) for part in parts):
        raise ValueError(f"--seeds must be whole numbers with commas between, such as 0,1,2; got {text!r}")
    seeds = [int(part) for part in parts]
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"--seeds has a seed twice: {text!r}; each would write into the same folder")
    return seeds


def parsed_image_shape(text: str) -> tuple[int, int, int]:
    """Channels, height and width.

    >>> parsed_image_shape("3x32x32")
    (3, 32, 32)
    """
    match = re.fullmatch(r"([1-9][0-9]*)x([1-9][0-9]*)x([1-9][0-9]*)", text.strip())
    if match is None:
        raise ValueError(f"--image-shape must be channels, height and width, such as 3x224x224; got {text!r}")
    channels, height, width = (int(number) for number in match.groups())
    return channels, height, width


def check_can_be_written(out: Path, *, force: bool = False, companions: Sequence[Path] = ()) -> None:
    """Raise an `OSError` that says what to do where a file cannot be written: before the work, not after it.

    Args:
        out: the file.
        force: whether a file that is there may be replaced.
        companions: files that may be written together with it. They are replaced together with it, but never alone: one
            that is there without `out` belongs to something else.
    """
    if out.is_dir():
        raise IsADirectoryError(f"{out} is a folder; name a file with --out")
    if out.exists() and not force:
        raise FileExistsError(f"{out} is there already; replace it with --force, or write elsewhere with --out")
    foreign = [file for file in companions if os.path.lexists(file)]
    if foreign and not out.exists():
        raise FileExistsError(
            f"{foreign[0]} is there already, without {out}, so that it belongs to something else; move it away, or "
            "write elsewhere with --out"
        )
    folder = followed(out).parent
    if not folder.is_dir():
        raise FileNotFoundError(f"{out} cannot be written: there is no folder {folder}; make it, or change --out")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(
            f"{out} cannot be written: the folder {folder} is not writable for you; change that, or --out"
        )
