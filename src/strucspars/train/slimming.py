"""Network Slimming (Liu et al., ICCV 2017), the baseline of Table 1, for the two CIFAR networks of the paper.

Training adds an L1 penalty on the scales of all batch norms; one threshold over all scales then selects the channels,
and the narrowed network is finetuned.

The residual stream keeps its width. Norms between two convolutions narrow both. Those of a pre-activation network that
read the stream select channels from it, and only the layer behind them narrows. Norms that write to the stream stay.

Differs from Liu et al.: they fix the fraction of channels to remove; here the threshold is searched for a fraction of
all parameters, so that methods are compared at the same size. Where a norm selects from the stream, it narrows too;
they keep it whole in front of the selection.
"""

import json
import math
import os
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import nn

from strucspars.core.checks import FloatArray, IntArray, checked_at_least, checked_target, is_number
from strucspars.cost.counting import ExampleInputs, count_macs
from strucspars.export.storage import SELECTION_KEY, check_tensors, read_tensors, write_tensors
from strucspars.io.records import as_record, check_header, convert, parse_json
from strucspars.models.cifar import EXPANSION, BasicBlock, CifarResNet, PreactivationBottleneck, PreactivationResNet
from strucspars.nn.layers import like_memory_format, replace_values_
from strucspars.nn.names import copied

FORMAT = "strucspars-channel-selection"
FORMAT_VERSION = 1

Model = TypeVar("Model", bound=nn.Module)


class SlimmingPenalty:
    """The penalty `strength * sum(|scale|)` over every `BatchNorm2d` of a model, as a gradient.

    Call `add_gradient_` between `backward` and the optimizer's step; with a GradScaler, after `unscale_`. Liu et al.
    choose a strength among 1e-3, 1e-4 and 1e-5; a good one leaves as many scales at zero as channels are to be removed.

    >>> norm = nn.BatchNorm2d(2)
    >>> SlimmingPenalty(norm, strength=0.5).add_gradient_()
    >>> norm.weight.grad
    tensor([0.5000, 0.5000])
    """

    def __init__(self, model: nn.Module, strength: float) -> None:
        if not is_number(strength) or not 0 <= strength < math.inf:
            raise ValueError(f"slimming strength must be a number from 0 on, such as 5e-4, got {strength!r}")
        self._strength = float(strength)
        norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
        self._norms = [norm for norm in norms if norm.affine]
        if not self._norms:
            raise ValueError(f"{type(model).__name__} has no BatchNorm2d with a scale, so there is nothing to slim")

    @torch.no_grad()
    def add_gradient_(self) -> None:
        """Add the penalty's gradient, zero at a scale of zero, to that of trainable scales; graphs may capture it."""
        scales: list[torch.Tensor] = []
        gradients: list[torch.Tensor] = []
        # Looked up at every step, because parameters may be replaced. Shared scales are penalised once.
        for scale in dict.fromkeys(norm.weight for norm in self._norms):
            if scale.requires_grad:
                if scale.grad is None:
                    scale.grad = torch.zeros_like(scale)
                scales.append(scale)
                gradients.append(scale.grad)
        if scales:
            torch._foreach_add_(gradients, torch._foreach_sign(scales), alpha=self._strength)


@dataclass(frozen=True)
class _KeptChannels:
    """The channels that a batch norm keeps, as stored in a file."""

    width: int
    kept: IntArray


@dataclass(frozen=True, eq=False)
class ChannelSelection:
    """Which channels a network keeps, and how many it had, by batch norm in network order.

    Of channels chosen by hand, the threshold, the largest absolute scale that was removed, and the fractions are None.

    >>> selection = ChannelSelection({"bn1": np.array([0, 2]), "bn2": np.array([1])}, {"bn1": 4, "bn2": 2})
    >>> selection.kept_channels, selection.removed_channel_fraction
    (3, 0.5)
    >>> ChannelSelection.from_json(selection.to_json()) == selection
    True
    """

    kept: Mapping[str, IntArray]
    widths: Mapping[str, int]
    _: KW_ONLY
    threshold: float | None = None
    removed_param_fraction: float | None = None
    removed_mac_fraction: float | None = None

    def __post_init__(self) -> None:
        if differing := sorted(set(self.kept) ^ set(self.widths)):
            raise ValueError(f"kept and widths must name the same batch norms; only one of them has {differing[:3]}")
        for name, width in self.widths.items():
            checked_at_least(f"width of {name!r}", width, 1)
        kept = {name: _checked_channels(name, channels, self.widths[name]) for name, channels in self.kept.items()}
        object.__setattr__(self, "kept", kept)

    @property
    def kept_channels(self) -> int:
        """Number of channels that stay, over all batch norms."""
        return sum(len(channels) for channels in self.kept.values())

    @property
    def removed_channel_fraction(self) -> float:
        """Fraction of the batch norms' channels that is removed: what other papers call the pruning ratio."""
        channels = sum(self.widths.values())
        return (channels - self.kept_channels) / max(channels, 1)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ChannelSelection) and self.to_json() == other.to_json()

    def to_json(self) -> str:
        """The selection as JSON text."""
        header = {"format": FORMAT, "format_version": FORMAT_VERSION}
        facts = {name: getattr(self, name) for name in ("threshold", "removed_param_fraction", "removed_mac_fraction")}
        norms = {name: {"width": self.widths[name], "kept": kept.tolist()} for name, kept in self.kept.items()}
        return json.dumps({**header, **facts, "norms": norms})

    @classmethod
    def from_json(cls, text: str, where: str = "channel selection") -> "ChannelSelection":
        """Read a selection and check all of it; text that is damaged, foreign or newer is a `ValueError`."""
        fields = check_header(parse_json(text, where), where, format=FORMAT, format_version=FORMAT_VERSION)
        norms = convert(Mapping[str, _KeptChannels], fields.pop("norms", None), where, "norms")
        fields |= {
            "kept": {name: norm.kept.tolist() for name, norm in norms.items()},
            "widths": {name: norm.width for name, norm in norms.items()},
        }
        return as_record(cls, fields, where)

    def check_matches(self, widths: Mapping[str, int]) -> None:
        """Raise a `ValueError` unless the network has just these batch norms, with these numbers of channels."""
        for name in [*widths, *self.widths]:
            if widths.get(name) != self.widths.get(name):
                raise ValueError(
                    f"the channel selection is that of another network: batch norm {name!r} has "
                    f"{widths.get(name, 'no')} channels, but the selection was made for "
                    f"{self.widths.get(name, 'none')}; build the network that it was made for"
                )


def _checked_channels(name: str, channels: Any, width: int) -> IntArray:
    """The channels as an array, or a `ValueError` that names the batch norm."""
    array = np.array(channels)
    if array.ndim != 1 or not len(array) or array.dtype.kind not in "iu":
        raise ValueError(f"batch norm {name!r}: kept channels must be a list of whole numbers, one at least")
    array = array.astype(np.int64)
    if array[0] < 0 or array[-1] >= width or (np.diff(array) <= 0).any():
        raise ValueError(f"batch norm {name!r}: kept channels must ascend in [0, {width}), got {array[:8].tolist()}")
    return array


class SelectedBatchNorm2d(nn.BatchNorm2d):
    """Batch norm of some channels of a wider input, `kept`: the channel selection layer of Liu et al. and its norm."""

    kept: torch.Tensor

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        self.register_buffer("kept", torch.arange(num_features))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Select, then normalise: the other way round would normalise channels that no layer reads."""
        return super().forward(features.index_select(1, self.kept))


@dataclass(frozen=True)
class NormSite:
    """A batch norm whose channels can be removed; it reads the residual stream unless it has a `producer`."""

    norm: str
    width: int
    producer: str | None
    consumer: str


def norm_sites(model: nn.Module) -> tuple[NormSite, ...]:
    """The batch norms that can narrow, in network order, whether the network is dense or narrow already."""
    if isinstance(model, PreactivationResNet):
        return tuple(_preactivation_sites(model))
    if isinstance(model, CifarResNet):
        return tuple(
            NormSite(f"{name}.bn1", block.conv2.out_channels, producer=f"{name}.conv1", consumer=f"{name}.conv2")
            for name, block in model.named_modules()
            if isinstance(block, BasicBlock)
        )
    raise ValueError(
        f"slimming knows the channels of PreactivationResNet and CifarResNet only, got {type(model).__name__}; "
        "take the network out of its wrapper, or use one of these"
    )


def _preactivation_sites(model: PreactivationResNet) -> Iterator[NormSite]:
    stream_width = model.conv1.out_channels
    for name, block in model.named_modules():
        if isinstance(block, PreactivationBottleneck):
            width = block.conv3.out_channels // EXPANSION
            yield NormSite(f"{name}.bn1", stream_width, producer=None, consumer=f"{name}.conv1")
            yield NormSite(f"{name}.bn2", width, producer=f"{name}.conv1", consumer=f"{name}.conv2")
            yield NormSite(f"{name}.bn3", width, producer=f"{name}.conv2", consumer=f"{name}.conv3")
            stream_width = block.conv3.out_channels
    yield NormSite("bn", stream_width, producer=None, consumer="fc")


def dense_sites(model: nn.Module) -> tuple[NormSite, ...]:
    """The batch norms that can narrow, of a network with all its channels and layers as it was built."""
    sites = norm_sites(model)
    for site in sites:
        norm = model.get_submodule(site.norm)
        if isinstance(norm, nn.BatchNorm2d) and norm.num_features != site.width:
            raise ValueError(
                f"batch norm {site.norm!r} has {norm.num_features} of its {site.width} channels, so the network is "
                "slim already; start from a freshly built one"
            )
        if type(norm) is not nn.BatchNorm2d or not norm.affine:
            raise ValueError(f"{site.norm!r} is {norm}, slimming needs a BatchNorm2d with a scale; slim first")
        for name in filter(None, (site.producer, site.consumer)):
            layer = model.get_submodule(name)
            is_dense = type(layer) is nn.Linear or (type(layer) is nn.Conv2d and layer.groups == 1)
            if not is_dense or (name == site.producer and layer.bias is not None):
                raise ValueError(
                    f"layer {name!r} is {layer}, slimming needs the dense layer that the network was built with; slim "
                    "before you change"
                )
    return sites


def select_channels(
    model: nn.Module, *, target: float, example_inputs: ExampleInputs | None = None
) -> ChannelSelection:
    """Remove the channels of least absolute scale, as few as make the network smaller by `target`.

    Channels are ranked over all batch norms that can narrow, and each norm keeps at least one. Channels of equal scale
    are removed evenly from all norms. No network is built: the parameters are counted from the widths. With example
    inputs, the fraction of multiply-accumulates that is removed is noted too.

    >>> selection = select_channels(CifarResNet(20), target=0.5)
    >>> 0.5 <= selection.removed_param_fraction < 0.51
    True
    """
    target = checked_target(target)
    sites = dense_sites(model)
    scales = [model.get_parameter(f"{site.norm}.weight").detach().abs().double().cpu().numpy() for site in sites]
    for site, values in zip(sites, scales, strict=True):
        if not np.isfinite(values).all():
            raise ValueError(f"batch norm {site.norm!r} has scales that are not finite; the training has diverged")
    norm_of, channel_of = _removal_order(scales)
    whole = sum(parameter.numel() for parameter in model.parameters())

    def weights_at(removed: int) -> dict[str, tuple[int, int]]:
        gone = np.bincount(norm_of[:removed], minlength=len(sites))
        kept_widths = {site.norm: site.width - int(count) for site, count in zip(sites, gone, strict=True)}
        return _weights_before_after(model, sites, kept_widths)

    def removed_fraction(removed: int) -> float:
        return sum(before - after for before, after in weights_at(removed).values()) / whole

    if (most := removed_fraction(len(norm_of))) < target:
        # Rounded down, so that the number in the message can itself be reached.
        raise ValueError(
            f"target {target:g} cannot be reached: with one channel left in every batch norm that can narrow, "
            f"{math.floor(most * 1e4) / 1e4:.4f} of all params would be removed; lower the target"
        )
    count = bisect_left(range(len(norm_of) + 1), True, key=lambda removed: removed_fraction(removed) >= target)
    gone = [channel_of[:count][norm_of[:count] == index] for index in range(len(sites))]
    removed_mac_fraction = None
    if example_inputs is not None:
        counted, weights = count_macs(model, example_inputs), weights_at(count)
        # The share of a layer's weights that is removed, of its MACs.
        shares = {name: (before - after) / before for name, (before, after) in weights.items()}
        removed = sum(layer.macs * shares.get(name, 0.0) for name, layer in counted.layers.items())
        removed_mac_fraction = removed / counted.macs
    return ChannelSelection(
        {site.norm: np.setdiff1d(np.arange(site.width), gone[index]) for index, site in enumerate(sites)},
        {site.norm: site.width for site in sites},
        threshold=float(scales[norm_of[count - 1]][channel_of[count - 1]]) if count else 0.0,
        removed_param_fraction=removed_fraction(count),
        removed_mac_fraction=removed_mac_fraction,
    )


def _weights_before_after(
    model: nn.Module, sites: tuple[NormSite, ...], kept_widths: Mapping[str, int]
) -> dict[str, tuple[int, int]]:
    """Number of weights before and after, by layer, at these widths; a batch norm counts scale and shift."""
    outputs = {site.producer: kept_widths[site.norm] for site in sites if site.producer is not None}
    inputs = {site.consumer: kept_widths[site.norm] for site in sites}
    weights = {site.norm: (2 * site.width, 2 * kept_widths[site.norm]) for site in sites}
    for name in {**outputs, **inputs}:
        out_width, in_width, *kernel = model.get_parameter(f"{name}.weight").shape
        kept = outputs.get(name, out_width) * inputs.get(name, in_width)
        weights[name] = (out_width * in_width * math.prod(kernel), kept * math.prod(kernel))
    return weights


def _removal_order(scales: list[FloatArray]) -> tuple[IntArray, IntArray]:
    """(norm, channel) of every removable channel in order of removal; the last one of each norm stays."""
    norms = np.repeat(np.arange(len(scales)), [len(values) for values in scales])
    channels = np.concatenate([np.arange(len(values)) for values in scales])
    positions = np.concatenate([np.arange(len(values)) / len(values) for values in scales])
    # By scale; equal scales, such as zeros, by their position in the norm, or the first norms would be emptied.
    order = np.lexsort((positions, np.concatenate(scales)))
    _, last_from_end = np.unique(norms[order][::-1], return_index=True)
    order = np.delete(order, len(order) - 1 - last_from_end)
    return norms[order], channels[order]


@torch.no_grad()
def slim_(model: Model, selection: ChannelSelection) -> Model:
    """Remove the channels that are not selected, in place: real narrow tensors. Returns the model.

    The network computes what it computed with scale and shift of the removed channels set to zero. What their shifts
    added before is dropped, as in Liu et al. Parameters stay the same objects, with narrower values and gradients; an
    optimizer that remembers the old shapes must be made again. Nothing changes unless everything fits.

    >>> model = PreactivationResNet(20)
    >>> sum(p.numel() for p in slim_(model, select_channels(model, target=0.5)).parameters()) <= 219482 / 2
    True
    """
    sites = dense_sites(model)
    selection.check_matches({site.norm: site.width for site in sites})
    for site in sites:
        kept = selection.kept[site.norm]
        if len(kept) < site.width:
            _narrow_site_(model, site, torch.tensor(kept))
    return model


def _narrow_site_(model: nn.Module, site: NormSite, kept: torch.Tensor) -> None:
    """Narrow a norm and the layers around it. Parameters stay the same objects."""
    norm, consumer = cast(nn.BatchNorm2d, model.get_submodule(site.norm)), model.get_submodule(site.consumer)
    kept = kept.to(norm.weight.device)
    for layer, name, dim in ((norm, "weight", 0), (norm, "bias", 0), (consumer, "weight", 1)):
        _narrow_parameter_(layer.get_parameter(name), dim, kept)
    if norm.running_mean is not None and norm.running_var is not None:
        norm.running_mean, norm.running_var = norm.running_mean[kept], norm.running_var[kept]
    norm.num_features = len(kept)
    setattr(consumer, "in_features" if isinstance(consumer, nn.Linear) else "in_channels", len(kept))
    if site.producer is None:
        norm.__class__ = cast(type[nn.BatchNorm2d], SelectedBatchNorm2d)
        norm.register_buffer("kept", kept)
    else:
        producer = cast(nn.Conv2d, model.get_submodule(site.producer))
        _narrow_parameter_(producer.get_parameter("weight"), 0, kept)
        producer.out_channels = len(kept)


def _narrow_parameter_(parameter: nn.Parameter, dim: int, kept: torch.Tensor) -> None:
    replace_values_(parameter, lambda tensor: like_memory_format(tensor.index_select(dim, kept), tensor))


def save_slimmed(model: nn.Module, selection: ChannelSelection, path: str | os.PathLike[str]) -> None:
    """Write a network after `slim_` with this selection to one safetensors file, all or nothing.

    >>> import tempfile
    >>> model = CifarResNet(8)
    >>> selection = select_channels(model, target=0.5)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_slimmed(slim_(model, selection), selection, f"{folder}/slim.safetensors")
    ...     restored = load_slimmed(f"{folder}/slim.safetensors", CifarResNet(8))
    >>> torch.equal(restored.layer1[0].conv1.weight, model.layer1[0].conv1.weight)
    True
    """
    write_tensors(path, model.state_dict(), {SELECTION_KEY: selection.to_json()})


def load_slimmed(path: str | os.PathLike[str], model: Model) -> Model:
    """Turn a freshly built, dense network into the slim one of a file, in place; an error leaves it unchanged."""
    tensors, metadata = read_tensors(path)
    if SELECTION_KEY not in metadata:
        raise ValueError(f"{path} was not written by save_slimmed: it carries no channel selection")
    selection = ChannelSelection.from_json(metadata[SELECTION_KEY], str(path))
    try:
        # Try on a copy first, so that on an error the caller's model stays as it was.
        trial = slim_(copied(model), selection)
    except ValueError as error:
        raise ValueError(f"cannot load {path}: {error}") from error
    needed = trial.state_dict()
    check_tensors(path, tensors, needed, fixed={name for name in needed if name.endswith(".kept")})
    slim_(model, selection).load_state_dict(tensors)
    return model
