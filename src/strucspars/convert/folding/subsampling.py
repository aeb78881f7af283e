"""Strided convolutions of one position: what they leave out need not be gathered before them."""

import operator
from typing import cast

from torch import fx, nn

from strucspars.convert.folding.tracing import tensor_bytes, tensor_shape


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
    """Let a slice take the positions that a strided convolution looks at, and the convolution all that is left."""
    module = graph_module.get_submodule(str(node.target))
    steps = skipped_positions(module)
    if not steps:
        return
    (source,) = node.all_input_nodes
    leading = len(tensor_shape(source) or ()) - len(steps)
    index = (*[slice(None)] * leading, *[slice(None, None, step) for step in steps])
    with graph_module.graph.inserting_before(node):
        node.args = (graph_module.graph.call_function(operator.getitem, (source, index)),)
    cast(nn.Conv2d, module).stride = (1,) * len(steps)
