"""What PyTorch warns of that is not ours to change, as marks for tests; all other warnings are errors."""

import pytest

# It deprecates scripting, in words of another category from version to version; people have such networks all the same.
SCRIPTING_WARNS = pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")

# Torch 2.11 says so of its own compiler: the first where it compiles at all, the second on a machine with a GPU.
COMPILER_WARNS = pytest.mark.filterwarnings(
    "ignore:.*script_method:DeprecationWarning", "ignore:.*should not be instantiated:DeprecationWarning"
)

# It draws nothing for layers without inputs or outputs, which is what tests of these layers are about.
EMPTY_LAYERS_WARN = pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
