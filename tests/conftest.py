import functools
import os
import sys

import pytest
from hypothesis import settings

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
