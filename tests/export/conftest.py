"""What the tests of exports share: grouped layers in random orders."""

from collections.abc import Callable

import pytest
import torch

import strucspars as ss

Shuffled = Callable[..., ss.ShuffledGroupConv2d]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def shuffled() -> Shuffled:
    """Makes grouped convolutions with random orders."""

    def layer(in_channels: int = 8, out_channels: int = 8, kernel_size: int = 3) -> ss.ShuffledGroupConv2d:
        grouped = ss.ShuffledGroupConv2d(in_channels, out_channels, kernel_size, padding=kernel_size // 2, groups=4)
        grouped.in_perm.copy_(torch.randperm(in_channels))
        grouped.out_inverse.copy_(torch.randperm(out_channels))
        return grouped

    return layer
