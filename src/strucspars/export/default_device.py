"""Exports compute on the CPU, wherever `torch.set_default_device` lets new tensors be made."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def new_tensors_on_cpu() -> Iterator[None]:
    """Let new tensors be made on the CPU meanwhile: by the network's own code, by torch.export, by what reads files.

    >>> with torch.device("meta"), new_tensors_on_cpu():
    ...     torch.zeros(1).device
    device(type='cpu')
    """
    if torch.get_default_device().type == "cpu":
        yield
        return
    with torch.device("cpu"):
        yield
