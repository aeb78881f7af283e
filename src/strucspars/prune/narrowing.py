"""Which channels of which batch norm stay, and how a network is narrowed to them in place.

The residual stream keeps its width. In a pre-activation bottleneck the second and third norm narrow the convolutions
around them; the first one, and the last norm of the network, read the stream, so they select channels from it, and only
the layer behind them narrows. In a post-activation basic block only the norm between the two convolutions can narrow:
all others write to the stream.
"""

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from types import MappingProxyType
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import nn

from strucspars.core.checks import IntArray, checked_at_least
from strucspars.export.storage import SELECTION_KEY, check_tensors, read_tensors, write_tensors
from strucspars.io.records import RecordError, as_record, check_header, parse_json
from strucspars.models.cifar import EXPANSION, BasicBlock, CifarResNet, PreactivationBottleneck, PreactivationResNet
from strucspars.nn.layers import like_memory_format, replace_values_
from strucspars.nn.names import copied

FORMAT = "strucspars-channel-selection"
FORMAT_VERSION = 1
FIGURES = ("threshold", "removed_param_fraction", "removed_mac_fraction")

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True, eq=False)
class ChannelSelection:
    """Which channels a network keeps.

    Attributes:
        kept: name of a batch norm to the channels that stay, ascending, read-only, at least one; in network order.
        widths: name of a batch norm to the number of channels it had.
        threshold: largest absolute scale that was removed; None for channels chosen by hand.
        removed_param_fraction: fraction of all the network's parameters that goes; None likewise.
        removed_mac_fraction: the same of the multiply-accumulates; None where the input size was not known.

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
        if set(self.kept) != set(self.widths):
            differing = sorted(set(self.kept) ^ set(self.widths), key=str)
            raise ValueError(f"kept and widths must name the same batch norms; only one of them has {differing[:3]}")
        widths = {name: checked_at_least(f"width of {name!r}", self.widths[name], 1) for name in self.kept}
        kept = {name: _checked_channels(name, channels, widths[name]) for name, channels in self.kept.items()}
        object.__setattr__(self, "kept", MappingProxyType(kept))
        object.__setattr__(self, "widths", MappingProxyType(widths))

    @property
    def kept_channels(self) -> int:
        """Number of channels that stay, over all batch norms."""
        return sum(len(channels) for channels in self.kept.values())

    @property
    def removed_channel_fraction(self) -> float:
        """Fraction of the batch norms' channels that goes: what the tables of other papers call the pruning ratio."""
        channels = sum(self.widths.values())
        return (channels - self.kept_channels) / max(channels, 1)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ChannelSelection):
            return NotImplemented
        return self._plain() == other._plain()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and other processes get the selection as JSON: a read-only mapping cannot be pickled."""
        return ChannelSelection.from_json, (self.to_json(),)

    def _plain(self) -> dict[str, Any]:
        """The fields as JSON values."""
        norms = {name: {"width": self.widths[name], "kept": kept.tolist()} for name, kept in self.kept.items()}
        return {name: getattr(self, name) for name in FIGURES} | {"norms": norms}

    def digest(self) -> str:
        """SHA-256 of which channels stay, as hexadecimal text; threshold and fractions do not count."""
        return hashlib.sha256(json.dumps(self._plain()["norms"], sort_keys=True).encode()).hexdigest()

    def to_json(self) -> str:
        """The selection as JSON text."""
        return json.dumps({"format": FORMAT, "format_version": FORMAT_VERSION, **self._plain()})

    @classmethod
    def from_json(cls, text: str, where: str = "channel selection") -> "ChannelSelection":
        """Read a selection and check all of it; text that is damaged, foreign or newer is a `ValueError`."""
        document = check_header(parse_json(text, where), where, format=FORMAT, format_version=FORMAT_VERSION)
        stored = as_record(_StoredSelection, document, where)
        figures = {name: getattr(stored, name) for name in FIGURES}
        kept = {name: norm.kept for name, norm in stored.norms.items()}
        try:
            return cls(kept, {name: norm.width for name, norm in stored.norms.items()}, **figures)
        except ValueError as error:
            raise RecordError(where, "", str(error)) from error

    def check_matches(self, widths: Mapping[str, int]) -> None:
        """Raise a `ValueError` unless the network has just these batch norms, with these numbers of channels."""
        if dict(widths) == dict(self.widths):
            return
        differing = sorted(dict(widths).items() ^ dict(self.widths).items())
        raise ValueError(
            f"the channel selection is that of another network: batch norm {differing[0][0]!r} has "
            f"{widths.get(differing[0][0], 'no')} channels, but the selection was made for "
            f"{self.widths.get(differing[0][0], 'none')}; build the network that it was made for"
        )


@dataclass(frozen=True)
class _StoredNorm:
    width: int
    kept: IntArray


@dataclass(frozen=True, kw_only=True)
class _StoredSelection:
    norms: Mapping[str, _StoredNorm]
    threshold: float | None
    removed_param_fraction: float | None
    removed_mac_fraction: float | None


def _checked_channels(name: str, channels: Any, width: int) -> IntArray:
    """The channels as a read-only array, or a `ValueError` that names the batch norm."""
    array = np.array(channels)
    if array.ndim != 1 or not len(array) or array.dtype.kind not in "iu":
        raise ValueError(f"batch norm {name!r}: kept channels must be a list of whole numbers, one at least")
    if array.min() < 0 or array.max() >= width or (np.diff(array.astype(np.int64)) <= 0).any():
        raise ValueError(
            f"batch norm {name!r}: kept channels must ascend within [0, {width}), got {array[:8].tolist()}"
        )
    array = array.astype(np.int64)
    array.setflags(write=False)
    return array


class SelectedBatchNorm2d(nn.BatchNorm2d):
    """Batch norm of some channels of a wider input: the channel selection layer of Liu et al. and its norm in one.

    `slim_` makes these; built by hand it starts with the first `num_features` channels. Buffer: `kept`, the channels.
    """

    kept: torch.Tensor

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        self.register_buffer("kept", torch.arange(num_features))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Select, then normalise: the other way round would normalise channels that no layer reads."""
        return super().forward(features.index_select(1, self.kept))


@dataclass(frozen=True, kw_only=True)
class NormSite:
    """A batch norm whose channels can go.

    Attributes:
        norm: its name.
        width: its channels in the dense network, told from layers that never narrow.
        producer: the convolution whose outputs go with the channels; None where the norm reads the residual stream.
        consumer: the layer whose inputs go with the channels.
    """

    norm: str
    width: int
    producer: str | None
    consumer: str


def norm_sites(model: nn.Module) -> tuple[NormSite, ...]:
    """The batch norms that can narrow, in network order, whether the network is dense or narrow already.

    Raises:
        ValueError: the network is of another kind.
    """
    if isinstance(model, PreactivationResNet):
        return tuple(_preactivation_sites(model))
    if isinstance(model, CifarResNet):
        return tuple(
            NormSite(
                norm=f"{name}.bn1",
                width=block.conv2.out_channels,
                producer=f"{name}.conv1",
                consumer=f"{name}.conv2",
            )
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
            conv1, conv2, conv3 = (f"{name}.conv{index}" for index in (1, 2, 3))
            yield NormSite(norm=f"{name}.bn1", width=stream_width, producer=None, consumer=conv1)
            yield NormSite(norm=f"{name}.bn2", width=width, producer=conv1, consumer=conv2)
            yield NormSite(norm=f"{name}.bn3", width=width, producer=conv2, consumer=conv3)
            stream_width = block.conv3.out_channels
    yield NormSite(norm="bn", width=stream_width, producer=None, consumer="fc")


def dense_sites(model: nn.Module) -> tuple[NormSite, ...]:
    """The batch norms that can narrow, of a network that has all its channels; any other is a `ValueError`."""
    sites = norm_sites(model)
    for site in sites:
        _check_dense(model, site)
    return sites


def _check_dense(model: nn.Module, site: NormSite) -> None:
    """Refuse sites whose layers the user has changed, such as grouped convolutions or folded norms."""
    norm = model.get_submodule(site.norm)
    if isinstance(norm, nn.BatchNorm2d) and norm.num_features != site.width:
        raise ValueError(
            f"batch norm {site.norm!r} has {norm.num_features} of its {site.width} channels, so the network is slim "
            "already; start from a freshly built one"
        )
    if type(norm) is not nn.BatchNorm2d or not norm.affine:
        raise ValueError(f"{site.norm!r} is {norm}, slimming needs a BatchNorm2d with a scale; slim before you change")
    for name in (site.producer, site.consumer):
        if name is None:
            continue
        layer = model.get_submodule(name)
        plain = type(layer) is nn.Linear or (type(layer) is nn.Conv2d and layer.groups == 1)
        if not plain or (name == site.producer and layer.bias is not None):
            raise ValueError(
                f"layer {name!r} is {layer}, slimming needs the dense layer that the network was built with; slim "
                "before you change"
            )


def weights_before_after(
    model: nn.Module, sites: tuple[NormSite, ...], kept_widths: Mapping[str, int]
) -> dict[str, tuple[int, int]]:
    """Number of weights before and after, by layer, when the batch norms keep `kept_widths` channels.

    A batch norm counts scale and shift. Other biases do not change: only the classifier has one.
    """
    outputs = {site.producer: kept_widths[site.norm] for site in sites if site.producer is not None}
    inputs = {site.consumer: kept_widths[site.norm] for site in sites}
    weights = {site.norm: (2 * site.width, 2 * kept_widths[site.norm]) for site in sites}
    for name in {**outputs, **inputs}:
        out_width, in_width, *kernel = model.get_parameter(f"{name}.weight").shape
        kept = outputs.get(name, out_width) * inputs.get(name, in_width)
        weights[name] = (out_width * in_width * math.prod(kernel), kept * math.prod(kernel))
    return weights


@torch.no_grad()
def slim_(model: Model, selection: ChannelSelection) -> Model:
    """Remove the channels that are not selected, in place: real narrow tensors. Returns the model.

    The network computes what it computed with scale and shift of the removed channels set to zero. What their shifts
    added before is dropped, as in Liu et al. Parameters stay the same objects, with narrower values and gradients; an
    optimizer that remembers the old shapes must be made anew. Nothing changes unless everything fits.

    Differs from Liu et al.: where a norm selects from the residual stream, it narrows too; they keep it whole in front
    of the selection.

    Args:
        model: a dense `PreactivationResNet` or `CifarResNet`.
        selection: from `select_channels` on the same network.

    Raises:
        ValueError: another network, one that is narrow or converted already, or a selection that does not fit.

    >>> from strucspars.prune.slimming import select_channels
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


def check_slimmed(model: nn.Module, selection: ChannelSelection) -> None:
    """Raise a `ValueError` unless the network looks as if it had been slimmed with the selection."""
    sites = norm_sites(model)
    selection.check_matches({site.norm: site.width for site in sites})
    for site in sites:
        norm = cast(nn.BatchNorm2d, model.get_submodule(site.norm))
        kept = selection.kept[site.norm].tolist()
        fits = norm.num_features == len(kept)
        if isinstance(norm, SelectedBatchNorm2d):
            fits = fits and norm.kept.tolist() == kept
        if not fits:
            raise ValueError(
                f"batch norm {site.norm!r} has {norm.num_features} channels, but not the {len(kept)} of the "
                "selection; give the selection that the network was slimmed with"
            )


def _narrow_site_(model: nn.Module, site: NormSite, kept: torch.Tensor) -> None:
    """Narrow a norm and the layers around it."""
    norm = cast(nn.BatchNorm2d, model.get_submodule(site.norm))
    kept = kept.to(norm.weight.device)
    for name in ("weight", "bias"):
        _narrow_parameter_(norm.get_parameter(name), 0, kept)
    if norm.running_mean is not None and norm.running_var is not None:
        norm.running_mean = norm.running_mean[kept]
        norm.running_var = norm.running_var[kept]
    norm.num_features = len(kept)
    consumer = model.get_submodule(site.consumer)
    _narrow_parameter_(consumer.get_parameter("weight"), 1, kept)
    if isinstance(consumer, nn.Linear):
        consumer.in_features = len(kept)
    else:
        cast(nn.Conv2d, consumer).in_channels = len(kept)
    if site.producer is None:
        norm.__class__ = cast(type[nn.BatchNorm2d], SelectedBatchNorm2d)
        norm.register_buffer("kept", kept)
        return
    producer = cast(nn.Conv2d, model.get_submodule(site.producer))
    _narrow_parameter_(producer.get_parameter("weight"), 0, kept)
    producer.out_channels = len(kept)


def _narrow_parameter_(parameter: nn.Parameter, dim: int, kept: torch.Tensor) -> None:
    """Keep some of the parameter's rows or columns, and of its gradient's; it stays the same object."""

    def narrow(tensor: torch.Tensor) -> torch.Tensor:
        return like_memory_format(tensor.index_select(dim, kept), tensor)

    replace_values_(parameter, narrow)


def save_slimmed(model: nn.Module, selection: ChannelSelection, path: str | os.PathLike[str]) -> None:
    """Write a slimmed network to one safetensors file, all or nothing.

    Args:
        model: a network after `slim_`.
        selection: the one it was slimmed with.
        path: where; a file that is there is replaced only by a complete one.

    Raises:
        ValueError: the selection is not the network's.
        OSError: the file cannot be written.

    >>> import tempfile
    >>> from strucspars.prune.slimming import select_channels
    >>> from strucspars.models.cifar import CifarResNet
    >>> model = CifarResNet(8)
    >>> selection = select_channels(model, target=0.5)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_slimmed(slim_(model, selection), selection, f"{folder}/slim.safetensors")
    ...     restored = load_slimmed(f"{folder}/slim.safetensors", CifarResNet(8))
    >>> torch.equal(restored.layer1[0].conv1.weight, model.layer1[0].conv1.weight)
    True
    """
    check_slimmed(model, selection)
    write_tensors(path, model.state_dict(), {SELECTION_KEY: selection.to_json()})


def load_slimmed(path: str | os.PathLike[str], model: Model) -> Model:
    """Turn a freshly built, dense network into the saved slim one, in place; returns the model.

    On any error the model stays as it was.

    Args:
        path: a file written by `save_slimmed`.
        model: the same network, dense.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file or the model does not fit; the message says where.
    """
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
