"""Which modules are batch norms: PyTorch's, and the frozen ones of other libraries, which do not inherit from them."""

from torch import nn

# By name, so that these libraries are not imported.
_OF_TORCHVISION = "torchvision.ops.misc.FrozenBatchNorm2d"
_WITH_ACTIVATION = "timm.layers.norm_act.FrozenBatchNormAct2d"


def is_batch_norm(module: nn.Module) -> bool:
    """Whether this is a batch norm, frozen or not, alone or with more: subclasses may add an activation.

    >>> is_batch_norm(nn.BatchNorm2d(4)), is_batch_norm(nn.GroupNorm(2, 4))
    (True, False)
    """
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return True
    return any(_full_name(base) in (_OF_TORCHVISION, _WITH_ACTIVATION) for base in type(module).__mro__)


def is_frozen_batch_norm(module: nn.Module) -> bool:
    """Whether this is a batch norm whose parameters and statistics are buffers, so that it never trains.

    >>> is_frozen_batch_norm(nn.BatchNorm2d(4))
    False
    """
    return _full_name(type(module)) in (_OF_TORCHVISION, _WITH_ACTIVATION)


def after_the_norm(module: nn.Module) -> dict[str, nn.Module]:
    """What a frozen batch norm computes after the norm itself, in this order, by the names of its modules."""
    if _full_name(type(module)) != _WITH_ACTIVATION:
        return {}
    return {name: module.get_submodule(name) for name in ("drop", "act")}


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
