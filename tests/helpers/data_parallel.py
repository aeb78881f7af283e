"""`nn.DataParallel` on the CPU: where there is a GPU, it takes a network there."""

from torch import nn


def parallel(model: nn.Module) -> nn.DataParallel[nn.Module]:
    """The wrapper as it is on machines without a GPU: it calls the network where that is."""
    wrapper = nn.DataParallel(model).cpu()
    wrapper.device_ids = []
    return wrapper
