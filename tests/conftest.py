import functools
import os
import sys
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

# Without a GPU, Triton interprets its kernels. It looks at this when it is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# No deadline: no test asserts a time. The same examples every time; `make fuzz` draws new ones.
settings.register_profile("fixed", deadline=None, derandomize=True)
settings.register_profile("fuzz", deadline=None, max_examples=500, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))


@pytest.fixture(autouse=True)
def _parse_the_functions_of_onnx_once() -> None:
    """`torch.onnx` parses the 500 functions of its library anew at every export, which is most of the time."""
    exporter = sys.modules.get("torch.onnx._internal.exporter._registration")
    registry = getattr(exporter, "ONNXRegistry", None)
    if registry is not None and not hasattr(registry.from_torchlib, "cache_info"):
        registry.from_torchlib = staticmethod(functools.cache(registry.from_torchlib))


@pytest.fixture(scope="session", autouse=True)
def no_waiting_for_the_disk() -> Iterator[None]:
    """Files survive a killed process without `fsync`; only a power failure, which no test causes, needs it.

    A run calls it some 40 times, which takes longer than its training here.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)
        yield


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep measured times out of the user's folder, and those of other tests out of this one."""
    monkeypatch.setenv("STRUCSPARS_CACHE", str(tmp_path_factory.mktemp("cache")))
