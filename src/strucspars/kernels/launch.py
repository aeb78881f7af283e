"""Start Triton kernels, or only compile them: many at once, before the first of them runs."""

import logging
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.util import find_spec
from typing import Any

import torch

logger = logging.getLogger(__name__)

_ONLY_COMPILED: ContextVar[bool] = ContextVar("_ONLY_COMPILED", default=False)


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
    if _ONLY_COMPILED.get():
        kernel.warmup(*arguments, grid=programs, **options)
    else:
        kernel[programs](*arguments, **options)


@contextmanager
def only_compiled() -> Iterator[None]:
    """Kernels are compiled by several threads and do not run: their results are undefined. Errors are left out."""
    from triton import AsyncCompileMode

    token = _ONLY_COMPILED.set(True)
    try:
        with ThreadPoolExecutor() as threads, AsyncCompileMode(threads, ignore_errors=True):
            yield
    finally:
        _ONLY_COMPILED.reset(token)
