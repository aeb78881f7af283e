"""The kernels for fused convolutions by name."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from strucspars.core.registry import Registry
from strucspars.kernels.fused_conv import FusedConv, in_precision, reference
from strucspars.kernels.grouped_conv import GroupedConv
from strucspars.kernels.kernel import Call, Kernel, Run, signature
from strucspars.kernels.pooled_stem import PooledStem
from strucspars.kernels.row_conv import RowConv
from strucspars.kernels.stock import MatrixProduct, StockConv
from strucspars.kernels.tuning import Problem, random_tensor

KERNELS: Registry[Kernel] = Registry(
    "kernel",
    {
        "cudnn": StockConv(),
        "cublas": MatrixProduct(),
        "triton": GroupedConv(),
        "triton rows": RowConv(),
        "triton stem": PooledStem(),
    },
)


def register_kernel(name: str, kernel: Kernel) -> None:
    """Let `compile_for_gpu` time another implementation of fused convolutions too."""
    KERNELS.register(name, kernel)


@final
@dataclass(frozen=True, eq=False)
class ConvProblem(Problem):
    """A fused convolution and how it is called."""

    conv: FusedConv
    call: Call

    @property
    def dtype(self) -> torch.dtype:
        """Of input and result."""
        return self.call.dtype

    @property
    def signature(self) -> str:
        """Shapes, precision and everything that is fused; not the values."""
        return signature(self.conv, self.call)

    def inputs(self) -> tuple[Tensor | None, ...]:
        """Input and residual."""
        conv, (batch, _, *size) = self.conv, self.call.input_shape
        x = random_tensor(self.call.input_shape, self.call, seed=0)
        residual_shape = (batch, conv.out_channels, *conv.conv_size(*size))
        return x, random_tensor(residual_shape, self.call, seed=1) if self.call.has_residual else None

    def expected(self, inputs: tuple[Tensor | None, ...]) -> Tensor:
        """By PyTorch's operations."""
        x, residual = inputs
        assert x is not None
        exact = in_precision(self.conv, torch.float32)
        return reference(exact, x.float(), None if residual is None else residual.float())

    def implementations(self) -> Iterator[tuple[str, str]]:
        """All registered kernels that support the convolution, with their options."""
        for name in KERNELS.names():
            kernel = KERNELS.find(name)
            if kernel.supports(self.conv, self.call):
                yield from ((name, option) for option in kernel.options(self.conv, self.call))

    def prepare(self, kernel: str, option: str) -> Run:
        """One of them, ready to run."""
        return KERNELS.find(kernel).prepare(self.conv, self.call, option)
