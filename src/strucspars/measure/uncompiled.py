"""A forward pass that hooks can follow, whatever `torch.compile` has made of the model."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

from torch import nn

# Where PyTorch keeps what `module.compile()` made, and what a compiled function was before.
_COMPILED_CALL = "_compiled_call_impl"
_BEFORE_COMPILING = "_torchdynamo_orig_callable"


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Let modules that `torch.compile` has changed run their own code meanwhile: what is compiled calls no new hooks.

    Not `torch.compiler.set_stance`: it holds for all threads, in which other networks may train compiled, and threads
    that set it at the same time can leave it set for good.
    """
    before: list[tuple[dict[str, Any], dict[str, Any]]] = []
    try:
        for module in model.modules():
            own, forward = vars(module), _forward_before_compiling(module)
            if forward is None and _COMPILED_CALL not in own:
                continue
            before.append((own, {name: own[name] for name in (_COMPILED_CALL, "forward") if name in own}))
            own.pop(_COMPILED_CALL, None)
            if forward is not None:
                own["forward"] = forward
        yield
    finally:
        for own, kept in before:
            own.pop("forward", None)
            own.update(kept)


def _forward_before_compiling(module: nn.Module) -> Callable[..., Any] | None:
    """What a compiled `forward` was, of the object or of its class; None if it is not compiled."""
    if "forward" in vars(module):
        # That of the wrapper which torch.compile(module) returns, too.
        return getattr(vars(module)["forward"], _BEFORE_COMPILING, None)
    # Not type(module).forward: scripted modules have none to give.
    function = getattr(inspect.getattr_static(type(module), "forward", None), _BEFORE_COMPILING, None)
    return None if function is None else MethodType(function, module)
