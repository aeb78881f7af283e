"""Recipes as text: read from files with a base and overrides, written back whole, their options described.

A recipe file holds the keys of `Recipe`; its `base` names a recipe that gives the keys it leaves out. Types, choices,
limits and meanings come from the dataclasses.
"""

import difflib
import inspect
import json
import re
import reprlib
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import yaml

from strucspars.io.files import RECIPE_BYTES, read_text
from strucspars.io.records import convert, describe, parse_yaml
from strucspars.train.recipe import Recipe

BASE = "base"
MOST_BASES = 100
YAML_SUFFIXES = (".yaml", ".yml")
PACKAGED = Path(str(files("strucspars"))) / "recipes"

SHORT = reprlib.Repr()
SHORT.maxstring = SHORT.maxother = 120
SHORT.maxlevel = 2


class _Given(NamedTuple):
    """A value, and the file or override that gives it."""

    value: Any
    origin: str


def read_recipe(source: str | Path, overrides: Sequence[str] = (), *, is_resolved: bool = False) -> Recipe:
    """The recipe of a YAML file, or one that comes with the package, with `key=value` overrides.

    A base passes on all its keys but its name. A name of the package goes before a file of that name.

    Args:
        overrides: such as `stage1.epochs=3`; values are YAML; the last one of a key wins.
        is_resolved: refuse a base. A run folder holds a whole recipe; a base would include a file from elsewhere, whose
            text the folder's reader may publish.

    >>> recipe = read_recipe("cifar10-resnet56-60", ["stage1.epochs=5", "data.root=~/cifar"])
    >>> recipe.model.name, recipe.sparsify.target, recipe.stage1.epochs, recipe.data.root
    ('preact-resnet56', 0.6, 5, '~/cifar')
    """
    documents = _documents(source, is_resolved=is_resolved)
    given: dict[str, _Given] = {}
    for label, content in documents:
        given |= _values(content, Recipe, "", label)
    for override in overrides:
        given |= _override_values(override)
    recipe: Recipe = _built(Recipe, given, "", documents[-1][0])
    return recipe


def recipe_yaml(recipe: Recipe) -> str:
    """The whole recipe as YAML, every key written out; `read_recipe` reads it back to an equal one.

    >>> recipe_yaml(Recipe(name="mine")).splitlines()[:2]
    ['name: mine', 'kind: strucspars']
    """
    # In ASCII, by escapes: unescaped, some line breaks of Unicode are read back as spaces.
    return yaml.safe_dump(asdict(recipe), sort_keys=False, allow_unicode=False)


def recipe_names() -> list[str]:
    """Names of the recipes that come with the package, without those that only serve as a base.

    >>> "demo" in recipe_names()
    True
    """
    return sorted(path.stem for path in PACKAGED.glob("[!_]*.yaml"))


def override_keys(override: str) -> tuple[str, ...]:
    """The dotted keys that an override sets.

    >>> override_keys("stage1.epochs = 3"), override_keys("finetune={teacher: there, form: masked}")
    (('stage1.epochs',), ('finetune.teacher', 'finetune.form'))
    """
    return tuple(_override_values(override))


def as_override(key: str, value: Any) -> str:
    """The override that sets an option to a value, on one line.

    >>> as_override("sparsify.layer_types", ("Conv2d", "Linear"))
    'sparsify.layer_types=[Conv2d, Linear]'
    """
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=False)
    shown = text.removesuffix("\n").removesuffix("\n...")
    return f"{key}={shown}"


def flat_options(section: Any, prefix: str = "") -> dict[str, Any]:
    """The options of a recipe or a section of it, by dotted key."""
    leaves: dict[str, Any] = {}
    for field in fields(section):
        path, value = f"{prefix}{field.name}", getattr(section, field.name)
        leaves |= flat_options(value, f"{path}.") if is_dataclass(value) else {path: value}
    return leaves


def _documents(source: str | Path, *, is_resolved: bool) -> list[tuple[str, dict[Any, Any]]]:
    """Labels for errors and contents of a recipe's files: the innermost base first, the recipe itself last."""
    documents: list[tuple[str, dict[Any, Any]]] = []
    paths: list[Path] = []
    wanted: str | Path | None = source
    where = ""
    while wanted is not None:
        try:
            label, path, text = _find(wanted, paths[-1].parent if paths else Path())
        except ValueError as error:
            raise ValueError(f"{where}{error}") from error
        if path in paths:
            raise ValueError(f"{label}: {BASE} goes round in a circle: {' -> '.join(map(str, (*paths, path)))}")
        if len(paths) > MOST_BASES:
            raise ValueError(f"{label}: a recipe may have at most {MOST_BASES} bases, one of another; merge some")
        content = _content(text, label)
        wanted, where = content.pop(BASE, None), f"{label}: {BASE}: "
        if not isinstance(wanted, str | None):
            raise ValueError(f"{where}must be a name or path, got {SHORT.repr(wanted)}")
        if wanted is not None and is_resolved:
            raise ValueError(f"{where}a run folder's recipe takes no base; write its keys out")
        # A base does not pass on its name: two recipes of one name would resume each other's runs.
        documents.insert(0, (label, {"name": path.stem, **content}))
        paths.append(path)
    return documents


def _find(source: str | Path, folder: Path) -> tuple[str, Path, str]:
    """A recipe's label for errors, its path and its text."""
    packaged = PACKAGED / f"{source}.yaml"
    if isinstance(source, str) and "/" not in source and packaged.is_file():
        return f"recipe {source!r}", packaged, read_text(packaged)
    path = folder / Path(source).expanduser()
    if not path.exists():
        near = difflib.get_close_matches(Path(source).stem, recipe_names(), n=1, cutoff=0.4)
        names = f"did you mean {near[0]!r}?" if near else f"those of the package are {', '.join(recipe_names())}"
        if path.suffix in YAML_SUFFIXES and not near:
            names = "give the path of a YAML file, or the name of a recipe of the package, such as demo"
        raise ValueError(f"there is no recipe {str(source)!r}, neither as a file nor in the package; {names}")
    if path.is_dir():
        own = path / "recipe.yaml"
        remedy = f"to continue the run there, give {own}, and --out {path}" if own.is_file() else "give a YAML file"
        raise ValueError(f"{path}: this is a folder, not a recipe; {remedy}")
    try:
        return str(path), path.resolve(), read_text(path, limit=RECIPE_BYTES)
    except OSError as error:
        raise ValueError(str(error)) from error


def _content(text: str, label: str) -> dict[Any, Any]:
    content = parse_yaml(text, label)
    if content is None:
        raise ValueError(f"{label}: the file is empty; a recipe has keys such as base, model or sparsify")
    if not isinstance(content, dict):
        raise ValueError(f"{label}: a recipe must be a mapping of keys to values, got {SHORT.repr(content)}")
    return content


def _override_values(override: str) -> dict[str, _Given]:
    origin = f"override {override!r}"
    key, equals, text = override.partition("=")
    if not equals:
        raise ValueError(f"{origin}: must be key=value, such as stage1.epochs=3")
    content = parse_yaml(text, origin)
    for part in reversed(key.strip().split(".")):
        content = {part: content}
    return dict(_values(content, Recipe, "", origin))


def _values(content: Mapping[Any, Any], section: Any, prefix: str, origin: str) -> Iterator[tuple[str, _Given]]:
    """The leaves of a mapping by dotted key, each as the type of its dataclass's field."""
    hints = get_type_hints(section)
    for key, value in content.items():
        path = f"{prefix}{key}"
        if key not in hints:
            remedy = _remedy(key, prefix, hints)
            raise ValueError(f"{origin}: there is no key {path!r} (value {SHORT.repr(value)}); {remedy}")
        if is_dataclass(hints[key]) and isinstance(value, dict):
            yield from _values(value, hints[key], f"{path}.", origin)
        else:
            yield path, _Given(convert(hints[key], value, origin, path), origin)


def _remedy(key: object, prefix: str, hints: Mapping[str, Any]) -> str:
    known, path = list(flat_options(Recipe(name="any"))), f"{prefix}{key}"
    if path in known:
        return f"keys are nested, not dotted: {path.replace('.', ': {')}: ...}}"
    # The names in this section, else the last parts of all keys: of several sections that have it, the first.
    candidates = {name.rpartition(".")[2]: name for name in reversed(known)}
    candidates |= {name: f"{prefix}{name}" for name in hints}
    near = difflib.get_close_matches(str(key), candidates, n=1)
    suggestion = f"did you mean {candidates[near[0]]!r}? " if near else ""
    return f"{suggestion}Known here: {', '.join(hints)}"


def _built(section: Any, given: Mapping[str, _Given], prefix: str, label: str) -> Any:
    """Build a section from the given values and the defaults; errors name the full key and the file or override."""
    default = flat_options(Recipe(name="any"))
    options = {}
    for name, hint in get_type_hints(section).items():
        path = f"{prefix}{name}"
        if is_dataclass(hint):
            options[name] = _built(hint, given, f"{path}.", label)
        else:
            options[name] = given[path].value if path in given else default[path]
    try:
        return section(**options)
    except ValueError as error:
        message = str(error) if str(error).startswith(prefix) else f"{prefix}{error}"
        key = message.split()[0]
        origin = given[key].origin if key in given else label
        raise ValueError(f"{origin}: {message}") from error


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option, in every section that has it: `stage1.lr` and `stage2.lr` are the same option, with two defaults."""

    keys: tuple[str, ...]
    allowed: str
    defaults: tuple[str, ...]
    meaning: str


@dataclass(frozen=True, kw_only=True)
class OptionGroup:
    """Options that belong together; the names are the keys of a recipe that hold them, none at the top."""

    names: tuple[str, ...]
    summary: str
    options: tuple[Option, ...]


def option_groups() -> list[OptionGroup]:
    """All options that a recipe has, those at its top first.

    >>> top, data, *_ = option_groups()
    >>> data.options[0].keys, data.options[0].defaults, data.options[0].allowed
    (('data.name',), ('digits',), 'text (numbers in quotes)')
    """
    names_by_type: dict[Any, list[str]] = {}
    for name, hint in get_type_hints(Recipe).items():
        if is_dataclass(hint):
            names_by_type.setdefault(hint, []).append(name)
    return [_group(Recipe, ()), *(_group(options, names) for options, names in names_by_type.items())]


def _group(options: type, names: Sequence[str]) -> OptionGroup:
    summary = " ".join((inspect.getdoc(options) or "").partition("\n\n")[0].split())
    if len(names) > 1:
        # The sections share a class, which cannot say what only one of them is for.
        summary = " ".join((summary, *(f"`{name}` is {meaning_of(Recipe, name)}" for name in names)))
    # `name` has no default: in Python it must be given, in YAML it is the name of the file.
    values = flat_options(Recipe(name="any")) | {"name": ""}
    found = []
    for name, hint in get_type_hints(options).items():
        if not is_dataclass(hint):
            keys = tuple(f"{prefix}.{name}" for prefix in names) or (name,)
            defaults = (values[key] for key in keys)
            shown = tuple(value if isinstance(value, str) else json.dumps(value) for value in defaults)
            meaning = meaning_of(options, name)
            found.append(Option(keys=keys, allowed=describe(hint), defaults=shown, meaning=meaning))
    return OptionGroup(names=tuple(names), summary=summary, options=tuple(found))


def meaning_of(options: type, name: str) -> str:
    """What the docstring of a class, or of a base class, says about an option."""
    meaning = next(filter(None, (attribute_meanings(base).get(name) for base in options.__mro__)), "")
    if not meaning:
        raise ValueError(f"{options.__name__}.{name} has no meaning; describe it under Attributes in the docstring")
    # Recipes are YAML.
    return re.sub(r"\bNone\b", "`null`", meaning)


def attribute_meanings(documented: type) -> dict[str, str]:
    """The texts under "Attributes" in a docstring, by attribute; names separated by commas share one text."""
    section = (inspect.getdoc(documented) or "").partition("Attributes:\n")[2].partition("\n\n")[0]
    meanings: dict[str, str] = {}
    for entry in filter(None, re.split(r"\n(?=\S)", textwrap.dedent(section))):
        names, _, meaning = entry.partition(":")
        meanings |= dict.fromkeys(re.split(r",\s*", names), " ".join(meaning.split()))
    return meanings
