"""Parameters and multiply-accumulates (MACs), counted over one forward pass.

Hooks see modules: convolutions and linear layers that are called as such, of any dimension, transposed ones and our
grouped ones too. What a model computes by functions (`F.conv2d`, attention, matrix products) is not counted.
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
from strucspars.cost.layers import LayerForm, layer_forms, network_params
from strucspars.nn.batch_norms import is_batch_norm
from strucspars.nn.layers import channels
from strucspars.nn.names import unwrapped

# Where PyTorch keeps what `module.compile()` made, and what a compiled function was before.
_COMPILED_CALL = "_compiled_call_impl"
_BEFORE_COMPILING = "_torchdynamo_orig_callable"


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Let modules that `torch.compile` has changed run their own code meanwhile: what is compiled calls no new hooks.

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
    """What a compiled `forward` was, of the object or of its class; None if it is not compiled."""
    if "forward" in vars(module):
        # That of the wrapper which torch.compile(module) returns, too.
        return getattr(vars(module)["forward"], _BEFORE_COMPILING, None)
    # Not type(module).forward: scripted modules have none to give.
    function = getattr(inspect.getattr_static(type(module), "forward", None), _BEFORE_COMPILING, None)
    return None if function is None else MethodType(function, module)


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
    """What a network holds, and what one forward pass of it computes.

    Attributes:
        layers: the count of every convolution and linear layer, by name, in network order.
        params: parameters of the whole network, shared ones once.
        batch_norm_elements: elements that batch norms put out.

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
    """What one forward pass called.

    Attributes:
        positions: by layer, how often each of its weights multiplies; 0 for a layer that is not called.
        batch_norm_elements: elements that batch norms put out.
    """

    positions: Mapping[str, int]
    batch_norm_elements: int


def count_macs(model: nn.Module, example_inputs: ExampleInputs, plan: GroupingPlan | None = None) -> NetworkCount:
    """Count parameters and multiply-accumulates of a network, by layer and in all.

    Runs the model once, in eval mode and without gradients; modes, statistics and random state are as before. A module
    that is called several times counts every call. The count is that of the whole batch: give one image for the usual
    figure per image.

    Args:
        model: dense, masked or converted.
        example_inputs: a tensor, or a tuple of the positional arguments of `forward`.
        plan: count its layers, dense or masked, as the grouped layers they stand for.

    Raises:
        ValueError: the inputs are of another type, or the network takes them by keyword only; a layer is lazy, or the
            plan belongs to another network.

    >>> model = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16))
    >>> count = count_macs(model, torch.zeros(1, 8, 10, 10))
    >>> count.macs, count.paper_flops, count.params, count.layers["0"]
    (115200, 121600, 1200, LayerCount(params=1168, macs=115200))
    """
    with undisturbed(model):
        forms = layer_forms(model, plan)
        trace = trace_forward(model, forms, example_inputs)
    layers = {
        name: LayerCount(params=form.params.after, macs=form.weight_params.after * trace.positions[name])
        for name, form in forms.items()
    }
    return NetworkCount(layers, network_params(model, forms).after, trace.batch_norm_elements)


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Eval mode without gradients; afterwards the mode of every module and the random state are as before.

    Raises:
        ValueError: the network was called by position, and takes inputs by keyword only.
    """
    modes = [(module, module.training) for module in model.modules()]
    cuda_devices = {tensor.device for tensor in (*model.parameters(), *model.buffers()) if tensor.is_cuda}
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=cuda_devices):
            # Not model.eval(): where a module overrides it, it may do more than set the mode.
            for module, _ in modes:
                module.training = False
            yield
    except TypeError as error:
        if names := _inputs_by_keyword(model):
            raise ValueError(
                f"forward of {type(model).__name__} takes {', '.join(map(repr, names))} by keyword only, and example "
                "inputs are given by position; wrap the network in a module whose forward takes them by position"
            ) from error
        raise
    finally:
        for module, training in modes:
            module.training = training


def _inputs_by_keyword(model: nn.Module) -> list[str]:
    """The arguments of `forward` for which it cannot be called by position; none if it can be."""
    parameters = inspect.signature(model.forward).parameters.values()
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
    if all(parameter.kind in kinds for parameter in parameters):
        return [parameter.name for parameter in parameters]
    needed = (parameter for parameter in parameters if parameter.default is inspect.Parameter.empty)
    return [parameter.name for parameter in needed if parameter.kind is inspect.Parameter.KEYWORD_ONLY]


def trace_forward(model: nn.Module, forms: Mapping[str, LayerForm], example_inputs: ExampleInputs) -> ForwardTrace:
    """Call the model once and note how often each weight is used. The hooks are gone afterwards, also on errors."""
    arguments = as_arguments(example_inputs)
    layers = [form.module for form in forms.values()]
    batch_norms = [module for module in model.modules() if is_batch_norm(module)]
    uses: Counter[nn.Module] = Counter()

    def count_layer(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: torch.Tensor) -> None:
        uses[module] += _uses_of_each_weight(module, args[0] if args else kwargs["input"], outputs)

    def count_elements(module: nn.Module, args: tuple[Any, ...], outputs: torch.Tensor) -> None:
        uses[module] += outputs.numel()

    with ExitStack() as hooks, uncompiled(model):
        # Ahead of the user's own hooks, which may change the output.
        for module in layers:
            hooks.callback(module.register_forward_hook(count_layer, prepend=True, with_kwargs=True).remove)
        for module in batch_norms:
            hooks.callback(module.register_forward_hook(count_elements, prepend=True).remove)
        # What is inside of a wrapper: one for several processes waits for them, one for several devices calls copies.
        inside = unwrapped(model)
        inside(*(fresh_arguments(arguments) if inside is model else _moved(fresh_arguments(arguments), inside)))
    positions = {name: uses[form.module] for name, form in forms.items()}
    return ForwardTrace(positions, sum(uses[module] for module in batch_norms))


def _moved(arguments: tuple[Any, ...], model: nn.Module) -> tuple[Any, ...]:
    """The inputs on the device of the network, where wrappers bring them."""
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
