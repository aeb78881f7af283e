"""Structured sparsification: learn which channels belong together, and turn convolutions into group convolutions."""

from typing import TYPE_CHECKING

from strucspars._version import __version__ as __version__

if TYPE_CHECKING:
    from strucspars._public import *  # noqa: F403  # type checkers see every public name here
else:
    # Loading torch takes seconds, which `strucspars --help` and shell completion do not have: names load on first use.
    def __getattr__(name: str) -> object:
        if name == "__all__" or not name.startswith("_"):
            from strucspars import _public

            globals().update({each: getattr(_public, each) for each in _public.__all__}, __all__=_public.__all__)
            if name in globals():
                return globals()[name]
        raise AttributeError(f"module 'strucspars' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__getattr__("__all__")})
