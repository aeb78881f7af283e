"""What an implementation of a fused convolution has to offer."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from strucspars.kernels.fused_conv import FusedConv, piece_table

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


def signature(conv: FusedConv, call: Call) -> str:
    """A text that differs wherever the time of a convolution may."""
    parts = [
        str(call.dtype).removeprefix("torch."),
        call.float32_products if call.dtype == torch.float32 else "",
        "x".join(map(str, call.input_shape)),
        f"to {conv.out_channels}",
        *(f"{name} {one}x{two}" for name, (one, two) in _window(conv).items()),
        f"groups {conv.groups}",
        "" if conv.in_order is None else f"reads pieces of {piece_table(conv.in_order, conv.in_width)[1]}",
        "" if conv.out_order is None else f"writes pieces of {piece_table(conv.out_order, conv.out_width)[1]}",
        "residual" if call.has_residual else "",
        "relu" if conv.relu else "",
        "" if conv.pool is None else str(conv.pool),
    ]
    return ", ".join(part for part in parts if part)


def _window(conv: FusedConv) -> dict[str, tuple[int, int]]:
    return {"kernel": conv.kernel_size, "stride": conv.stride, "padding": conv.padding, "dilation": conv.dilation}


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
