"""Every option of a recipe: its keys, what it may be, its defaults and its meaning, all read off the dataclasses."""

import inspect
import json
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, is_dataclass
from functools import reduce
from typing import Any, get_type_hints

from strucspars.train.recipe import Recipe
from strucspars.train.recipe_reading import allowed_values


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option, in every section that has it.

    Attributes:
        keys: dotted, as overrides have them; `stage1.lr` and `stage2.lr` are the same option.
        allowed: what its value may be, in words.
        defaults: one per key, as an override would write it; empty where there is none.
        meaning: what the docstring says.
    """

    keys: tuple[str, ...]
    allowed: str
    defaults: tuple[str, ...]
    meaning: str


@dataclass(frozen=True, kw_only=True)
class Section:
    """Options that belong together.

    Attributes:
        names: the keys of a recipe that hold these options, several where they have the same ones; none at the top.
        summary: what the options decide.
        options: in the order of the code.
    """

    names: tuple[str, ...]
    summary: str
    options: tuple[Option, ...]


def recipe_sections() -> list[Section]:
    """All options that a recipe has, those at its top first.

    Raises:
        ValueError: an option has no meaning.

    >>> top, data, *_ = recipe_sections()
    >>> data.options[0].keys, data.options[0].defaults, data.options[0].allowed
    (('data.name',), ('digits',), 'text (numbers in quotes)')
    """
    names_by_type: dict[Any, list[str]] = {}
    for name, hint in get_type_hints(Recipe).items():
        if is_dataclass(hint):
            names_by_type.setdefault(hint, []).append(name)
    return [_section(Recipe, ()), *(_section(options, names) for options, names in names_by_type.items())]


def _section(options: type, names: Sequence[str]) -> Section:
    summary = _first_paragraph(options)
    if len(names) > 1:
        # They share a class, which cannot say what only one of them is for.
        uses = (f"`{name}` is {meaning_of(Recipe, name)}" for name in names)
        summary = " ".join((summary, *uses))
    prefixes = [f"{name}." for name in names] or [""]
    return Section(
        names=tuple(names),
        summary=summary,
        options=tuple(
            _option(options, name, hint, prefixes)
            for name, hint in get_type_hints(options).items()
            if not is_dataclass(hint)
        ),
    )


def _option(options: type, name: str, hint: Any, prefixes: Sequence[str]) -> Option:
    keys = tuple(f"{prefix}{name}" for prefix in prefixes)
    return Option(
        keys=keys,
        allowed=allowed_values(hint),
        defaults=tuple(_default(key) for key in keys),
        meaning=meaning_of(options, name),
    )


def _default(key: str) -> str:
    # The one option that has to be given: in Python by name, in YAML by the file's.
    if key == "name":
        return ""
    value = reduce(getattr, key.split("."), Recipe(name="any"))
    return value if isinstance(value, str) else json.dumps(value)


def meaning_of(options: type, name: str) -> str:
    """What the docstring of a class, or of one that it is built on, says about an option.

    Raises:
        ValueError: it says nothing.

    >>> meaning_of(Recipe, "seed")
    'of everything random.'
    """
    meaning = next(filter(None, (attribute_meanings(base).get(name) for base in options.__mro__)), "")
    if not meaning:
        raise ValueError(f"{options.__name__}.{name} has no meaning; describe it under Attributes in the docstring")
    # Recipes are YAML.
    return re.sub(r"\bNone\b", "`null`", meaning)


def attribute_meanings(documented: type) -> dict[str, str]:
    """What a docstring has under "Attributes", by attribute; names with commas between them share one text.

    >>> class Point:
    ...     '''A place.
    ...
    ...     Attributes:
    ...         x, y: where it lies,
    ...             in metres.
    ...     '''
    >>> attribute_meanings(Point)
    {'x': 'where it lies, in metres.', 'y': 'where it lies, in metres.'}
    """
    section = (inspect.getdoc(documented) or "").partition("Attributes:\n")[2].partition("\n\n")[0]
    meanings: dict[str, str] = {}
    for entry in filter(None, re.split(r"\n(?=\S)", textwrap.dedent(section))):
        names, _, meaning = entry.partition(":")
        meanings |= dict.fromkeys(re.split(r",\s*", names), " ".join(meaning.split()))
    return meanings


def _first_paragraph(documented: type) -> str:
    return " ".join((inspect.getdoc(documented) or "").partition("\n\n")[0].split())
