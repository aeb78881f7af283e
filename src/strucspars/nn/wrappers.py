"""Modules that do nothing but call another: on several devices, in step with other processes, or compiled."""

from torch import nn

# By name: importing the compiler takes seconds. The module inside is under the second name.
_INNER_NAMES = {
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    "torch.nn.parallel.data_parallel.DataParallel": "module",
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
}


def inner_name(module: nn.Module) -> str | None:
    """By which name a wrapper of PyTorch holds the network; None for any other module.

    >>> inner_name(nn.DataParallel(nn.Conv2d(1, 1, 1))), inner_name(nn.Conv2d(1, 1, 1))
    ('module', None)
    """
    return _INNER_NAMES.get(f"{type(module).__module__}.{type(module).__qualname__}")


def unwrapped(model: nn.Module) -> nn.Module:
    """The network inside of `torch.compile`, `DataParallel` and `DistributedDataParallel`, in any order.

    A wrapper with hooks of its own does more than call, and stays.

    >>> layer = nn.Conv2d(1, 1, 1)
    >>> unwrapped(nn.DataParallel(layer)) is layer
    True
    """
    while (name := inner_name(model)) is not None:
        if model._forward_hooks or model._forward_pre_hooks:
            break
        model = model.get_submodule(name)
    return model


def unwrap_children_(model: nn.Module) -> None:
    """Let every module of a network call the modules themselves, not wrappers around them, in place."""
    for module in list(model.modules()):
        # Not named_children(): of a module that has several names it gives the first alone.
        for name, child in module._modules.items():
            if child is not None:
                module._modules[name] = unwrapped(child)
