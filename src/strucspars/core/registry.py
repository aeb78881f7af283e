"""Objects that options refer to by name, so that adding one needs no edit elsewhere."""

import difflib
import importlib
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

Entry = TypeVar("Entry")


class Registry(Generic[Entry]):
    """Entries by name. A name like `package.module:attribute` is imported."""

    def __init__(self, option: str, built_in: Mapping[str, Entry]) -> None:
        """Start with the built-in entries; errors call them by the name of their option."""
        self._option = option
        self._built_in = frozenset(built_in)
        self._entries = dict(built_in)

    def register(self, name: str, entry: Entry) -> None:
        """Add an entry, or replace one that was added before; built-in ones stay."""
        if not name or ":" in name or name in self._built_in:
            raise ValueError(f"{self._option} {name!r} cannot be registered: it is built in, empty or contains a colon")
        self._entries[name] = entry

    def check(self, name: str) -> None:
        """Raise a `ValueError` unless the name is registered or can be imported; does not import it."""
        if name not in self._entries and ":" not in name:
            near = difflib.get_close_matches(name, self._entries, n=1)
            hint = f"did you mean {near[0]!r}? Otherwise register it" if near else "register it"
            raise ValueError(
                f"{self._option} must be one of {', '.join(self._entries)} or package.module:function, got {name!r}; "
                f"{hint} first"
            )

    def names(self) -> tuple[str, ...]:
        """All registered names, the built-in ones first."""
        return tuple(self._entries)

    def find(self, name: str) -> Entry:
        """The entry of a name, or a `ValueError` that names the option."""
        self.check(name)
        return self._entries[name] if name in self._entries else import_named(self._option, name)


def import_named(option: str, name: str) -> Any:
    """What `package.module:attribute` names, or a `ValueError` that begins with the option."""
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ValueError(f"{option} {name!r}: {error}; is it installed, or its folder in PYTHONPATH?") from error
    except Exception as error:  # nameless and relative names, and anything that the module raises
        raise ValueError(f"{option} {name!r}: {module_name!r} cannot be imported: {users_error(error)}") from error
    if not hasattr(module, attribute):
        near = difflib.get_close_matches(attribute, dir(module), n=1)
        hint = f"did you mean {near[0]!r}?" if near else "write package.module:function"
        raise ValueError(f"{option} {name!r}: module {module_name!r} has no {attribute!r}; {hint}")
    return getattr(module, attribute)


def users_error(error: Exception) -> str:
    """An error of the user's code in one line, with its type and a remedy."""
    words = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(":")
    return f"{words}; fix it, or name another (on the command line, --debug shows where it fails)"
