"""Objects that options refer to by name, so that adding one needs no edit elsewhere."""

import difflib
import importlib
from collections.abc import Mapping
from typing import Generic, TypeVar

Entry = TypeVar("Entry")


class Registry(Generic[Entry]):
    """Entries by name. A name like `package.module:attribute` is imported when it is first used.

    >>> budgets = Registry("budget", {"params": len})
    >>> budgets.find("params") is len, budgets.find("math:prod")([2, 3])
    (True, 6)
    """

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

    def names(self) -> tuple[str, ...]:
        """The registered names, built-in ones first."""
        return tuple(self._entries)

    def check(self, name: str) -> None:
        """Raise a `ValueError` unless the name is registered or can be imported; does not import it."""
        if name not in self._entries and ":" not in name:
            near = difflib.get_close_matches(name, self._entries, n=1)
            hint = f"did you mean {near[0]!r}? Otherwise register it" if near else "register it"
            raise ValueError(
                f"{self._option} must be one of {', '.join(self._entries)} or package.module:function, got {name!r}; "
                f"{hint} first"
            )

    def find(self, name: str) -> Entry:
        """The entry of a name, or a `ValueError` that names the option."""
        self.check(name)
        if name not in self._entries:
            module, _, attribute = name.partition(":")
            try:
                self._entries[name] = getattr(importlib.import_module(module), attribute)
            except (ImportError, AttributeError, ValueError) as error:
                raise ValueError(f"{self._option} {name!r} cannot be imported: {error}") from error
        return self._entries[name]
