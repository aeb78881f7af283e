"""Fused convolutions by the libraries that PyTorch brings: cuDNN, and cuBLAS for 1x1 convolutions."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import final

import torch
from torch import Tensor
from torch.nn import functional

from strucspars.kernels.fused_conv import FusedConv, pooled, with_orders_in_weight
from strucspars.kernels.kernel import Call, Kernel, Run
from strucspars.nn.layers import gather_channels


@contextmanager
def stock_settings() -> Iterator[None]:
    """cuDNN chooses its algorithms by timing them, and neither cuDNN nor cuBLAS rounds float32 factors to TF32.

    Process-wide, and restored at the end: what a CUDA graph captured stays as it is.
    """
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    former = cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32
    cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32 = True, False, False
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32 = former


@final
class StockConv(Kernel):
    """cuDNN's convolution with bias, residual and ReLU.

    `dense` has one group, with zeros between the groups of the layer, and both orders in its weight. `grouped` copies
    the channels that are read or written in another order.
    """

    def supports(self, conv: FusedConv, call: Call) -> bool:
        """Everything, on every device: elsewhere PyTorch's own operations take the place of cuDNN's."""
        return True

    def options(self, conv: FusedConv, call: Call) -> Sequence[str]:
        """Dense comes first: it is what the network without groups would run.

        On GPUs, 1x1 convolutions by groups are 5 to 20 times slower than dense ones.
        """
        is_slow = call.device.type == "cuda" and conv.kernel_size == (1, 1)
        return ("dense",) if conv.groups == 1 or is_slow else ("dense", "grouped")

    def prepare(self, conv: FusedConv, call: Call, option: str) -> Run:
        """The convolution with one group, or with as many as it has."""
        prepared = with_orders_in_weight(conv) if option == "dense" else conv
        in_order, out_order = prepared.in_order, prepared.out_order
        plain = replace(
            prepared,
            weight=prepared.weight.contiguous(memory_format=torch.channels_last),
            # Of the convolution, before its channels are gathered.
            bias=conv.bias if out_order is None else conv.bias[out_order.argsort()],
            relu=conv.relu and out_order is None,
            pool=conv.pool if out_order is None else None,
            in_order=None,
            out_order=None,
        )
        if in_order is None and out_order is None:
            return _runner(plain)
        run_plain = _runner(plain)

        def run(x: Tensor, residual: Tensor | None) -> Tensor:
            x = x if in_order is None else gather_channels(x, 1, in_order)
            if out_order is None:
                return run_plain(x, residual)
            y = _finished(gather_channels(run_plain(x, None), 1, out_order), residual, relu=conv.relu)
            return pooled(y, conv.pool)

        return run


def _runner(conv: FusedConv) -> Run:
    """A convolution without orders, in one call of cuDNN where it has ReLU."""
    window = (conv.stride, conv.padding, conv.dilation, conv.groups)
    # Without ReLU, adding a bias takes a pass over the result.
    bias = conv.bias if conv.bias.any() else None

    def run(x: Tensor, residual: Tensor | None) -> Tensor:
        if not (conv.relu and x.is_cuda and x.numel()):
            y = _finished(functional.conv2d(x, conv.weight, bias, *window), residual, relu=conv.relu)
        elif residual is None:
            y = torch.cudnn_convolution_relu(x, conv.weight, conv.bias, *window)
        else:
            y = torch.cudnn_convolution_add_relu(x, conv.weight, residual, 1.0, conv.bias, *window)
        return pooled(y, conv.pool)

    return run


def _finished(y: Tensor, residual: Tensor | None, *, relu: bool) -> Tensor:
    y = y if residual is None else y.add_(residual)
    return y.relu_() if relu else y


@final
class MatrixProduct(Kernel):
    """cuBLAS's matrix product with bias and ReLU, for 1x1 convolutions with no residual."""

    def supports(self, conv: FusedConv, call: Call) -> bool:
        """Convolutions that are one matrix product, with zeros between groups."""
        return conv.is_pointwise and conv.pool is None and not call.has_residual

    def options(self, conv: FusedConv, call: Call) -> Sequence[str]:
        """One."""
        return ("dense",)

    def prepare(self, conv: FusedConv, call: Call, option: str) -> Run:
        """The convolution as a product of positions times input channels with the weight."""
        weight = with_orders_in_weight(conv).weight.flatten(1).t()

        def run(x: Tensor, residual: Tensor | None) -> Tensor:
            rows = x.permute(0, 2, 3, 1)
            positions = rows.reshape(-1, conv.in_channels)
            product = torch._addmm_activation if conv.relu else torch.addmm
            y = product(conv.bias, positions, weight)
            return y.view(*rows.shape[:3], conv.out_channels).permute(0, 3, 1, 2)

        return run
