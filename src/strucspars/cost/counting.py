"""Parameters and multiply-accumulates (MACs), counted over one forward pass.

Hooks count convolutions and linear layers that are called as modules: of any dimension, transposed and grouped ones
too. What a model computes by functions (`F.conv2d`, attention, matrix products) is not counted.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from strucspars.core.plan import GroupingPlan
from strucspars.cost.layers import LayerSize, layer_sizes, network_params
from strucspars.nn.batch_norms import is_batch_norm
from strucspars.nn.layers import channels
from strucspars.nn.names import unwrapped

# One tensor, or the positional arguments of `forward`.
ExampleInputs = torch.Tensor | tuple[Any, ...]

# Fitted to Table 1: with 4 operations per element (mean, deviation, scale, shift) its figures come out exactly.
PAPER_FLOPS_PER_BATCH_NORM_ELEMENT = 4


@dataclass(frozen=True)
class LayerCount:
    """Parameters of one layer, and its multiply-accumulates over all its calls."""

    params: int
    macs: int


@dataclass(frozen=True)
class NetworkCount:
    """Size of a network and cost of one forward pass.

    Attributes:
        layers: the count of every convolution and linear layer, by name, in network order.
        params: parameters of the whole network, shared ones once.
        batch_norm_elements: output elements of all batch norms.

    >>> count_macs(nn.Linear(4, 2), torch.zeros(1, 4)).macs
    8
    """

    layers: Mapping[str, LayerCount]
    params: int
    batch_norm_elements: int

    @property
    def macs(self) -> int:
        """Multiply-accumulates of all convolutions and linear layers."""
        return sum(layer.macs for layer in self.layers.values())

    @property
    def paper_flops(self) -> int:
        """The paper's FLOPs (Table 1): MACs, plus 4 for every element of a batch norm."""
        return self.macs + PAPER_FLOPS_PER_BATCH_NORM_ELEMENT * self.batch_norm_elements


@dataclass(frozen=True)
class ForwardTrace:
    """The calls of one forward pass.

    Attributes:
        positions: by layer, how often each of its weights multiplies; 0 for a layer that is not called.
        batch_norm_elements: output elements of all batch norms.
    """

    positions: Mapping[str, int]
    batch_norm_elements: int


def count_macs(model: nn.Module, example_inputs: ExampleInputs, plan: GroupingPlan | None = None) -> NetworkCount:
    """Count parameters and multiply-accumulates of a network, by layer and in total.

    Runs the model once, in eval mode and without gradients; modes, statistics and random state stay as they are. A
    layer that is called several times counts every call. The count is that of the whole batch: give one image for the
    usual figure per image.

    Args:
        model: dense, masked or converted.
        example_inputs: a tensor, or a tuple of the positional arguments of `forward`.
        plan: count the dense or masked layers that it names as the grouped layers they stand for.

    Raises:
        ValueError: the network cannot be called with the inputs, a layer is lazy, or the plan belongs to another
            network.

    >>> model = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16))
    >>> count = count_macs(model, torch.zeros(1, 8, 10, 10))
    >>> count.macs, count.paper_flops, count.params, count.layers["0"]
    (115200, 121600, 1200, LayerCount(params=1168, macs=115200))
    """
    with undisturbed(model):
        sizes = layer_sizes(model, plan)
        trace = trace_forward(model, sizes, example_inputs)
    layers = {
        name: LayerCount(params=size.params.after, macs=size.weight_params.after * trace.positions[name])
        for name, size in sizes.items()
    }
    return NetworkCount(layers, network_params(model, sizes).after, trace.batch_norm_elements)


def trace_forward(model: nn.Module, sizes: Mapping[str, LayerSize], example_inputs: ExampleInputs) -> ForwardTrace:
    """Call the model once and note how often each weight is used. The hooks are gone afterwards, also on errors."""
    # The network inside a wrapper: one for several processes waits for them, one for several devices calls copies.
    inner = unwrapped(model)
    arguments = fresh_arguments(arguments_of(inner, example_inputs))
    if inner is not model:
        arguments = _moved(arguments, inner)
    uses: Counter[nn.Module] = Counter()

    def count_layer(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: torch.Tensor) -> None:
        uses[module] += _uses_of_each_weight(module, args[0] if args else kwargs["input"], outputs)

    def count_elements(module: nn.Module, args: tuple[Any, ...], outputs: torch.Tensor) -> None:
        uses[module] += outputs.numel()

    batch_norms = [module for module in model.modules() if is_batch_norm(module)]
    with ExitStack() as hooks, uncompiled(model):
        # Ahead of the user's own hooks, which may change the output.
        for size in sizes.values():
            hooks.callback(size.module.register_forward_hook(count_layer, prepend=True, with_kwargs=True).remove)
        for module in batch_norms:
            hooks.callback(module.register_forward_hook(count_elements, prepend=True).remove)
        inner(*arguments)
    positions = {name: uses[size.module] for name, size in sizes.items()}
    return ForwardTrace(positions, sum(uses[module] for module in batch_norms))


def _moved(arguments: tuple[Any, ...], model: nn.Module) -> tuple[Any, ...]:
    """The inputs on the device of the network, where a wrapper such as `DataParallel` would bring them."""
    device = next((parameter.device for parameter in model.parameters()), None)
    moved: tuple[Any, ...] = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), arguments)
    return moved


def _uses_of_each_weight(module: nn.Module, inputs: torch.Tensor, outputs: torch.Tensor) -> int:
    """Positions of the output in one call, of the input if the layer is transposed."""
    out_channels, in_channels = channels(module)
    if isinstance(module, nn.modules.conv._ConvTransposeNd):
        return inputs.numel() // in_channels
    # A linear layer may have no outputs at all.
    return outputs.numel() // max(out_channels, 1)


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Eval mode without gradients; afterwards the mode of every module and the random state are as before."""
    modes = [(module, module.training) for module in model.modules()]
    cuda_devices = {tensor.device for tensor in (*model.parameters(), *model.buffers()) if tensor.is_cuda}
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=cuda_devices):
            # Not model.eval(): where a module overrides it, it may do more than set the mode.
            for module, _ in modes:
                module.training = False
            yield
    finally:
        for module, training in modes:
            module.training = training


# Where PyTorch keeps what `module.compile()` made, and the function that a compiled one was made from.
_COMPILED_CALL = "_compiled_call_impl"
_BEFORE_COMPILING = "_torchdynamo_orig_callable"


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Run modules that `torch.compile` has changed by their own code: compiled code does not call new hooks.

    Not `torch.compiler.set_stance`: it holds for all threads, in which other networks may train compiled, and threads
    that set it at the same time can leave it set for good.
    """
    before: list[tuple[dict[str, Any], dict[str, Any]]] = []
    try:
        for module in model.modules():
            own, forward = vars(module), _forward_before_compiling(module)
            if forward is None and _COMPILED_CALL not in own:
                continue
            before.append((own, {name: own[name] for name in (_COMPILED_CALL, "forward") if name in own}))
            own.pop(_COMPILED_CALL, None)
            if forward is not None:
                own["forward"] = forward
        yield
    finally:
        for own, kept in before:
            own.pop("forward", None)
            own.update(kept)


def _forward_before_compiling(module: nn.Module) -> Callable[..., Any] | None:
    """The function that a compiled `forward`, of the object or of its class, was made from; None if not compiled."""
    if "forward" in vars(module):
        # `torch.compile(module)` returns a wrapper with such a forward, too.
        return getattr(vars(module)["forward"], _BEFORE_COMPILING, None)
    # Not type(module).forward: scripted modules have none to give.
    function = getattr(inspect.getattr_static(type(module), "forward", None), _BEFORE_COMPILING, None)
    return None if function is None else MethodType(function, module)


def as_arguments(example_inputs: ExampleInputs) -> tuple[Any, ...]:
    """The positional arguments of `forward`, or a `ValueError` that says how to give them."""
    if isinstance(example_inputs, torch.Tensor):
        return (example_inputs,)
    if isinstance(example_inputs, tuple):
        return example_inputs
    raise ValueError(
        f"example_inputs must be a tensor or a tuple of the model's positional inputs, got "
        f"{type(example_inputs).__name__}; a single input that is no tensor goes into a tuple: (input,)"
    )


def arguments_of(model: nn.Module, example_inputs: ExampleInputs) -> tuple[Any, ...]:
    """The positional arguments, once it is known that `forward` takes them by position."""
    arguments = as_arguments(example_inputs)
    try:
        signature = inspect.signature(model.forward)
    except ValueError:
        # Scripted modules have none.
        return arguments
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise ValueError(
            f"forward of {type(model).__name__} cannot be called with example_inputs by position: {error}; wrap the "
            "network in a module whose forward takes them by position"
        ) from error
    return arguments


def fresh_arguments(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments with tensors of their own, in lists and dictionaries too: a network may write into its inputs.

    >>> images = torch.zeros(1)
    >>> (batch,) = fresh_arguments(({"images": images},))
    >>> batch["images"] += 1
    >>> images
    tensor([0.])
    """
    fresh: tuple[Any, ...] = pytree.tree_map_only(torch.Tensor, torch.clone, arguments)
    return fresh
