"""The kernels by name."""

from collections.abc import Iterator

from strucspars.core.registry import Registry
from strucspars.kernels.fused_conv import FusedConv
from strucspars.kernels.grouped_conv import GroupedConv
from strucspars.kernels.kernel import Call, Kernel
from strucspars.kernels.library import LibraryConv, MatrixProduct
from strucspars.kernels.pooled_stem import PooledStem

KERNELS: Registry[Kernel] = Registry(
    "kernel",
    {"cudnn": LibraryConv(), "cublas": MatrixProduct(), "triton": GroupedConv(), "triton stem": PooledStem()},
)


def register_kernel(name: str, kernel: Kernel) -> None:
    """Let `compile_for_gpu` time another implementation of fused convolutions too."""
    KERNELS.register(name, kernel)


def implementations(conv: FusedConv, call: Call) -> Iterator[tuple[str, str]]:
    """Every kernel that supports the convolution with each of its options, by name."""
    for name in KERNELS.names():
        kernel = KERNELS.find(name)
        if kernel.supports(conv, call):
            yield from ((name, option) for option in kernel.options(conv, call))
