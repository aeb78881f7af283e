"""Parameters and multiply-accumulates (MACs) of the layers of a network, before grouping and after.

Hooks count convolutions and linear layers of every kind over one forward pass. What a model computes by functions
(`F.conv2d`, attention, matrix products) is not counted.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from strucspars.core.narrowing import full_widths
from strucspars.core.plan import GroupingPlan
from strucspars.nn.batch_norms import is_batch_norm
from strucspars.nn.layers import LAYERS_WITH_CHANNELS, channels, forms_of, is_grouped
from strucspars.nn.names import bare_modules, under_first_names, unwrapped
from strucspars.nn.narrowing import (
    full_shape,
    is_depthwise,
    module_widths,
    narrowed_from,
    own_groups,
    shape_with,
    weight_size,
)

# One tensor, or the positional arguments of `forward`.
ExampleInputs = torch.Tensor | tuple[Any, ...]

# Fitted to Table 1: with 4 operations per element (mean, deviation, scale, shift) its figures come out exactly.
PAPER_FLOPS_PER_BATCH_NORM_ELEMENT = 4


@dataclass(frozen=True)
class BeforeAfter:
    """A number before grouping, and after."""

    before: int
    after: int

    @property
    def removed_fraction(self) -> float:
        """Fraction that grouping removes; 0 if there was nothing before."""
        return (self.before - self.after) / self.before if self.before else 0.0


@dataclass(frozen=True)
class LayerSize:
    """One convolution or linear layer; each of its `weight_params` multiplies once at every output position.

    `channels` are the (outputs, inputs) that stay, where some go.
    """

    module: nn.Module
    weight_shape: tuple[int, ...]
    groups: BeforeAfter
    weight_params: BeforeAfter
    params: BeforeAfter
    channels: tuple[int, int] | None = None


@dataclass(frozen=True)
class LayerCount:
    """Parameters of one layer, and its multiply-accumulates over all its calls."""

    params: int
    macs: int


@dataclass(frozen=True)
class NetworkCount:
    """Size of a network and cost of one forward pass, with the count of every layer by name, in network order."""

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


def count_macs(model: nn.Module, example_inputs: ExampleInputs, plan: GroupingPlan | None = None) -> NetworkCount:
    """Count parameters and multiply-accumulates of a network, by layer and in total.

    Runs the model once, in eval mode and without gradients; modes, statistics and random state do not change. A layer
    that is called several times counts every call. The count is that of the whole batch: give one image for the usual
    figure per image.

    Args:
        example_inputs: a tensor, or a tuple of the positional arguments of `forward`.
        plan: count the dense or masked layers that it names as the grouped layers they would become.

    >>> model = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16))
    >>> count = count_macs(model, torch.zeros(1, 8, 10, 10))
    >>> count.macs, count.paper_flops, count.params, count.layers["0"]
    (115200, 121600, 1200, LayerCount(params=1168, macs=115200))
    """
    with undisturbed(model):
        sizes = layer_sizes(model, plan)
        positions, elements = trace_forward(model, sizes, example_inputs, plan)
    layers = {
        name: LayerCount(params=size.params.after, macs=size.weight_params.after * positions[name])
        for name, size in sizes.items()
    }
    return NetworkCount(layers, network_params(model, sizes, plan).after, elements.after)


def layer_sizes(model: nn.Module, plan: GroupingPlan | None = None) -> dict[str, LayerSize]:
    """Every convolution and linear layer by its first name; planned ones as the grouped layers they would be."""
    refuse_lazy_modules(model)
    plan = under_first_names(model, plan or GroupingPlan({}))
    sizes = {
        name: _layer_size(name, module, plan)
        for name, module in bare_modules(model)
        if isinstance(module, LAYERS_WITH_CHANNELS)
    }
    plan.check_matches({name: size.weight_shape for name, size in sizes.items()})
    plan.check_narrowed(dict(bare_modules(model)))
    return sizes


def weight_of(module: nn.Module) -> torch.Tensor:
    """The current weight of a convolution or linear layer."""
    return cast(nn.Conv2d, module).weight


def network_params(model: nn.Module, sizes: Mapping[str, LayerSize], plan: GroupingPlan | None = None) -> BeforeAfter:
    """Parameters of the whole network before and after, those of its layers and norms; shared ones once."""
    changed = {size.module: size.params for size in sizes.values()}
    for module, widths in norm_widths(model, plan).items():
        per_channel = (
            sum(parameter.numel() for parameter in module.parameters(recurse=False)) // module_widths(module)[0]
        )
        changed[module] = BeforeAfter(per_channel * widths.before, per_channel * widths.after)
    removed = {module: params.before - params.after for module, params in changed.items()}
    present = sum(parameter.numel() for parameter in model.parameters())
    before = present + sum(count for module, count in removed.items() if is_converted(module))
    return BeforeAfter(before, before - sum(removed.values()))


def norm_widths(model: nn.Module, plan: GroupingPlan | None = None) -> dict[nn.Module, BeforeAfter]:
    """Channels of the norms and the like that have lost some, or lose some by a plan."""
    plan = under_first_names(model, plan or GroupingPlan({}))
    found = {}
    for name, module in bare_modules(model):
        if isinstance(module, LAYERS_WITH_CHANNELS):
            continue
        record, kept = narrowed_from(module), plan.kept_sides(name).outputs
        if record is not None:
            found[module] = BeforeAfter(full_widths(record.sides, record.classes)[0], module_widths(module)[0])
        elif kept is not None:
            found[module] = BeforeAfter(module_widths(module)[0], len(kept))
    return found


def is_converted(module: nn.Module) -> bool:
    """Whether the module was dense or wider once; not those with groups from the network's own code."""
    return is_grouped(module) or narrowed_from(module) is not None


def _layer_size(name: str, module: nn.Module, plan: GroupingPlan) -> LayerSize:
    layer = plan.layers.get(name)
    if layer is not None and forms_of(module) is None:
        raise ValueError(f"layer {name!r}: {type(module).__name__} cannot be grouped; leave it out of the plan")
    weight, present = weight_of(module), vars(module).get("groups", 1)
    if is_converted(module):
        shape = full_shape(module, name)
        groups = BeforeAfter(own_groups(module), present)
        weight_params = BeforeAfter(weight_size(module, shape), weight.numel())
        bias, stay = BeforeAfter(shape[0], len(weight)), channels(module)
        shape = (shape[0], shape[1] // groups.before, *shape[2:])
    else:
        shape, kept = tuple(weight.shape), plan.kept_sides(name)
        wide = (*channels(module), *shape[2:])
        narrow = shape_with(wide, kept, depthwise=is_depthwise(module))
        planned = 1 if layer is None else layer.num_groups
        groups = BeforeAfter(present, narrow[0] if is_depthwise(module) else present * planned)
        weight_params = BeforeAfter(weight.numel(), weight_size(module, narrow) // planned)
        bias, stay = BeforeAfter(shape[0], narrow[0]), (narrow[0], narrow[1])
    others = sum(parameter.numel() for parameter in module.parameters()) - weight.numel()
    if others != len(weight):
        # None, or not a bias.
        bias = BeforeAfter(others, others)
    params = BeforeAfter(bias.before + weight_params.before, bias.after + weight_params.after)
    is_narrower = narrowed_from(module) is not None or name in plan.narrowed
    return LayerSize(module, shape, groups, weight_params, params, stay if is_narrower else None)


def refuse_lazy_modules(model: nn.Module) -> None:
    """Raise a `ValueError` that names the first module without a shape."""
    for name, module in bare_modules(model):
        if any(is_lazy(tensor) for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))):
            raise ValueError(f"layer {name!r}: {type(module).__name__} has no shape yet; run the model once first")


def trace_forward(
    model: nn.Module, sizes: Mapping[str, LayerSize], example_inputs: ExampleInputs, plan: GroupingPlan | None = None
) -> tuple[dict[str, int], BeforeAfter]:
    """Call the model once; returns how often each layer's weights multiply, and the output elements of batch norms."""
    # Not the wrapper: DistributedDataParallel waits for other processes, DataParallel calls copies.
    inner = unwrapped(model)
    arguments = fresh_arguments(arguments_of(inner, example_inputs))
    if inner is not model:
        # On the network's device, to which a wrapper such as `DataParallel` would move them.
        device = next((parameter.device for parameter in inner.parameters()), None)
        arguments = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), arguments)
    uses: Counter[nn.Module] = Counter()

    def count_layer(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: torch.Tensor) -> None:
        # Positions of the output, of the input if the layer is transposed. A linear layer may have no outputs at all.
        is_transposed = isinstance(module, nn.modules.conv._ConvTransposeNd)
        tensor = (args[0] if args else kwargs["input"]) if is_transposed else outputs
        uses[module] += tensor.numel() // max(channels(module)[1 if is_transposed else 0], 1)

    def count_elements(module: nn.Module, args: tuple[Any, ...], outputs: torch.Tensor) -> None:
        uses[module] += outputs.numel()

    batch_norms = [module for module in model.modules() if is_batch_norm(module)]
    with ExitStack() as hooks, uncompiled(model):
        # Before the user's hooks, which may change the output.
        for size in sizes.values():
            hooks.callback(size.module.register_forward_hook(count_layer, prepend=True, with_kwargs=True).remove)
        for module in batch_norms:
            hooks.callback(module.register_forward_hook(count_elements, prepend=True).remove)
        inner(*arguments)
    before = after = sum(uses[module] for module in batch_norms)
    for module, widths in norm_widths(model, plan).items():
        # The others are no batch norms, and have no uses.
        per_channel = uses[module] // module_widths(module)[0]
        before += per_channel * widths.before - uses[module]
        after += per_channel * widths.after - uses[module]
    return {name: uses[size.module] for name, size in sizes.items()}, BeforeAfter(before, after)


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
    that set it at the same time may never restore it.
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


def arguments_of(model: nn.Module, example_inputs: ExampleInputs) -> tuple[Any, ...]:
    """The positional arguments of `forward`, or a `ValueError` unless it takes them by position."""
    if not isinstance(example_inputs, torch.Tensor | tuple):
        raise ValueError(
            f"example_inputs must be a tensor or a tuple of the model's positional inputs, got "
            f"{type(example_inputs).__name__}; a single input that is no tensor goes into a tuple: (input,)"
        )
    arguments = (example_inputs,) if isinstance(example_inputs, torch.Tensor) else example_inputs
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
    """The arguments with copied tensors, in lists and dictionaries too: a network may write into its inputs."""
    fresh: tuple[Any, ...] = pytree.tree_map_only(torch.Tensor, torch.clone, arguments)
    return fresh
