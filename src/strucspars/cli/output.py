"""Where a command prints: its outcome on the standard output, what happens meanwhile wherever it does not disturb."""

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console

from strucspars.runs.strict_json import plain


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
