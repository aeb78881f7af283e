"""What an implementation of a fused convolution has to offer."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from strucspars.kernels.fused_conv import FusedConv

# For float32 on tensor cores: products of exact factors, or each factor as the sum of three TF32 numbers.
Float32Products = Literal["ieee", "tf32x3"]
# A fused convolution that is ready to run: input and residual, both channels last, to a result that is so too.
Run = Callable[[Tensor, Tensor | None], Tensor]


@dataclass(frozen=True, kw_only=True)
class Call:
    """What a fused convolution is called with: the shape of the input, and whether there is a residual."""

    input_shape: tuple[int, int, int, int]
    has_residual: bool
    dtype: torch.dtype
    device: torch.device
    float32_products: Float32Products = "ieee"


class Kernel(ABC):
    """An implementation of fused convolutions; `register_kernel` gives it a name.

    Results are exact up to the rounding of their precision, for all finite inputs.
    """

    @abstractmethod
    def supports(self, conv: FusedConv, call: Call) -> bool:
        """Whether it can compute this convolution on this device and in this precision."""

    @abstractmethod
    def options(self, conv: FusedConv, call: Call) -> Sequence[str]:
        """The configurations that are worth timing, as short texts; at least one."""

    @abstractmethod
    def prepare(self, conv: FusedConv, call: Call, option: str) -> Run:
        """The convolution in one configuration, with its weights brought into the form that the kernel reads."""
