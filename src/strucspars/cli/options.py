"""Options that several commands share, and the values that are written in a form of their own."""

import re
from pathlib import Path
from typing import Annotated

import typer

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
ImageShape = Annotated[
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
