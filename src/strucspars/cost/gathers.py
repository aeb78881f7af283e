"""Channel shuffles (gathers) of a forward pass, and the report of those that `fold` could not remove."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard

import numpy as np
import torch
from torch import fx, nn

from strucspars.core.checks import IntArray
from strucspars.core.plan import LayerPlan
from strucspars.cost.counting import BeforeAfter, uncompiled
from strucspars.cost.text_table import Column, text_table
from strucspars.nn.layers import channel_orders, is_grouped, planned_orders
from strucspars.nn.names import bare_modules

Side = Literal["input", "output"]

# In the `meta` of a folded graph.
REPORT_KEY = "strucspars.fold_report"
# The plan of the network that was folded, or None: a graph has its layers under other names.
FOLDED_PLAN_KEY = "strucspars.plan"


@dataclass(frozen=True, kw_only=True)
class RemainingGather:
    """One channel shuffle that is left: its channels, in how many runs of neighbours, and the bytes it copies."""

    layer: str
    side: Side
    channels: int
    runs: int
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class WidenedLayer:
    """A layer that runs with fewer, wider groups: the same function, with zeros between the groups it had."""

    layer: str
    groups: BeforeAfter


@dataclass(frozen=True, kw_only=True)
class FoldReport:
    """The work of a folded graph besides its convolutions. `str()` of it is a table.

    `untraced_reason` says why the network is not a graph, and so keeps all its shuffles; empty if it is one.
    """

    gathers: tuple[RemainingGather, ...]
    num_kept_batch_norms: int
    untraced_reason: str
    widened: tuple[WidenedLayer, ...] = ()

    @property
    def gathered_bytes(self) -> int:
        """Bytes that all gathers copy for the example inputs."""
        return sum(gather.nbytes for gather in self.gathers)

    def __str__(self) -> str:
        parts = ["no gathers remain"]
        if self.gathers:
            columns = [
                Column("layer", [gather.layer or "(model)" for gather in self.gathers], is_text=True),
                Column("gather", [gather.side for gather in self.gathers], is_text=True),
                Column("channels", [f"{gather.channels:,}" for gather in self.gathers]),
                Column("runs", [f"{gather.runs:,}" for gather in self.gathers]),
                Column("bytes", [f"{gather.nbytes:,}" for gather in self.gathers]),
            ]
            noun = "gather remains" if len(self.gathers) == 1 else "gathers remain"
            parts = [text_table(columns), f"{len(self.gathers)} {noun}, {self.gathered_bytes:,} bytes"]
        if self.widened:
            columns = [
                Column("layer", [layer.layer or "(model)" for layer in self.widened], is_text=True),
                Column("groups", [f"{layer.groups.before} -> {layer.groups.after}" for layer in self.widened]),
            ]
            noun = "layer runs" if len(self.widened) == 1 else "layers run"
            parts += ["", text_table(columns), f"{len(self.widened)} {noun} with wider groups"]
        if self.num_kept_batch_norms:
            parts.append(f"{self.num_kept_batch_norms} batch norms follow no layer that could take them in")
        if self.untraced_reason:
            parts.append(f"not traced, so that every shuffle and batch norm stays: {self.untraced_reason}")
        return "\n".join(parts)


def fold_report(folded: fx.GraphModule) -> FoldReport:
    """The report that `fold` left in its graph.

    >>> import strucspars as ss
    >>> layer = ss.ShuffledGroupConv2d(8, 8, 1, groups=2)
    >>> print(fold_report(ss.fold(layer, torch.zeros(1, 8, 4, 4))))
    no gathers remain
    """
    if not is_folded(folded):
        raise ValueError("the graph carries no report of fold; give what fold(model, example_inputs) returned")
    report: FoldReport = folded.meta[REPORT_KEY]
    return report


def is_folded(model: nn.Module) -> TypeGuard[fx.GraphModule]:
    """Whether the network is a graph that `fold` made."""
    # Graphs of other libraries may have no meta: torchvision's feature extractors, for one.
    return isinstance(model, fx.GraphModule) and REPORT_KEY in vars(model).get("meta", {})


def contiguous_runs(gathers: IntArray) -> IntArray:
    """How many runs of neighbouring channels each gather copies; a single one of all channels is the existing order."""
    runs: IntArray = np.count_nonzero(np.diff(gathers) != 1, axis=-1) + np.int64(1)
    return runs


def shuffles_of_layer(
    name: str, orders: Mapping[str, torch.Tensor], in_bytes: int, out_bytes: int
) -> list[RemainingGather]:
    """The two shuffles inside a grouped layer of these orders."""
    # On the meta device orders have no values; assume the largest number of runs.
    in_order, out_order = (
        np.arange(len(order))[::-1] if order.is_meta else order.cpu().numpy()
        for order in (orders["in_perm"], orders["out_inverse"])
    )
    return [remaining_gather(name, "input", in_order, in_bytes), remaining_gather(name, "output", out_order, out_bytes)]


def remaining_gather(layer: str, side: Side, order: IntArray, nbytes: int) -> RemainingGather:
    """The gather of channels in this order, beside a layer."""
    runs = int(contiguous_runs(order))
    return RemainingGather(layer=layer, side=side, channels=len(order), runs=runs, nbytes=nbytes)


@contextmanager
def noted_shuffles(model: nn.Module, planned: Mapping[str, LayerPlan] | None = None) -> Iterator[list[RemainingGather]]:
    """Note the shuffles of every grouped layer that is called meanwhile, or planned to be grouped, two per call."""
    orders: dict[nn.Module, tuple[str, Mapping[str, torch.Tensor]]] = {}
    for name, module in bare_modules(model):
        if is_grouped(module):
            orders[module] = name, channel_orders(module)
        elif planned and name in planned and planned[name].num_groups > 1:
            orders[module] = name, planned_orders(planned[name])
    noted: list[RemainingGather] = []

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: torch.Tensor) -> None:
        inputs = args[0] if args else kwargs["input"]
        noted.extend(shuffles_of_layer(*orders[module], inputs.nbytes, outputs.nbytes))

    with ExitStack() as hooks:
        for module in orders:
            # Before the user's hooks, which may change the output.
            hooks.callback(module.register_forward_hook(note, prepend=True, with_kwargs=True).remove)
        yield noted


def shuffles_in_pass(model: nn.Module, arguments: tuple[Any, ...]) -> tuple[RemainingGather, ...]:
    """The shuffles of all grouped layers that one forward pass calls, in the order of the calls."""
    with noted_shuffles(model) as noted, uncompiled(model):
        model(*arguments)
    return tuple(noted)
