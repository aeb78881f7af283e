"""Which modules are batch norms: PyTorch's, and those of other libraries, some of which do not inherit from them."""

from torch import nn

# What they compute after the norm, by the names of their modules. By name, so that these libraries are not imported.
_OTHER_LIBRARIES = {
    "torchvision.ops.misc.FrozenBatchNorm2d": (),
    "timm.layers.norm_act.FrozenBatchNormAct2d": ("drop", "act"),
    "timm.layers.norm_act.BatchNormAct2d": ("drop", "act"),
}


def is_batch_norm(module: nn.Module) -> bool:
    """Whether this is a batch norm, frozen or not, alone or with more: subclasses may add an activation."""
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return True
    return any(_full_name(base) in _OTHER_LIBRARIES for base in type(module).__mro__)


def modules_after_norm(module: nn.Module) -> dict[str, nn.Module] | None:
    """What a batch norm of another library computes after the norm itself, by name; None for any other module."""
    names = _OTHER_LIBRARIES.get(_full_name(type(module)))
    return None if names is None else {name: module.get_submodule(name) for name in names}


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
