"""Start Triton kernels, or only compile them: many at once, before the first of them runs."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.util import find_spec
from typing import Any

import torch

# What is being compiled, inside `only_compiled`.
_COMPILED: ContextVar[list[Any] | None] = ContextVar("_COMPILED", default=None)


def has_triton(device: torch.device) -> bool:
    """Whether Triton is installed and runs here: on NVIDIA's GPUs since Ampere, or anywhere in its interpreter."""
    if find_spec("triton") is None:
        return False
    if device.type == "cuda" and torch.version.hip is None:
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return is_interpreted()


def is_interpreted() -> bool:
    """Whether Triton interprets its kernels instead of compiling them."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def launch(kernel: Any, programs: tuple[int, ...], *arguments: object, **options: object) -> None:
    """Start so many programs of a kernel; inside `only_compiled`, compile it for such arguments."""
    compiled = _COMPILED.get()
    if compiled is None:
        kernel[programs](*arguments, **options)
    else:
        compiled.append(kernel.warmup(*arguments, grid=programs, **options))


@contextmanager
def only_compiled() -> Iterator[list[Any]]:
    """Kernels are compiled by several threads and do not run: what they would write is undefined.

    Gives the list of them, or of their futures, which are complete at the end and raise the error of the compiler.
    """
    from triton import AsyncCompileMode

    compiled: list[Any] = []
    token = _COMPILED.set(compiled)
    try:
        with ThreadPoolExecutor() as threads, AsyncCompileMode(threads, ignore_errors=True):
            yield compiled
    finally:
        _COMPILED.reset(token)
