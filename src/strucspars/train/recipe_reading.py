"""Recipes as YAML: composed of bases and overrides, checked key by key, and written back whole.

A recipe file holds the keys of `Recipe`. Its `base` names one or more recipes whose keys hold where its own say
nothing. Types, choices and limits are those of the dataclasses; nothing about single keys is repeated here.
"""

import difflib
import math
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from strucspars.io.files import RECIPE_BYTES, read_text
from strucspars.io.records import parse_yaml
from strucspars.train.recipe import Recipe

BASE = "base"
# Of a recipe, with the bases of its bases.
MOST_BASES = 100
YAML_SUFFIXES = (".yaml", ".yml")

# Aliases can make a value that a few lines of YAML describe, but whose full text fills the memory.
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 120
_SHORT.maxlevel = 2


@dataclass(frozen=True)
class _Document:
    """Text of a recipe.

    Attributes:
        label: how errors call it.
        identity: equal for the same recipe only.
        name: of the recipe, unless it says otherwise.
        text: its YAML.
        folder: what its relative paths start from.
    """

    label: str
    identity: str
    name: str
    text: str
    folder: Path


@dataclass(frozen=True)
class _Given:
    """A value that someone asked for, and who did: a file or an override."""

    value: Any
    origin: str


# What one file or all overrides give, by dotted key.
_Layer = dict[str, _Given]


def read_recipe(source: str | Path, overrides: Sequence[str] = (), *, is_resolved: bool = False) -> Recipe:
    """The recipe of a YAML file, or one that comes with the package, with `key=value` overrides.

    A base passes on all its keys but its name.

    Args:
        source: path of the file, or a name out of `recipe_names`. A name goes before a file of that name.
        overrides: such as `stage1.epochs=3`; values are YAML; the last one of a key wins.
        is_resolved: refuse a base. A run folder holds a whole recipe; a base would take in a file from elsewhere, whose
            text the folder's reader may publish.

    Raises:
        ValueError: there is no such recipe, or something in it is wrong; names the file or override and the key.

    >>> recipe = read_recipe("cifar10-resnet56-60", ["stage1.epochs=5", "data.root=~/cifar"])
    >>> recipe.model.name, recipe.sparsify.target, recipe.stage1.epochs, recipe.data.root
    ('preact-resnet56', 0.6, 5, '~/cifar')
    """
    document = _find(source, folder=Path())
    content = _parsed(document.text, document.label) if is_resolved else None
    if isinstance(content, dict) and BASE in content:
        raise ValueError(f"{document.label}: {BASE}: a run folder's recipe stands for itself; write its keys out")
    name: _Layer = {"name": _Given(document.name, document.label)}
    layers = [name, *_layers(document, chain=()), _merged([_override_values(override) for override in overrides])]
    recipe: Recipe = _built(Recipe, _merged(layers), "", document.label)
    return recipe


def recipe_yaml(recipe: Recipe) -> str:
    """The whole recipe as YAML, every key written out; `read_recipe` reads it back to an equal one.

    >>> recipe_yaml(Recipe(name="mine")).splitlines()[:2]
    ['name: mine', 'kind: strucspars']
    """
    # In ASCII, by escapes: written as they are, some line breaks of Unicode come back as spaces.
    return yaml.safe_dump(_plain(asdict(recipe)), sort_keys=False, allow_unicode=False)


def recipe_names() -> list[str]:
    """Names of the recipes that come with the package; bases that are no recipes of their own are left out.

    >>> "demo" in recipe_names()
    True
    """
    return sorted(name for name in _built_in() if not name.startswith("_"))


def _built_in() -> dict[str, Traversable]:
    entries = (files("strucspars") / "recipes").iterdir()
    return {entry.name.removesuffix(".yaml"): entry for entry in entries if entry.name.endswith(".yaml")}


def _find(source: str | Path, *, folder: Path) -> _Document:
    built_in = _built_in()
    if isinstance(source, str) and source in built_in:
        text = built_in[source].read_text(encoding="utf-8")
        return _Document(f"recipe {source!r}", source, source, text, Path())
    path = folder / Path(source).expanduser()
    if not path.exists():
        near = difflib.get_close_matches(Path(source).stem, recipe_names(), n=1, cutoff=0.4)
        names = f"did you mean {near[0]!r}?" if near else f"those of the package are {', '.join(recipe_names())}"
        if path.suffix in YAML_SUFFIXES and not near:
            names = "give the path of a YAML file, or the name of a recipe of the package, such as demo"
        raise ValueError(f"there is no recipe {str(source)!r}, neither as a file nor in the package; {names}")
    if path.is_dir():
        own = path / "recipe.yaml"
        remedy = f"to go on with the run there, give {own}, and --out {path}" if own.is_file() else "give a YAML file"
        raise ValueError(f"{path}: this is a folder, not a recipe; {remedy}")
    try:
        text = read_text(path, limit=RECIPE_BYTES)
    except OSError as error:
        raise ValueError(str(error)) from error
    return _Document(str(path), str(path.resolve()), path.stem, text, path.parent)


def _layers(document: _Document, chain: tuple[str, ...]) -> list[_Layer]:
    """What a file's bases and at last the file itself give."""
    if document.identity in chain:
        raise ValueError(f"{document.label}: base goes round in a circle: {' -> '.join((*chain, document.identity))}")
    content = _parsed(document.text, document.label)
    if content is None:
        raise ValueError(f"{document.label}: the file is empty; a recipe has keys such as base, model or sparsify")
    if not isinstance(content, dict):
        raise ValueError(f"{document.label}: a recipe must be a mapping of keys to values, got {_SHORT.repr(content)}")
    layers: list[_Layer] = []
    for base in _bases(content.pop(BASE, []), document.label):
        try:
            found = _find(base, folder=document.folder)
        except ValueError as error:
            raise ValueError(f"{document.label}: {BASE}: {error}") from error
        layers += _layers(found, (*chain, document.identity))
        if len(layers) > MOST_BASES or len(chain) > MOST_BASES:
            raise ValueError(f"{document.label}: {BASE}: there are more than {MOST_BASES} bases; join some of them")
    for layer in layers:
        # Two recipes of one name would mistake each other's runs for their own.
        layer.pop("name", None)
    return [*layers, dict(_values(content, Recipe, "", document.label))]


def _merged(layers: Sequence[_Layer]) -> _Layer:
    return {key: given for layer in layers for key, given in layer.items()}


def _bases(value: object, label: str) -> list[str]:
    named = value if isinstance(value, list) else [value]
    bases = [base for base in named if isinstance(base, str)]
    if bases != named:
        raise ValueError(f"{label}: {BASE} must be a name or path, or a list of them, got {_SHORT.repr(value)}")
    return bases


def override_keys(override: str) -> tuple[str, ...]:
    """The dotted keys that an override sets, in whatever way it is written.

    Raises:
        ValueError: it sets none, or something in it is wrong.

    >>> override_keys("stage1.epochs = 3"), override_keys("finetune={teacher: there, form: masked}")
    (('stage1.epochs',), ('finetune.teacher', 'finetune.form'))
    """
    return tuple(_override_values(override))


def _override_values(override: str) -> _Layer:
    origin = f"override {override!r}"
    key, equals, text = override.partition("=")
    if not equals:
        raise ValueError(f"{origin}: must be key=value, such as stage1.epochs=3")
    content = _parsed(text, origin)
    for part in reversed(key.strip().split(".")):
        content = {part: content}
    return dict(_values(content, Recipe, "", origin))


def _parsed(text: str, origin: str) -> Any:
    return parse_yaml(text, origin)


def _values(content: Mapping[Any, Any], section: Any, prefix: str, origin: str) -> Iterator[tuple[str, _Given]]:
    """The leaves of a mapping by dotted key, each as the type that its dataclass wants."""
    hints = get_type_hints(section)
    for key, value in content.items():
        path = f"{prefix}{key}"
        if key not in hints:
            remedy = _remedy(key, prefix, hints)
            raise ValueError(f"{origin}: there is no key {path!r} (value {_SHORT.repr(value)}); {remedy}")
        hint = hints[key]
        if is_dataclass(hint) and isinstance(value, dict):
            yield from _values(value, hint, f"{path}.", origin)
            continue
        try:
            yield path, _Given(_converted(value, hint), origin)
        except TypeError as error:
            raise ValueError(f"{origin}: {path} must be {allowed_values(hint)}, got {_SHORT.repr(value)}") from error


def _remedy(key: object, prefix: str, hints: Mapping[str, Any]) -> str:
    known, path = list(flat_options(Recipe(name="any"))), f"{prefix}{key}"
    if path in known:
        return f"keys are nested, not dotted: {path.replace('.', ': {')}: ...}}"
    # A key may stand in the wrong section; of several sections that have it, the first.
    sections = {name.rpartition(".")[2]: name for name in reversed(known)}
    if key in sections:
        near = [sections[key]]
    else:
        near = [f"{prefix}{name}" for name in difflib.get_close_matches(str(key), hints, n=1)]
        near = near or difflib.get_close_matches(path, known, n=1)
        near = near or [sections[name] for name in difflib.get_close_matches(str(key), sections, n=1)]
    suggestion = f"did you mean {near[0]!r}? " if near else ""
    return f"{suggestion}Known here: {', '.join(hints)}"


def _converted(value: Any, hint: Any) -> Any:
    """The value as the annotated type; `TypeError` where it is none."""
    kind, arguments = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        (wanted,) = (argument for argument in arguments if argument is not NoneType)
        return None if value is None else _converted(value, wanted)
    if kind is Literal:
        # `precision: 32` is a number to YAML.
        text = str(value) if type(value) is int else value
        if text in arguments:
            return text
    elif kind is tuple and isinstance(value, list):
        return tuple(_converted(item, arguments[0]) for item in value)
    elif kind is Mapping and isinstance(value, dict):
        return {_converted(key, arguments[0]): _converted(item, arguments[1]) for key, item in value.items()}
    elif hint is float and type(value) in (int, float, str):
        return _finite(value)
    elif type(value) is hint:  # not isinstance: a bool would pass for an int
        return value
    raise TypeError


def _finite(value: float | str) -> float:
    """As a float; text too, since YAML takes `2e-6`, which has no point, for one."""
    try:
        number = float(value)
    except (ValueError, OverflowError) as error:
        raise TypeError from error
    if not math.isfinite(number):
        raise TypeError
    return number


def allowed_values(hint: Any) -> str:
    """What a value of this type may be, in words.

    >>> allowed_values(float | None)
    'a finite number or null'
    """
    kind, arguments = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        return " or ".join("null" if argument is NoneType else allowed_values(argument) for argument in arguments)
    if kind is Literal:
        return f"one of {', '.join(arguments)}"
    if kind is tuple:
        return "a list of texts, such as [a, b]"
    if kind is Mapping:
        return "a mapping of patterns to whole numbers, such as {layer1.*: 2}"
    if is_dataclass(hint):
        return f"a mapping with keys out of {', '.join(get_type_hints(hint))}"
    words = {bool: "true or false", int: "a whole number", float: "a finite number", str: "text (numbers in quotes)"}
    return words[hint]


def flat_options(section: Any, prefix: str = "") -> dict[str, Any]:
    """The options of a recipe or a section of it, by dotted key."""
    leaves: dict[str, Any] = {}
    for field in fields(section):
        path, value = f"{prefix}{field.name}", getattr(section, field.name)
        leaves |= flat_options(value, f"{path}.") if is_dataclass(value) else {path: value}
    return leaves


def _built(section: Any, given: Mapping[str, _Given], prefix: str, label: str) -> Any:
    """The dataclass of what is given over the defaults; its own complaints get the full key and who gave it."""
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


def _plain(value: Any) -> Any:
    """With lists for tuples, which YAML has not."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return list(value) if isinstance(value, tuple) else value


def as_override(key: str, value: Any) -> str:
    """The override that sets an option to a value, on one line.

    >>> as_override("sparsify.layer_types", ("Conv2d", "Linear"))
    'sparsify.layer_types=[Conv2d, Linear]'
    """
    plain = list(value) if isinstance(value, tuple) else value
    text = yaml.safe_dump(plain, default_flow_style=True, width=10**6, allow_unicode=False)
    shown = text.removesuffix("\n").removesuffix("\n...")
    return f"{key}={shown}"
