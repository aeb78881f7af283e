"""Text of JSON and YAML as plain values, plain values as dataclasses, and one error that says where.

    fields = check_header(parse_json(text, path), path, format="strucspars-bench", format_version=3)
    report = as_record(BenchReport, fields, path)   # dataclasses in it too, as their annotations say
    text = to_json(report)                          # dataclasses become objects, NaN becomes null

What is wrong is a `RecordError`, a `ValueError` such as `plan.json: layers.conv1.group_level: must be a whole number,
got 'x'`. What the types cannot say, a dataclass checks when it is made; its `ValueError` gets the place in front.
Nothing here opens a file.
"""

import json
import math
import reprlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

if TYPE_CHECKING:
    import yaml

Record = TypeVar("Record")

# Whole numbers stay below it, so that they fit into 64 bits.
LARGEST = 2**63
# Most nodes of a YAML text, with every alias written out.
MOST_NODES = 100_000
# Python itself refuses to convert numbers of several thousand digits.
MOST_DIGITS = 1000

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 120
_SHORT.maxlevel = 2


class RecordError(ValueError):
    """A record that cannot be used: the file, the dotted path of the field (empty for the whole), and the problem."""

    def __init__(self, where: str, key: str, problem: str) -> None:
        super().__init__(where, key, problem)
        self.where, self.key, self.problem = where, key, problem

    def __str__(self) -> str:
        return ": ".join(part for part in (self.where, self.key, self.problem) if part)


def parse_json(text: str | bytes, where: str) -> Any:
    """The value of a JSON text, without NaN and infinity."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (TypeError, ValueError, RecursionError) as error:
        raise RecordError(where, "", f"is not valid JSON: {error}") from error


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a number")


def parse_yaml(text: str, where: str) -> Any:
    """The value of a YAML text of plain values; None where it is empty.

    A repeated key in one mapping is an error, and so are aliases and merge keys that amount to a huge value.
    """
    import yaml

    try:
        loader = yaml.SafeLoader(text)
        # In YAML 1.2 `2e-3` is a number; PyYAML implements YAML 1.1, where it needs a point.
        loader.yaml_implicit_resolvers = _resolvers()
        node = loader.get_single_node()
        if node is None:
            return None
        _count_nodes(node, where, "", {})
        return loader.construct_document(node)
    except RecordError:
        raise
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise RecordError(where, "", f"is not valid YAML (put text with * or : in quotes): {reason}") from error


def _resolvers() -> dict[str, Any]:
    import re

    import yaml

    number = re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+")
    resolvers = {key: list(entries) for key, entries in yaml.SafeLoader.yaml_implicit_resolvers.items()}
    for first in "-+0123456789":
        resolvers[first] = [*resolvers.get(first, []), ("tag:yaml.org,2002:float", number)]
    return resolvers


def _count_nodes(node: "yaml.Node", where: str, key: str, sizes: dict[int, int]) -> int:
    """The number of nodes with every alias written out; refuses too many, and repeated keys."""
    import yaml

    if id(node) in sizes:
        # A size of 0 means that the node contains itself.
        size = sizes[id(node)] or MOST_NODES + 1
    elif isinstance(node, yaml.SequenceNode):
        sizes[id(node)] = 0
        size = 1 + sum(_count_nodes(item, where, key, sizes) for item in node.value)
    elif isinstance(node, yaml.MappingNode):
        sizes[id(node)], size = 0, 1
        seen = set()
        for name, value in node.value:
            path = f"{key}.{name.value}" if key else f"{name.value}"
            if str(name.value) in seen:
                raise RecordError(where, path, f"is repeated in line {name.start_mark.line + 1}; keep one")
            seen.add(str(name.value))
            size += 1 + _count_nodes(value, where, path, sizes)
    else:
        size = 1
        if node.tag == "tag:yaml.org,2002:int" and len(node.value) > MOST_DIGITS:
            raise RecordError(where, key, f"must have at most {MOST_DIGITS} digits, got {_SHORT.repr(node.value)}")
    if size > MOST_NODES:
        raise RecordError(where, key, f"its aliases amount to more than {MOST_NODES:,} values; write out what is meant")
    sizes[id(node)] = size
    return size


def check_header(document: object, where: str, **expected: str | int) -> dict[str, Any]:
    """The fields of a document without its format and version, which must be as expected."""
    if not isinstance(document, Mapping):
        raise RecordError(where, "", f"must be an object, got {_SHORT.repr(document)}")
    for key, value in expected.items():
        found = document.get(key)
        if type(found) is not type(value) or found != value:
            is_newer = type(found) is int and isinstance(value, int) and found > value
            remedy = "upgrade strucspars" if is_newer else "give a file of this kind and version"
            raise RecordError(where, key, f"must be {value!r}, got {_SHORT.repr(found)}; {remedy}")
    return {key: value for key, value in document.items() if key not in expected}


def as_record(kind: type[Record], value: object, where: str, key: str = "") -> Record:
    """Make a dataclass of an object, which must have all fields without a default and no unknown ones."""
    if not isinstance(value, Mapping):
        raise RecordError(where, key, f"must be an object, got {_SHORT.repr(value)}")
    hints = get_type_hints(kind)
    # mypy cannot express that a type variable is a dataclass.
    known = {field.name: field for field in fields(kind) if field.init}  # type: ignore[arg-type]
    prefix = f"{key}." if key else ""
    for name in value:
        if name not in known:
            raise RecordError(where, f"{prefix}{name}", f"is not known here; known are {', '.join(known)}")
    for name, field in known.items():
        if name not in value and field.default is MISSING and field.default_factory is MISSING:
            raise RecordError(where, f"{prefix}{name}", "is missing")
    options = {name: convert(hints[name], entry, where, f"{prefix}{name}") for name, entry in value.items()}
    try:
        return kind(**options)
    except ValueError as error:
        raise RecordError(where, key, str(error)) from error


def convert(hint: Any, value: Any, where: str, key: str = "") -> Any:
    """A plain value as the annotated type, or a `RecordError`.

    Annotations: `bool`, `int`, `float`, `str`, `Any`, `Literal`, one of these or None, dataclasses, `tuple`, `list`,
    `Sequence` and `Mapping` of such, and arrays of whole numbers. Numbers are finite, and no booleans.
    """
    wanted = hint
    kind, arguments = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, UnionType):
        if value is None and NoneType in arguments:
            return None
        (hint,) = (argument for argument in arguments if argument is not NoneType)
        kind, arguments = get_origin(hint) or hint, get_args(hint)
    if is_dataclass(kind):
        return as_record(kind, value, where, key)  # type: ignore[arg-type]  # a class, not an instance
    if kind is Any:
        return value
    if kind is Literal:
        # `precision: 32` is a number to YAML.
        text = str(value) if type(value) is int else value
        if isinstance(text, str) and text in arguments:
            return text
    elif kind in (tuple, list, Sequence) and isinstance(value, list):
        # A tuple may have an annotation for each item.
        hints = arguments[:1] * len(value) if kind is not tuple or arguments[-1] is Ellipsis else arguments
        if len(hints) != len(value):
            raise RecordError(where, key, f"must be a list of {len(hints)}, got {_SHORT.repr(value)}")
        pairs = enumerate(zip(hints, value, strict=True))
        items = [convert(item_hint, item, where, f"{key}[{place}]") for place, (item_hint, item) in pairs]
        return items if kind is list else tuple(items)
    elif kind in (dict, Mapping) and isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        prefix = f"{key}." if key else ""
        return {name: convert(arguments[1], entry, where, f"{prefix}{name}") for name, entry in value.items()}
    elif kind is np.ndarray and isinstance(value, list):
        if all(type(item) is int and abs(item) < LARGEST for item in value):
            return np.array(value, dtype=np.int64)
    elif kind is float and type(value) in (int, float) and abs(value) <= sys.float_info.max:
        return float(value)
    elif kind in (bool, int, str) and type(value) is kind and (kind is not int or abs(value) < LARGEST):
        return value
    raise RecordError(where, key, f"must be {describe(wanted)}, got {_SHORT.repr(value)}")


def describe(hint: Any) -> str:
    """What a value of this type may be, in words."""
    kind, arguments = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, UnionType):
        return " or ".join("null" if argument is NoneType else describe(argument) for argument in arguments)
    if kind is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if kind in (tuple, list, Sequence):
        return f"a list, each {describe(arguments[0])}"
    if is_dataclass(kind):
        return f"a mapping with keys out of {', '.join(field.name for field in fields(kind))}"
    words = {bool: "true or false", int: "a whole number", float: "a finite number", str: "text (numbers in quotes)"}
    words |= {dict: "a mapping", Mapping: "a mapping", np.ndarray: "a list of whole numbers", Any: "any value"}
    return words[kind]


def plain(value: object, where: str) -> Any:
    """The value in the types of JSON. NaN and infinity become null: an undefined metric must not stop a run."""
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if value is None or type(value) in (bool, int, str):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: plain(getattr(value, each.name), f"{where}.{each.name}") for each in fields(value)}
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


def to_json(value: object, where: str = "the document", *, indent: int | None = 2) -> str:
    """JSON text of plain values and dataclasses, with NaN and infinity as null."""
    return json.dumps(plain(value, where), allow_nan=False, indent=indent, ensure_ascii=False)
