"""Structured sparsification: learn which channels belong together, and turn convolutions into group convolutions."""

from typing import TYPE_CHECKING

from strucspars._version import __version__ as __version__

if TYPE_CHECKING:
    from strucspars._public import *  # noqa: F403  # type checkers see every public name here
else:
    import sys as _sys
    from types import ModuleType as _ModuleType

    class _Package(_ModuleType):
        """Loads the public names on first use: torch takes seconds that `strucspars --help` does not have."""

        def __getattr__(self, name: str) -> object:
            if name == "__all__" or not name.startswith("_"):
                from strucspars import _public

                vars(self).update({each: getattr(_public, each) for each in _public.__all__}, __all__=_public.__all__)
                if name in vars(self):
                    return vars(self)[name]
            raise AttributeError(f"module 'strucspars' has no attribute {name!r}")

        def __setattr__(self, name: str, value: object) -> None:
            # An import of the folder `export` must not hide the function of that name.
            if not (name == "export" and isinstance(value, _ModuleType)):
                super().__setattr__(name, value)

        def __dir__(self) -> list[str]:
            return sorted({*vars(self), *self.__all__})

    _sys.modules[__name__].__class__ = _Package
