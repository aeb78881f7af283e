"""JSON as its standard has it: no NaN, no infinity, plain values only; and errors that say where."""

import json
import math
from collections.abc import Mapping
from typing import Any, NoReturn


def plain(value: object, where: str) -> Any:
    """The value in the types of JSON; numbers that JSON cannot hold (NaN, infinity) become null.

    A run must not die of a measure that has no value; whether the loss is finite is for the training to watch.

    >>> plain({"loss": float("nan"), "sizes": (1, 2)}, "row")
    {'loss': None, 'sizes': [1, 2]}
    """
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ValueError(f"{where}: the key {key!r} is a {type(key).__name__}; JSON has texts only")
        return {str(key): plain(entry, f"{where}[{key!r}]") for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry, f"{where}[{place}]") for place, entry in enumerate(value)]
    raise ValueError(
        f"{where} is a {type(value).__module__}.{type(value).__name__}, which JSON cannot hold; "
        "make it a plain number, text, list or mapping (.item(), .tolist())"
    )


def parse(text: str | bytes, where: str) -> Any:
    """The value of a JSON text, or a `ValueError` that begins with `where`.

    >>> parse(b'{"loss": 0.5}', "row 1")
    {'loss': 0.5}
    """
    try:
        return json.loads(text.decode() if isinstance(text, bytes) else text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not valid JSON: {error}") from error


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a number")
