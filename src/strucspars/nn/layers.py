"""The layers of a grouped network: input shuffle, group convolution, output shuffle (Sec. 3.2, Fig. 1), or masked.

A module changes its form in place by taking on another class: its name, hooks, mode, device and the identity of its
parameters, which optimizers hold on to, all stay.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self, cast

import torch
from torch import fx, nn
from torch.nn import functional
from torch.nn.parameter import is_lazy

from strucspars.core.hierarchy import connection_mask
from strucspars.core.permutation import checked_permutation, inverse
from strucspars.core.plan import LayerPlan
from strucspars.nn.names import bare_modules

# Every layer whose channels could be divided into groups: those that can be grouped, and those that get a reason.
LAYERS_WITH_CHANNELS = (nn.modules.conv._ConvNd, nn.Linear)


def grouped_weight(weight: torch.Tensor, layer: LayerPlan) -> torch.Tensor:
    """The kept entries of every row: `(C_out, C_in, *kernel)` to `(C_out, C_in / G, *kernel)`.

    Row `j` of the result belongs to output channel `j`, as before; its columns are the inputs of the channel's group,
    in the order of `in_perm`. The memory format stays.
    """
    rows = torch.arange(len(weight), device=weight.device)[:, None]
    return like_memory_format(weight[rows, _kept_inputs(layer, weight.device)], weight)


def dense_weight(grouped: torch.Tensor, layer: LayerPlan) -> torch.Tensor:
    """The dense weight of the same function, zero outside the groups. The memory format stays."""
    weight = like_memory_format(grouped.new_zeros(layer.weight_shape), grouped)
    weight[torch.arange(len(weight), device=weight.device)[:, None], _kept_inputs(layer, weight.device)] = grouped
    return weight


def pruned_weight(weight: torch.Tensor, layer: LayerPlan) -> torch.Tensor:
    """The dense weight with zeros outside the groups."""
    return dense_weight(grouped_weight(weight, layer), layer)


def merged_weight(weight: torch.Tensor, num_groups: int, merged_groups: int) -> torch.Tensor:
    """The weight `(C_out, C_in / G', *kernel)` of fewer groups G' in place of `(C_out, C_in / G, *kernel)`."""
    together = num_groups // merged_groups
    out_width, in_width, *kernel = weight.shape[0] // num_groups, *weight.shape[1:]
    blocks = weight.reshape(merged_groups, together, out_width, in_width, *kernel)
    merged = weight.new_zeros(merged_groups, together, out_width, together, in_width, *kernel)
    for place in range(together):
        merged[:, place, :, place] = blocks[:, place]
    return like_memory_format(merged.reshape(weight.shape[0], together * in_width, *kernel), weight)


def _kept_inputs(layer: LayerPlan, device: torch.device) -> torch.Tensor:
    """The input channels that each output channel is connected to: `(C_out, C_in / G)`."""
    groups = inverse(layer.out_perm) // (layer.weight_shape[0] // layer.num_groups)
    return torch.tensor(layer.in_perm.reshape(layer.num_groups, -1)[groups], device=device)


def kept_connections(layer: LayerPlan) -> torch.Tensor:
    """U_g in the original channel order: boolean `(C_out, C_in)`, on the CPU."""
    out_channels, in_channels = layer.weight_shape[:2]
    mask = connection_mask(out_channels, in_channels, layer.group_level)
    return torch.from_numpy(mask[inverse(layer.out_perm)][:, inverse(layer.in_perm)])


ORDER_NAMES = ("in_perm", "out_inverse")


class _Shuffled(nn.Module):
    """A layer by groups that shuffles channels before and after it computes. Starts with both orders unchanged.

    The bias and the rows of the weight are in the original order of the output channels, so code that reads or scales
    them per channel, to fuse a batch norm for instance, works unchanged.

    The orders are saved and moved with the layer but are not buffers, because libraries average buffers, and an average
    of channel indices is not a permutation. `buffers()` leaves them out, and `state_dict()` has copies.
    """

    in_perm: torch.Tensor
    out_inverse: torch.Tensor

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        out_channels, in_channels = channels(self)
        device = self.get_parameter("weight").device
        self.in_perm = torch.arange(in_channels, device=device)
        self.out_inverse = torch.arange(out_channels, device=device)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Called by `to`, `cuda`, `share_memory` and similar methods."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # untyped in torch
        for name, order in channel_orders(self).items():
            moved = fn(order)
            # Orders keep their precision and values; only those on the meta device take what `to_empty` allocated.
            setattr(self, name, (moved if order.is_meta else order).to(moved.device, order.dtype))
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.update({prefix + name: order.clone() for name, order in channel_orders(self).items()})

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        others = {key: value for key, value in state_dict.items() if key.removeprefix(prefix) not in ORDER_NAMES}
        super()._load_from_state_dict(others, prefix, *arguments)
        local_metadata, strict, missing_keys, _, error_msgs = arguments
        for name, order in channel_orders(self).items():
            key, saved = prefix + name, state_dict.get(prefix + name)
            if saved is None:
                missing_keys += [key] if strict else []
            elif damage := _damage(key, saved, len(order)):
                error_msgs.append(damage)
            elif local_metadata.get("assign_to_params_buffers", False):
                setattr(self, name, saved.to(torch.int64))
            elif not saved.is_meta:
                # In place: a captured CUDA graph reads this memory.
                order.copy_(saved)


def _damage(key: str, saved: torch.Tensor, length: int) -> str | None:
    """Why a tensor of a state is not a channel order; None if it is one."""
    if saved.shape != (length,):
        return f"size mismatch for {key}: the state has {tuple(saved.shape)}, the layer needs {(length,)}"
    if saved.is_meta:
        return None
    try:
        checked_permutation(saved.to("cpu", torch.int64).numpy(), length, name=key)
    except ValueError as error:
        return f"{error}; were buffers averaged? Load a state of the network itself, or average its parameters only."
    return None


class _ShuffledConv(_Shuffled, nn.modules.conv._ConvNd):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Shuffle, convolve by groups, shuffle back. Without `super()`, which TorchScript cannot read."""
        channel_dim = -1 - len(self.kernel_size)  # from the end: there may be no batch
        shuffled = gather_channels(input, channel_dim, self.in_perm)
        weight = in_group_order(self.weight, self.out_inverse)
        bias = self.bias
        if bias is not None:
            bias = in_group_order(bias, self.out_inverse)
        convolved: torch.Tensor = self._conv_forward(shuffled, weight, bias)
        return gather_channels(convolved, channel_dim, self.out_inverse)


class ShuffledGroupConv1d(_ShuffledConv, nn.Conv1d):
    """`nn.Conv1d` by groups between two channel shuffles."""


class ShuffledGroupConv2d(_ShuffledConv, nn.Conv2d):
    """`nn.Conv2d` by groups between two channel shuffles; takes the arguments of `nn.Conv2d`.

    `convert_` makes these. Built by hand, it starts with unchanged orders: `in_perm`, in which the input channels are
    read, and `out_inverse`, the place of every output channel in the order of the groups. Both are in the layer's
    state but are no buffers: averaging weights leaves them alone.

    >>> layer = ShuffledGroupConv2d(8, 16, 3, groups=4, padding=1)
    >>> layer(torch.zeros(1, 8, 5, 5)).shape, layer.weight.shape
    (torch.Size([1, 16, 5, 5]), torch.Size([16, 2, 3, 3]))
    """


class ShuffledGroupConv3d(_ShuffledConv, nn.Conv3d):
    """`nn.Conv3d` by groups between two channel shuffles."""


class GroupLinear(nn.Linear):
    """`nn.Linear` whose weight `(C_out, C_in / G)` connects only channels of the same group."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True, *, groups: int = 1) -> None:
        super().__init__(in_features // groups, out_features, bias)
        self.in_features, self.groups = in_features, groups

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Multiply every group of the inputs by its own block of the weight."""
        return _plus_bias(group_linear(input, self.weight, self.groups), self.bias)

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        return f"{super().extra_repr()}, groups={self.groups}"


class ShuffledGroupLinear(_Shuffled, GroupLinear):
    """`nn.Linear` by groups between two channel shuffles."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Shuffle, compute by groups, shuffle back."""
        shuffled = gather_channels(input, -1, self.in_perm)
        computed = group_linear(shuffled, in_group_order(self.weight, self.out_inverse), self.groups)
        return _plus_bias(gather_channels(computed, -1, self.out_inverse), self.bias)


def group_linear(input: torch.Tensor, weight: torch.Tensor, num_groups: int) -> torch.Tensor:
    """`functional.linear` by groups: (..., C_in), weight (C_out, C_in / G) -> (..., C_out)."""
    in_width = weight.shape[1]
    by_group = torch.unflatten(input, -1, (num_groups, in_width))
    blocks = weight.view(num_groups, -1, in_width)
    return torch.einsum("...gi,goi->...go", by_group, blocks).flatten(-2)


def _plus_bias(outputs: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return outputs if bias is None else outputs + bias.to(outputs.dtype)


@fx.wrap  # one call in graphs that others trace: tracing cannot follow its conditions
def gather_channels(features: torch.Tensor, dim: int, order: torch.Tensor) -> torch.Tensor:
    """The channels in this order, in the same memory format; `index_select` alone would lose channels last."""
    if order.device != features.device:  # `nn.DataParallel` copies only parameters and buffers to its devices
        order = order.to(features.device)
    channels_last = features.movedim(dim, -1)
    if channels_last.is_contiguous() and not features.is_contiguous():
        return channels_last.index_select(-1, order).movedim(-1, dim)
    return features.index_select(dim, order)


@fx.wrap
def in_group_order(tensor: torch.Tensor, out_inverse: torch.Tensor) -> torch.Tensor:
    """The rows of a weight, or the entries of a bias, group after group, in the memory format they had."""
    # The private name: mypy needs a comment for `torch.jit.is_scripting`, and TorchScript rejects that comment.
    if not torch._jit_internal.is_scripting() and not torch.compiler.is_compiling():
        _refuse_stacked_weights(tensor, out_inverse)
    if out_inverse.device != tensor.device:
        out_inverse = out_inverse.to(tensor.device)
    # A scatter needs no second order, its gradient is a plain gather, and the memory format stays.
    return torch.empty_like(tensor).index_copy_(0, out_inverse, tensor)


def _refuse_stacked_weights(weight: torch.Tensor, order: torch.Tensor) -> None:
    """Refuse `torch.func.vmap` over the weights of several networks unless their orders are stacked too."""
    if _is_stacked(weight) and not _is_stacked(order):
        raise ValueError(
            "the weights of several grouped networks are stacked, but not their channel orders, which may differ; "
            "stack every 'in_perm' and 'out_inverse' of their state_dict() too and give them to functional_call, or "
            "call the networks one after the other"
        )


def _is_stacked(tensor: torch.Tensor) -> bool:
    while torch._C._functorch.is_gradtrackingtensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return torch._C._functorch.is_batchedtensor(tensor)


class _MaskedConv(nn.modules.conv._ConvNd):
    mask: torch.Tensor

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        convolved: torch.Tensor = self._conv_forward(input, self.weight * self.mask, self.bias)
        return convolved


class MaskedConv1d(_MaskedConv, nn.Conv1d):
    """`nn.Conv1d` whose weight is multiplied by a mask."""


class MaskedConv2d(_MaskedConv, nn.Conv2d):
    """`nn.Conv2d` whose weight is multiplied by a mask."""


class MaskedConv3d(_MaskedConv, nn.Conv3d):
    """`nn.Conv3d` whose weight is multiplied by a mask."""


class MaskedLinear(nn.Linear):
    """`nn.Linear` whose weight is multiplied by a mask."""

    mask: torch.Tensor

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Compute the dense layer without the pruned connections."""
        return functional.linear(input, self.weight * self.mask, self.bias)


@dataclass(frozen=True)
class LayerForms:
    """The types that a layer has over its life; `unshuffled` is grouped, with the shuffles in the weights."""

    dense: type[nn.Module]
    masked: type[nn.Module]
    grouped: type[nn.Module]
    unshuffled: type[nn.Module]


FORMS = (
    LayerForms(nn.Conv1d, MaskedConv1d, ShuffledGroupConv1d, nn.Conv1d),
    LayerForms(nn.Conv2d, MaskedConv2d, ShuffledGroupConv2d, nn.Conv2d),
    LayerForms(nn.Conv3d, MaskedConv3d, ShuffledGroupConv3d, nn.Conv3d),
    LayerForms(nn.Linear, MaskedLinear, ShuffledGroupLinear, GroupLinear),
)
GROUPABLE_TYPES = tuple(forms.dense for forms in FORMS)
MASKED_TYPES = tuple(forms.masked for forms in FORMS)
DENSE_AND_GROUPED_TYPES = (*GROUPABLE_TYPES, *(forms.grouped for forms in FORMS))
_FORMS_BY_TYPE = {kind: forms for forms in FORMS for kind in (forms.dense, forms.masked, forms.grouped)}


def forms_of(module: nn.Module) -> LayerForms | None:
    """The forms of a dense, masked or grouped layer; None for anything else, subclasses too."""
    return _FORMS_BY_TYPE.get(type(module))


def is_grouped(module: nn.Module) -> bool:
    """Whether the layer is grouped by strucspars."""
    return isinstance(module, _Shuffled)


def is_masked(module: nn.Module) -> bool:
    """Whether the layer is dense with pruned connections at zero."""
    return type(module) in MASKED_TYPES


def channels(module: nn.Module) -> tuple[int, int]:
    """(output, input) channels of a convolution or linear layer."""
    if isinstance(module, nn.Linear):
        return module.out_features, module.in_features
    convolution = cast(nn.Conv2d, module)
    return convolution.out_channels, convolution.in_channels


def groups_of_weight(module: nn.Module) -> int:
    """In how many groups a layer connects its channels, by the shape of its weight."""
    in_channels = channels(module)[1]
    # A linear layer may have no inputs at all.
    return in_channels // module.get_parameter("weight").shape[1] if in_channels else 1


def dense_shape(module: nn.Module, name: str = "") -> tuple[int, ...]:
    """Shape of the weight that the layer has, or had before it was grouped."""
    weight = module._parameters.get("weight")
    if weight is None or is_lazy(weight):
        raise ValueError(
            f"layer {name or type(module).__name__!r} has no plain weight: it is lazy, or recomputed before every call "
            "(weight or spectral norm, pruning); run the model once, or remove the parametrisation"
        )
    return (*channels(module), *weight.shape[2:])


def check_plain_weights(model: nn.Module) -> None:
    """Raise a `ValueError` where something recomputes the weight of a grouped layer: it belongs on the dense one."""
    for name, module in bare_modules(model):
        if is_grouped(module):
            dense_shape(module, name)


def planned_orders(layer: LayerPlan) -> dict[str, torch.Tensor]:
    """The orders that a plan gives a layer, by name, on the CPU."""
    orders = {"in_perm": layer.in_perm, "out_inverse": inverse(layer.out_perm)}
    return {name: torch.tensor(order, device="cpu") for name, order in orders.items()}


def channel_orders(module: nn.Module) -> dict[str, torch.Tensor]:
    """The orders that a grouped layer has, by the same names."""
    return {name: getattr(module, name) for name in ORDER_NAMES}


def is_grouped_as(module: nn.Module, layer: LayerPlan) -> bool:
    """Whether a grouped layer is the one that the plan makes; on the meta device orders have no values to compare."""
    present = channel_orders(module)
    same_orders = all(
        present[name].is_meta or torch.equal(present[name].cpu(), order)
        for name, order in planned_orders(layer).items()
    )
    return same_orders and cast(nn.Conv2d, module).groups == layer.num_groups


def group_module_(module: nn.Module, layer: LayerPlan) -> None:
    """Turn a dense layer into the grouped one of the plan, in place: a smaller weight, and the grouped class."""
    weight = module.get_parameter("weight")
    replace_values_(weight, lambda tensor: grouped_weight(tensor, layer))
    flush_denormals_(weight.data)
    cast(nn.Conv2d, module).groups = layer.num_groups
    module.__class__ = _FORMS_BY_TYPE[type(module)].grouped
    for name, order in planned_orders(layer).items():
        setattr(module, name, order.to(weight.device))


def mask_module_(module: nn.Module, layer: LayerPlan) -> None:
    """Turn a dense layer into its masked form, in place, and zero what the plan prunes."""
    hold_at_zero_(module, ~kept_connections(layer))


def hold_at_zero_(module: nn.Module, pruned: torch.Tensor) -> None:
    """Turn a dense layer into its masked form in place: zero where `(C_out, C_in / groups)` is true."""
    dense = cast(nn.Conv2d, module)
    mask = (~pruned).view(*pruned.shape, *[1] * (dense.weight.dim() - 2)).to(dense.weight)
    with torch.no_grad():
        dense.weight.mul_(mask)
        if dense.weight.grad is not None:
            dense.weight.grad.mul_(mask)
    module.__class__ = _FORMS_BY_TYPE[type(module)].masked
    # Not persistent: the plan knows it, and the model's keys do not change.
    module.register_buffer("mask", mask, persistent=False)


def unmask_module_(module: nn.Module) -> None:
    """Turn a masked layer back into the dense one it was, pruned weights at zero."""
    masked = cast(MaskedConv2d, module)
    with torch.no_grad():
        masked.weight.mul_(masked.mask)
    del masked.mask
    module.__class__ = _FORMS_BY_TYPE[type(module)].dense


def replace_values_(parameter: nn.Parameter, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Give a parameter and its gradient new values, possibly of another shape; it stays the same object."""
    gradient, parameter.grad = parameter.grad, None
    changed = change(parameter.data)
    # Autograd remembers the shape that a parameter has in any graph that is still alive, such as that of the last loss,
    # and forgets it only when the precision changes. Not to double, which Apple's GPUs do not have.
    other = torch.float32 if parameter.dtype == torch.float16 else torch.float16
    parameter.data = torch.empty(0, dtype=other, device=parameter.device)
    parameter.data = changed
    parameter.grad = None if gradient is None else change(gradient)


def flush_denormals_(weight: torch.Tensor) -> None:
    """Set denormal numbers to zero: they slow inference down on many processors, and are negligible."""
    # Not in half precision: its denormals begin at 6e-5, where weights still count.
    if weight.dtype != torch.float16:
        weight.masked_fill_(weight.abs() < torch.finfo(weight.dtype).tiny, 0)


def like_memory_format(weight: torch.Tensor, model: torch.Tensor) -> torch.Tensor:
    """The weight in the memory format of the model tensor: plain, or channels last."""
    channels_last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(model.dim())
    if channels_last and model.is_contiguous(memory_format=channels_last) and not model.is_contiguous():
        return weight.contiguous(memory_format=channels_last)
    return weight.contiguous()
