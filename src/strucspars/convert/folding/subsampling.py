"""Strided convolutions of one position: what they leave out need not be gathered before them."""

from collections.abc import Callable
from typing import cast

import torch
from torch import fx, nn
from torch.nn import functional

from strucspars.convert.folding.tracing import tensor_bytes, tensor_shape

POOLING: dict[int, Callable[..., torch.Tensor]] = {
    1: functional.max_pool1d,
    2: functional.max_pool2d,
    3: functional.max_pool3d,
}


def skipped_positions(module: nn.Module) -> tuple[int, ...]:
    """The strides of a convolution that looks at every so many positions alone; empty if it looks at all of them."""
    if not isinstance(module, nn.modules.conv._ConvNd):
        return ()
    # Which of the two paddings counts depends on the padding mode.
    is_padded = (module.padding != "valid" and any(module.padding)) or any(module._reversed_padding_repeated_twice)
    looks_at_one = all(size == 1 for size in module.kernel_size) and not is_padded
    return tuple(module.stride) if looks_at_one and any(step > 1 for step in module.stride) else ()


def read_bytes(node: fx.Node, module: nn.Module) -> int:
    """Size of what a gather before the layer has to copy."""
    (source,) = node.all_input_nodes
    steps, shape = skipped_positions(module), tensor_shape(source)
    assert shape is not None
    size = tensor_bytes(source)
    for step, positions in zip(steps, shape[len(shape) - len(steps) :], strict=True):
        size = size // positions * -(-positions // step)
    return size


def subsample_first_(graph_module: fx.GraphModule, node: fx.Node) -> None:
    """Let pooling take the positions that a strided convolution looks at, and the convolution all that is left."""
    module = graph_module.get_submodule(str(node.target))
    steps = skipped_positions(module)
    if not steps:
        return
    (source,) = node.all_input_nodes
    # Pooling single positions, not a slice: runtimes pool in the layout that their convolutions use.
    pool = POOLING[len(steps)]
    with graph_module.graph.inserting_before(node):
        node.args = (graph_module.graph.call_function(pool, (source,), {"kernel_size": 1, "stride": steps}),)
    cast(nn.Conv2d, module).stride = (1,) * len(steps)
