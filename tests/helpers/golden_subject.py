"""The one place where the golden tests touch the project: its program, called in this process, and its public names."""

import contextlib
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import strucspars as ss
from strucspars.cli.main import main

__all__ = ["Said", "document_of", "said", "ss"]


@dataclass(frozen=True)
class Said:
    """What a call of the program came to."""

    status: int
    out: str
    err: str


def said(arguments: Sequence[str], folder: Path) -> Said:
    """The program, called in a folder."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(list(arguments))
    return Said(status, out.getvalue(), err.getvalue())


def document_of(arguments: Sequence[str], folder: Path) -> Any:
    """The JSON document of a call that succeeds."""
    heard = said([*arguments, "--json"], folder)
    assert heard.status == 0, heard.err
    return json.loads(heard.out)
