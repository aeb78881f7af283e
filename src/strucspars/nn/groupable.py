"""Which layers of a network can be grouped, and why the others cannot. Needs no graph and no change to the model."""

import difflib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from typing import cast

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parametrize

from strucspars.core.checks import FloatArray, checked_at_least
from strucspars.core.hierarchy import max_group_level, num_groups
from strucspars.core.shared_orders import NetworkOrders
from strucspars.nn.layers import GROUPABLE_TYPES, LAYERS_WITH_CHANNELS, channels, dense_shape, forms_of, is_grouped
from strucspars.nn.names import bare_modules, unwrapped

FilterFn = Callable[[nn.Module, str], bool]
TYPES_BY_NAME = {layer_type.__name__: layer_type for layer_type in GROUPABLE_TYPES}
OTHER_TYPE = "is not among the types to group"

# Modules that compute with the weights of these layers instead of calling them. By name: nothing is imported.
# For modules that are not listed, `convert_(..., example_inputs=...)` compares the outputs.
READERS_OF_WEIGHTS = {
    "torch.nn.modules.activation.MultiheadAttention": ("out_proj",),
    "torch.nn.modules.loss.LinearCrossEntropyLoss": ("linear",),
    "torch.nn.modules.transformer.TransformerEncoderLayer": ("linear1", "linear2"),
    "torchvision.models.swin_transformer.ShiftedWindowAttention": ("qkv", "proj"),
    "torchvision.models.video.swin_transformer.ShiftedWindowAttention3d": ("qkv", "proj"),
    "timm.models.beit.Attention": ("qkv",),
    "timm.models.eva.EvaAttention": ("qkv",),
    "timm.models.mobilevit.LinearSelfAttention": ("qkv_proj",),
    "timm.models.naflexvit.NaFlexEmbeds": ("proj",),
    "timm.models.swin_transformer_v2.WindowAttention": ("qkv",),
}


@dataclass(frozen=True, kw_only=True)
class LayerRules:
    """Which layers may be grouped, and how far.

    Names may hold the wildcards `*`, `?` and `[...]`; for the levels, the last pattern that matches decides.

    Attributes:
        include: only layers whose name matches one of these.
        exclude: no layer whose name matches one of these.
        layer_types: types of layers that may be grouped: `Conv2d`, `Conv1d`, `Conv3d`, `Linear`; no subclasses.
        fixed_levels: pattern to the group level that these layers get, regardless of their norms.
        largest_levels: pattern to the largest group level that these layers may get.
        min_channels_per_group: no group narrower than this, on either side; layers too narrow for two stay whole.
    """

    include: tuple[str, ...] = ("*",)
    exclude: tuple[str, ...] = ()
    layer_types: tuple[str, ...] = ("Conv2d",)
    fixed_levels: Mapping[str, int] = field(default_factory=dict, hash=False)
    largest_levels: Mapping[str, int] = field(default_factory=dict, hash=False)
    min_channels_per_group: int = 1

    def __post_init__(self) -> None:
        for option_name in ("include", "exclude", "layer_types"):
            value = getattr(self, option_name)
            # A text is a sequence too: its letters would be the patterns.
            if isinstance(value, str) or not all(isinstance(entry, str) for entry in value):
                raise ValueError(f"{option_name} must be a sequence of texts, got {value!r}")
            object.__setattr__(self, option_name, tuple(value))
        for name in self.layer_types:
            if name not in TYPES_BY_NAME:
                raise ValueError(f"layer_types may hold {', '.join(TYPES_BY_NAME)}; got {name!r}")
        # numpy numbers become Python numbers, which every file format supports.
        for option in fields(self):
            value = getattr(self, option.name)
            if isinstance(value, np.generic):
                object.__setattr__(self, option.name, value.item())
        checked_at_least("min_channels_per_group", self.min_channels_per_group, 1)
        for option_name in ("fixed_levels", "largest_levels"):
            levels = getattr(self, option_name).items()
            plain = {pattern: checked_at_least(f"{option_name}[{pattern!r}]", level, 1) for pattern, level in levels}
            object.__setattr__(self, option_name, plain)

    @property
    def types(self) -> tuple[type[nn.Module], ...]:
        """The types that `layer_types` names."""
        return tuple(TYPES_BY_NAME[name] for name in self.layer_types)


@dataclass(frozen=True)
class SelectedLayer:
    """A layer that may be grouped, up to `largest_level`.

    Attributes:
        fixed_level: the one it gets whatever its norms; None if that is open.
        input_second_moment: mean square of every input channel over the calibration images, `(C_in,)`; None unless an
            importance asks for it.
        gradient: mean over the images of the gradient of the labels' log-likelihood, in the shape of the weight;
            likewise. Images without labels have no such gradient: it is then the mean of random ones, near zero.
        squared_gradient: mean of the squares of the gradients of single images, with labels or without; likewise.
    """

    name: str
    module: nn.Module
    largest_level: int
    fixed_level: int | None = None
    input_second_moment: FloatArray | None = field(default=None, compare=False, repr=False)
    gradient: FloatArray | None = field(default=None, compare=False, repr=False)
    squared_gradient: FloatArray | None = field(default=None, compare=False, repr=False)

    @property
    def weight(self) -> nn.Parameter:
        """The dense weight `(C_out, C_in, *kernel)` that the module has now."""
        # Not by `get_parameter`, which takes ten times as long: every training step calls this once per layer.
        weight = self.module._parameters.get("weight")
        if weight is None:
            raise ValueError(
                f"layer {self.name!r}: its weight is no longer a parameter, or recomputed before every call (pruning, "
                "weight or spectral norm); undo that, or select the layers again"
            )
        return weight

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """Shape of the dense weight."""
        return dense_shape(self.module, self.name)


@dataclass(frozen=True)
class SkippedLayer:
    """A layer that is not grouped, with the reason."""

    name: str
    module: nn.Module
    reason: str


@dataclass(frozen=True)
class Selection:
    """The layers of a network, sorted into those that may be grouped and those that stay.

    `orders` names the channel orders of the former where some of them share one; None where each has its own.
    """

    layers: tuple[SelectedLayer, ...]
    skipped: tuple[SkippedLayer, ...]
    orders: NetworkOrders | None = None

    def check_not_empty(self) -> None:
        """Raise a `ValueError` with all reasons if nothing may be grouped."""
        if not self.layers:
            reasons = {skipped.reason for skipped in self.skipped}
            told = "; ".join(sorted(reasons)) or "it has none"
            raise ValueError(f"no layer of the model can be grouped: {told}{hint_at_types(reasons)}")


def select_layers(model: nn.Module, rules: LayerRules | None = None, *, filter_fn: FilterFn | None = None) -> Selection:
    """Sort the layers of any model into groupable and not. A shared module appears once, under its first name.

    Names are those of the network itself, also where `torch.compile` or another wrapper holds it or a part of it.

    Args:
        model: anything; no graph is traced.
        rules: names, types and limits.
        filter_fn: called as `filter_fn(module, name)`; False leaves the layer dense.

    Raises:
        ValueError: a pattern matches no layer, or asks for a level that the layer does not have.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 16, 3))
    >>> selection = select_layers(model)
    >>> [layer.name for layer in selection.layers], selection.skipped[0].reason
    (['1'], '8 x 3 channels: an odd width has one group only')
    """
    rules = rules or LayerRules()
    named = [
        (name, module)
        for name, module in bare_modules(model)
        if isinstance(module, LAYERS_WITH_CHANNELS) or is_quantised(module) or _is_scripted(module, model)
    ]
    _check_patterns(rules, [name for name, _ in named])
    uses = WeightUses.of(model)
    layers, skipped = [], []
    for name, module in named:
        reason = _reason_to_skip(name, module, rules, filter_fn, uses)
        if reason is None:
            layers.append(_with_levels(name, module, rules))
        else:
            skipped.append(SkippedLayer(name, module, reason))
    return Selection(tuple(layers), tuple(skipped))


def hint_at_types(reasons: Iterable[str]) -> str:
    """The option that adds types to group, to end an error; empty unless some layer stays because of its type."""
    if not any(reason.endswith(OTHER_TYPE) for reason in reasons):
        return ""
    return "; layer_types adds types (sparsify.layer_types in a recipe, --layer-type of compress)"


@dataclass(frozen=True)
class WeightUses:
    """Where else a network uses weights: owners of each parameter, and modules that bypass the forward of a layer."""

    owners: Mapping[int, list[str]]
    readers: Mapping[nn.Module, str]

    @staticmethod
    def of(model: nn.Module) -> "WeightUses":
        """Look through all modules of a network."""
        owners, readers = defaultdict(list), {}
        for name, module in bare_modules(model):
            for parameter in module._parameters.values():
                if parameter is not None:
                    owners[parameter_key(parameter)].append(name)
            for base in type(module).__mro__:
                for child_name in READERS_OF_WEIGHTS.get(f"{base.__module__}.{base.__qualname__}", ()):
                    child = module._modules.get(child_name)
                    if child is not None:
                        readers[unwrapped(child)] = type(module).__name__
        return WeightUses(owners, readers)


def reason_not_to_group(name: str, module: nn.Module, uses: WeightUses) -> str | None:
    """Why a layer cannot be grouped or masked under any rules; None if it can. Cheap and general reasons first."""
    kind = type(module).__name__
    if isinstance(module, torch.jit.ScriptModule):
        return "it is scripted or traced: group the network first, then script it"
    if is_quantised(module):
        return f"{kind} is quantised: group the network first, then quantise it"
    if is_grouped(module):
        return "grouped already by strucspars"
    if forms_of(module) is None:
        return _reason_in_the_type(module)
    if "forward" in vars(module):
        return "its forward is replaced on this object"
    if module in uses.readers:
        return f"{uses.readers[module]} computes with its weight itself"
    return _reason_in_the_weight(name, module, uses)


def _reason_in_the_type(module: nn.Module) -> str:
    kind = type(module).__name__
    if parametrize.is_parametrized(module):
        names = list(cast(nn.ModuleDict, module.parametrizations))
        words = f"its {' and '.join(names)} {'is' if len(names) == 1 else 'are'} parametrised"
        hint = " (weight or spectral norm)" if names == ["weight"] else ""
        return f"{words}{hint}: remove the parametrisation first"
    if isinstance(module, nn.modules.lazy.LazyModuleMixin):
        return "it is lazy: run the model once first"
    for base in GROUPABLE_TYPES:
        if isinstance(module, base):
            plain = f"nn.{base.__name__}"
            return f"{kind} is a subclass of {plain}, which may compute something else: only {plain} itself is grouped"
    return f"{kind} is not among the types to group: {', '.join(TYPES_BY_NAME)}"


def _reason_in_the_weight(name: str, module: nn.Module, uses: WeightUses) -> str | None:
    weight = module._parameters.get("weight")
    if weight is None:
        return "its weight is recomputed before every call (weight or spectral norm): remove that first"
    if not is_plain(weight):
        return f"its weight is a {type(weight).__name__}, not a plain tensor"
    out_channels, in_channels = channels(module)
    groups = 1 if isinstance(module, nn.Linear) else cast(nn.Conv2d, module).groups
    if groups > 1:
        return "depthwise: nothing to divide" if groups == in_channels else f"it has {groups} groups already"
    if max_group_level(out_channels, in_channels) < 2:
        return f"{out_channels} x {in_channels} channels: an odd width has one group only"
    if not torch.is_floating_point(weight) or weight.dtype.itemsize < 2:
        return f"its weight is {weight.dtype}, not a floating-point type of 16 bits or more"
    others = [owner for owner in uses.owners[parameter_key(weight)] if owner != name]
    return f"its weight is shared with {others[0]!r}" if others else None


def _reason_to_skip(
    name: str, module: nn.Module, rules: LayerRules, filter_fn: FilterFn | None, uses: WeightUses
) -> str | None:
    """Why a layer is not grouped: by the rules, or because it cannot be grouped at all; None if it is."""
    forms = forms_of(module)
    if forms is not None and not is_grouped(module):
        if forms.dense not in rules.types:
            return f"{forms.dense.__name__} {OTHER_TYPE}"
        if not any(fnmatchcase(name, pattern) for pattern in rules.include):
            return "not included"
        if any(fnmatchcase(name, pattern) for pattern in rules.exclude):
            return "excluded"
        if filter_fn is not None and not filter_fn(module, name):
            return "filtered out"
    reason = reason_not_to_group(name, module, uses)
    if reason is None and _level_for(name, rules.fixed_levels) is None:
        by_width, largest = _largest_levels(name, module, rules)
        if largest < 2:
            limit = (
                f"min_channels_per_group={rules.min_channels_per_group} allows" if by_width < 2 else "the rules allow"
            )
            return "{} x {} channels: {} one group only".format(*channels(module), limit)
    return reason


def parameter_key(parameter: torch.Tensor) -> int:
    """The same for parameters that are tied: one object, or two with the same values in memory (`b.data = a.data`).

    >>> one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    >>> other.weight.data = one.weight.data
    >>> parameter_key(one.weight) == parameter_key(other.weight)
    True
    """
    # Lazy, empty, sparse and meta tensors, and those made of other tensors, have no address.
    has_place = is_plain(parameter) and parameter.layout is torch.strided and not parameter.is_meta
    return (parameter.data_ptr() if has_place else 0) or id(parameter)


def is_quantised(module: nn.Module) -> bool:
    """Whether this is one of PyTorch's quantised convolutions or linear layers, which do not inherit the plain ones.

    Known by where their classes are defined: importing them to compare with warns, and fails where they are gone.
    """
    return not isinstance(module, LAYERS_WITH_CHANNELS) and any(
        base.__module__.startswith("torch.")
        and "quantized" in base.__module__.split(".")
        and base.__name__.startswith(("Conv", "Linear"))
        and not base.__name__.endswith("PackedParams")
        for base in type(module).__mro__
    )


def _is_scripted(module: nn.Module, model: nn.Module) -> bool:
    """Whether this is a layer of a scripted or traced network, or such a network: frozen ones have no layers left."""
    if not isinstance(module, torch.jit.ScriptModule):
        return False
    return module is model or module.original_name in TYPES_BY_NAME


def is_plain(weight: torch.Tensor) -> bool:
    """Whether a weight is an ordinary tensor. Subclasses hold quantised or distributed values, or something else."""
    return type(weight) in (nn.Parameter, torch.Tensor)


def _with_levels(name: str, module: nn.Module, rules: LayerRules) -> SelectedLayer:
    (limit, largest), fixed = _largest_levels(name, module, rules), _level_for(name, rules.fixed_levels)
    if fixed is not None and not 1 <= fixed <= limit:
        width = rules.min_channels_per_group
        by_width, remedy = (f" of at least {width} channels", " or min_channels_per_group") if width > 1 else ("", "")
        raise ValueError(
            f"layer {name!r}: fixed level must lie in 1..{limit} (at most {num_groups(limit)} groups{by_width}), "
            f"got {fixed}; lower it{remedy}, or exclude the layer"
        )
    return SelectedLayer(name, module, largest if fixed is None else fixed, fixed)


def _largest_levels(name: str, module: nn.Module, rules: LayerRules) -> tuple[int, int]:
    """The largest level whose groups are wide enough, and the one that the rules for names allow too."""
    by_width = max_group_level(*channels(module), min_channels_per_group=rules.min_channels_per_group)
    by_name = _level_for(name, rules.largest_levels)
    return by_width, by_width if by_name is None else min(by_width, by_name)


def _level_for(name: str, levels: Mapping[str, int]) -> int | None:
    matching = [level for pattern, level in levels.items() if fnmatchcase(name, pattern)]
    return matching[-1] if matching else None


def _check_patterns(rules: LayerRules, names: list[str]) -> None:
    """Raise a `ValueError` for a pattern that matches no layer: it is usually a typing error."""
    for option in ("include", "exclude", "fixed_levels", "largest_levels"):
        for pattern in getattr(rules, option):
            if pattern != "*" and not any(fnmatchcase(name, pattern) for name in names):
                near = difflib.get_close_matches(pattern, names, n=1)
                hint = f"did you mean {near[0]!r}?" if near else "a summary of it lists them"
                raise ValueError(f"{option}: {pattern!r} matches no layer of the model; {hint}")
