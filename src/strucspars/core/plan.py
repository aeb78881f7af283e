"""The outcome of sparse training, and all that conversion needs: which layer gets how many groups, in which order."""

import dataclasses
import difflib
import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from strucspars._version import __version__
from strucspars.core.checks import IntArray, checked_at_least, checked_fraction, checked_target, is_whole_number
from strucspars.core.hierarchy import checked_group_level, num_groups
from strucspars.core.narrowing import KeptChannels, KeptSides, ModuleChannels, full_widths, kept_sides, order_of_kept
from strucspars.core.permutation import checked_permutation
from strucspars.core.shared_orders import joined_order
from strucspars.io.records import RecordError, as_record, check_header, convert, parse_json

FORMAT = "strucspars-plan"
FORMAT_VERSION = 2
# Without shared orders, which are the only difference.
OLDER_VERSION = 1


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class LayerPlan:
    """Grouping of one layer: level g, that is `2**(g - 1)` groups, and the orders `perm[new] = old`, read-only.

    Attributes:
        out_orders: names of the plan's shared orders that `out_perm` consists of; none for an order of the layer's own.
        in_orders: the same of `in_perm`.
        pieces: orders of its own differ from those of its neighbours by whole pieces of so many channels.

    >>> import numpy as np
    >>> order = np.array([1, 0])
    >>> LayerPlan(group_level=2, out_perm=order, in_perm=order, weight_shape=(2, 2, 3, 3)).num_groups
    2
    """

    group_level: int
    out_perm: IntArray
    in_perm: IntArray
    weight_shape: tuple[int, ...]
    out_orders: tuple[str, ...] = ()
    in_orders: tuple[str, ...] = ()
    pieces: int = 1

    def __post_init__(self) -> None:
        shape = tuple(self.weight_shape)
        if not 2 <= len(shape) <= 5 or not all(is_whole_number(width) and width >= 1 for width in shape):
            raise ValueError(f"weight_shape must be (out, in, *kernel) in positive whole numbers, got {shape}")
        out_channels, in_channels = shape[:2]
        level = checked_group_level(self.group_level, out_channels, in_channels)
        object.__setattr__(self, "weight_shape", tuple(int(width) for width in shape))
        object.__setattr__(self, "group_level", level)
        object.__setattr__(self, "out_perm", checked_permutation(self.out_perm, out_channels, name="out_perm"))
        object.__setattr__(self, "in_perm", checked_permutation(self.in_perm, in_channels, name="in_perm"))
        object.__setattr__(self, "pieces", checked_at_least("pieces", self.pieces, 1))

    @property
    def num_groups(self) -> int:
        """`2**(group_level - 1)`."""
        return num_groups(self.group_level)

    def __repr__(self) -> str:
        shape = " x ".join(map(str, self.weight_shape))
        return f"LayerPlan of a {shape} weight: {self.num_groups} groups (level {self.group_level})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LayerPlan):
            return NotImplemented
        perms = ((self.out_perm, other.out_perm), (self.in_perm, other.in_perm))
        return self._plain() == other._plain() and all(map(np.array_equal, *zip(*perms, strict=True)))

    def _plain(self) -> dict[str, Any]:
        """The fields as JSON values; of a shared order only the names."""
        plain: dict[str, Any] = {"group_level": self.group_level, "weight_shape": list(self.weight_shape)}
        for side, names, perm in (("out", self.out_orders, self.out_perm), ("in", self.in_orders, self.in_perm)):
            plain |= {f"{side}_orders": list(names)} if names else {f"{side}_perm": perm.tolist()}
        return plain | ({"pieces": self.pieces} if self.pieces > 1 else {})

    def with_orders(self, out_perm: IntArray, in_perm: IntArray) -> "LayerPlan":
        """The same grouping between other orders, which are shared with no other layer."""
        return dataclasses.replace(self, out_perm=out_perm, in_perm=in_perm, out_orders=(), in_orders=(), pieces=1)

    def narrowed(self, kept: KeptSides) -> "LayerPlan":
        """The same grouping of the channels that stay, which are numbered anew; a `ValueError` for uneven groups."""
        sides = ((self.out_perm, kept.outputs), (self.in_perm, kept.inputs))
        out_perm, in_perm = (
            perm if places is None else order_of_kept(perm, places, self.num_groups) for perm, places in sides
        )
        shape = (len(out_perm), len(in_perm), *self.weight_shape[2:])
        return LayerPlan(group_level=self.group_level, out_perm=out_perm, in_perm=in_perm, weight_shape=shape)


@dataclass(frozen=True, kw_only=True)
class Preprocessing:
    """What an image goes through before a network sees it: resized, cropped, scaled to 0 .. 1, normalised.

    The defaults are those of ImageNet.

    Attributes:
        mean: per channel, of pixels scaled to 0 .. 1.
        resize: length that the shortest side gets before; None where images have the right size already.

    >>> Preprocessing(size=160, resize=182).std
    (0.229, 0.224, 0.225)
    """

    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    size: int = 224
    resize: int | None = 256
    interpolation: Literal["nearest", "bilinear", "bicubic"] = "bilinear"

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.std) or not self.mean or min(self.std) <= 0:
            raise ValueError(f"mean and std must be one number per channel, std above 0; got {self.mean}, {self.std}")
        if self.size < 1 or (self.resize is not None and self.resize < self.size):
            raise ValueError(f"size must be in 1 .. resize ({self.resize}), got {self.size}; change one of them")


@dataclass(frozen=True, kw_only=True)
class PlannedLatency:
    """The milliseconds of one call that a plan was made for, on one core.

    Attributes:
        machine, runtime: where the layers were timed.
        dense_ms: of the dense network.
        expected_ms: of the planned one, from the times of its layers and of the copies between them.
        layers_without_gain: layers for which no number of groups is faster than none.
    """

    machine: str
    runtime: str
    dense_ms: float
    expected_ms: float
    layers_without_gain: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.dense_ms > 0 or not self.expected_ms > 0:
            raise ValueError(f"milliseconds must be positive, got {self.dense_ms} and {self.expected_ms}")

    def __str__(self) -> str:
        """The times in a few words."""
        ratio = self.dense_ms / self.expected_ms
        return f"expects {self.expected_ms:.2f} of {self.dense_ms:.2f} ms ({ratio:.2f} x) in {self.runtime}, one core"


def group_counts(groups_of_layers: Iterable[int]) -> str:
    """How many layers have how many groups, in a line."""
    by_groups = sorted(Counter(groups_of_layers).items())
    counts = [f"{groups} ({count} layer{'s'[: count != 1]})" for groups, count in by_groups]
    return f"groups per layer: {', '.join(counts) or 'no layers'}"


@dataclass(frozen=True, repr=False)
class GroupingPlan:
    """A whole network's grouping. The only thing that passes from training to conversion, file and report.

    Attributes:
        layers: layer name to its grouping, in network order.
        budget: what the target counts: `"params"`, `"macs"` or a registered budget.
        target: removed fraction that was asked for; None for levels chosen by hand.
        min_kept_norm: threshold that met the target; None likewise.
        removed_param_fraction: fraction of all the network's parameters that the plan removes.
        removed_mac_fraction: the same of the multiply-accumulates; None where the input size was not known.
        predicted_divergence: by how many nats per image the predictions were expected to move, with refitted weights
            and without training; None where no images were there to measure it.
        preprocessing: of the network's images; None where it is not known.
        latency: milliseconds, where the target counts them.
        shared_orders: by name, orders of channels that several layers write or read, `perm[new] = old`.
        kept_channels: by name, classes of channels of which some go, and those beside them in a concatenation.
        narrowed: the modules whose channels these are, by name; orders and shapes of layers are those before.

    >>> import numpy as np
    >>> order = np.array([1, 0])
    >>> layer = LayerPlan(group_level=2, out_perm=order, in_perm=order, weight_shape=(2, 2, 3, 3))
    >>> plan = GroupingPlan({"conv": layer}, target=0.4, min_kept_norm=0.9, removed_param_fraction=0.5)
    >>> GroupingPlan.from_json(plan.to_json()) == plan
    True
    """

    layers: Mapping[str, LayerPlan]
    _: KW_ONLY
    budget: str = "params"
    target: float | None = None
    min_kept_norm: float | None = None
    removed_param_fraction: float = 0.0
    removed_mac_fraction: float | None = None
    predicted_divergence: float | None = None
    preprocessing: Preprocessing | None = None
    latency: PlannedLatency | None = None
    shared_orders: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    kept_channels: Mapping[str, KeptChannels] = dataclasses.field(default_factory=dict)
    narrowed: Mapping[str, ModuleChannels] = dataclasses.field(default_factory=dict)
    strucspars_version: str = __version__

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", MappingProxyType(dict(self.layers)))
        self._check_shared_orders()
        self._check_narrowed()
        for field in ("removed_param_fraction", "target", "min_kept_norm", "removed_mac_fraction"):
            value = getattr(self, field)
            if value is not None or field == "removed_param_fraction":
                object.__setattr__(self, field, checked_fraction(field, value))
        # The plan does not record what it removes of other budgets.
        achieved = {"params": self.removed_param_fraction, "macs": self.removed_mac_fraction}
        if self.target is not None and self.budget in achieved:
            removed = achieved[self.budget]
            if removed is None or removed < checked_target(self.target):
                raise ValueError(f"target {self.target:g} of all {self.budget} is not met: the plan removes {removed}")

    def _check_shared_orders(self) -> None:
        orders = {
            name: checked_permutation(order, len(order), name=f"shared order {name!r}")
            for name, order in self.shared_orders.items()
        }
        plain = {name: tuple(order.tolist()) for name, order in orders.items()}
        object.__setattr__(self, "shared_orders", MappingProxyType(plain))
        for name, layer in self.layers.items():
            for names, perm in ((layer.out_orders, layer.out_perm), (layer.in_orders, layer.in_perm)):
                if unknown := [each for each in names if each not in orders]:
                    raise ValueError(f"layer {name!r}: the plan has no shared order {unknown[0]!r}")
                if names and not np.array_equal(joined_order(names, orders), perm):
                    raise ValueError(
                        f"layer {name!r}: its order is not the shared one of {', '.join(names)}; give it that, or take "
                        "the names away (LayerPlan.with_orders)"
                    )

    def _check_narrowed(self) -> None:
        for field in ("kept_channels", "narrowed"):
            object.__setattr__(self, field, MappingProxyType(dict(getattr(self, field))))
        for name, sides in self.narrowed.items():
            if unknown := [each for each in (*sides.outputs, *sides.inputs) if each not in self.kept_channels]:
                raise ValueError(f"module {name!r}: the plan keeps no channels of a class {unknown[0]!r}")
            checked_at_least(f"module {name!r}: repeat", sides.repeat, 1)
            if name in self.layers:
                widths = full_widths(sides, self.kept_channels)
                if any(
                    width not in (0, own) for width, own in zip(widths, self.layers[name].weight_shape, strict=False)
                ):
                    raise ValueError(
                        f"layer {name!r}: its classes have {widths} channels, its weight is "
                        f"{self.layers[name].weight_shape}"
                    )
                try:
                    self.narrowed_layer(name)
                except ValueError as error:
                    raise ValueError(f"layer {name!r}: {error}") from error

    def kept_sides(self, name: str) -> KeptSides:
        """The places along both sides of a module that stay."""
        return kept_sides(self.narrowed.get(name, ModuleChannels()), self.kept_channels)

    def narrowed_layer(self, name: str) -> LayerPlan:
        """The grouping of a layer with the channels that stay."""
        return self.layers[name].narrowed(self.kept_sides(name)) if name in self.narrowed else self.layers[name]

    def __repr__(self) -> str:
        counts = group_counts(layer.num_groups for layer in self.layers.values())
        removed = f"removes {self.removed_param_fraction:.1%} of all params"
        if self.removed_mac_fraction is not None:
            removed += f" and {self.removed_mac_fraction:.1%} of all macs"
        counted = f"all {self.budget}" if self.latency is None else "the time"
        asked = "" if self.target is None else f" (asked for: {self.target:.1%} of {counted})"
        count = len(self.shared_orders)
        shared = f"\n{count} order{'s'[: count != 1]} of channels shared between layers" if count else ""
        narrow = [each for each in self.kept_channels.values() if each.is_narrower]
        if narrow:
            kept, all_channels = sum(len(each.kept) for each in narrow), sum(each.width for each in narrow)
            shared += f"\n{kept:,} of {all_channels:,} channels stay where some go"
        expected = "" if self.latency is None else f"\n{self.latency}"
        return f"GroupingPlan of {len(self.layers)} layers: {removed}{asked}{expected}\n{counts}{shared}"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as JSON: a read-only mapping cannot be pickled."""
        return GroupingPlan.from_json, (self.to_json(),)

    def to_json(self) -> str:
        """The plan as JSON text."""
        fields = {name: getattr(self, name) for name in PLAN_FIELDS} | {"shared_orders": dict(self.shared_orders)}
        for name in ("preprocessing", "latency"):
            if (nested := getattr(self, name)) is not None:
                fields[name] = dataclasses.asdict(nested)
        # Plans without them are files that earlier versions read.
        for name in ("kept_channels", "narrowed"):
            if found := getattr(self, name):
                fields[name] = {key: dataclasses.asdict(value) for key, value in found.items()}
        layers = {name: layer._plain() for name, layer in self.layers.items()}
        return json.dumps({"format": FORMAT, "format_version": FORMAT_VERSION, **fields, "layers": layers})

    @classmethod
    def from_json(cls, text: str, where: str = "grouping plan") -> "GroupingPlan":
        """Read a plan and check all of it; `where` is what an error calls the text."""
        document = parse_json(text, where)
        is_older = isinstance(document, Mapping) and document.get("format_version") == OLDER_VERSION
        version = OLDER_VERSION if is_older else FORMAT_VERSION
        fields = check_header(document, where, format=FORMAT, format_version=version)
        return as_record(cls, _with_perms(fields, where), where)

    def check_narrowed(self, names: Collection[str]) -> None:
        """Raise a `ValueError` unless the network has every module that loses channels."""
        for name in self.narrowed:
            if name not in names:
                raise ValueError(f"module {name!r} of the plan is not in the network; {_hint(name, names)}")

    def check_matches(self, weight_shapes: Mapping[str, Sequence[int]]) -> None:
        """Raise a `ValueError` unless every planned layer is in the network, with the weight shape of the plan."""
        for name, layer in self.layers.items():
            if name not in weight_shapes:
                raise ValueError(f"layer {name!r} of the plan is not in the network; {_hint(name, [*weight_shapes])}")
            shape = tuple(weight_shapes[name])
            if shape != layer.weight_shape:
                raise ValueError(
                    f"layer {name!r}: its weight is {shape}, but the plan was made for {layer.weight_shape}; "
                    "build the network that the plan belongs to"
                )


def _with_perms(fields: dict[str, Any], where: str) -> dict[str, Any]:
    """The fields with the orders of every layer in place of names of shared ones."""
    hint = Mapping[str, tuple[int, ...]]
    orders = {
        name: np.array(order, dtype=np.int64)
        for name, order in convert(hint, fields.get("shared_orders", {}), where, "shared_orders").items()
    }
    layers = fields.get("layers")
    if not isinstance(layers, Mapping):
        return fields
    completed = {}
    for layer_name, layer in layers.items():
        found = dict(layer) if isinstance(layer, Mapping) else layer
        for side in ("out", "in") if isinstance(layer, Mapping) else ():
            key = f"layers.{layer_name}.{side}_orders"
            names = convert(tuple[str, ...], layer.get(f"{side}_orders", []), where, key)
            if unknown := [name for name in names if name not in orders]:
                raise RecordError(where, key, f"the plan has no shared order {unknown[0]!r}")
            if names:
                found[f"{side}_perm"] = joined_order(names, orders).tolist()
        completed[layer_name] = found
    return fields | {"layers": completed}


def _hint(name: str, present: Collection[str]) -> str:
    """A suggestion for a name that the network lacks: perhaps a typo, or the plan of a part or a wrapper of it."""
    parts = [each for each in present if each and (each.endswith(f".{name}") or name.endswith(f".{each}"))]
    near = difflib.get_close_matches(name, present, n=1) or parts
    question = f"did you mean {near[0]!r}? If not, " if near else ""
    return f"{question}give the network that the plan was made for, not one around it nor a part of it"


_NESTED = ("layers", "preprocessing", "latency", "kept_channels", "narrowed")
PLAN_FIELDS = tuple(field.name for field in dataclasses.fields(GroupingPlan) if field.name not in _NESTED)
