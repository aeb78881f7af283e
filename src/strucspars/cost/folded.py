"""What `fold` tells about the graph that it made: the shuffles it could not get rid of, the groups it widened."""

from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch
from torch import fx, nn

from strucspars.cost.counting import fresh_arguments
from strucspars.cost.gathers import RemainingGather, shuffles_in_pass
from strucspars.cost.layers import BeforeAfter
from strucspars.cost.text_table import Column, text_table
from strucspars.nn.layers import is_grouped

REPORT_KEY = "strucspars.fold_report"
# The plan of the network that was folded, or None: a graph has its layers under other names.
PLAN_KEY = "strucspars.plan"


@dataclass(frozen=True, kw_only=True)
class WidenedLayer:
    """A layer that runs with fewer, wider groups: the same function, with zeros between the groups it had.

    Attributes:
        layer: its name.
        groups: how many groups it had, and how many it runs with.
    """

    layer: str
    groups: BeforeAfter


@dataclass(frozen=True, kw_only=True)
class FoldReport:
    """What is left to do at inference beside convolutions. `str()` of it is a table.

    Attributes:
        gathers: the channel shuffles that remain, in network order.
        num_kept_batch_norms: batch norms that no layer could take in.
        untraced_reason: why the network could not be traced, and so kept all its shuffles; empty if it was.
        widened: the layers whose groups were narrower than `widen_groups_below`, in network order.
        repeated_bytes: further forms of weights that several calls share, where these need different ones.

    >>> print(FoldReport(gathers=(), num_kept_batch_norms=0, untraced_reason=""))
    no gathers remain
    """

    gathers: tuple[RemainingGather, ...]
    num_kept_batch_norms: int
    untraced_reason: str
    widened: tuple[WidenedLayer, ...] = ()
    repeated_bytes: int = 0

    @property
    def gathered_bytes(self) -> int:
        """What all gathers copy for the example inputs."""
        return sum(gather.nbytes for gather in self.gathers)

    def __str__(self) -> str:
        parts = [_gather_table(self.gathers)] if self.gathers else []
        parts.append(_total(self))
        if self.widened:
            parts += ["", _widened_table(self.widened), _widened_total(self.widened)]
        if self.num_kept_batch_norms:
            parts.append(f"{self.num_kept_batch_norms} batch norms follow no layer that could take them in")
        if self.repeated_bytes:
            parts.append(f"{self.repeated_bytes:,} bytes are further forms of weights that several calls share")
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
    report = _meta(folded).get(REPORT_KEY)
    if not isinstance(report, FoldReport):
        raise ValueError("the graph carries no report of fold; give what fold(model, example_inputs) returned")
    return report


def is_folded(model: nn.Module) -> TypeGuard[fx.GraphModule]:
    """Whether the network is a graph that `fold` made."""
    return isinstance(model, fx.GraphModule) and REPORT_KEY in _meta(model)


def _meta(graph_module: fx.GraphModule) -> dict[str, Any]:
    # Graphs of other libraries may have none: torchvision's feature extractors, for one.
    meta: dict[str, Any] = vars(graph_module).get("meta", {})
    return meta


def gathers_in_folded_pass(folded: fx.GraphModule, arguments: tuple[Any, ...]) -> tuple[RemainingGather, ...]:
    """The gathers of a folded graph, with the bytes that they copy for these inputs.

    A graph that calls `index_select` for a purpose of its own keeps the bytes of the report.
    """
    report = fold_report(folded)
    if report.untraced_reason:
        return shuffles_in_pass(folded, fresh_arguments(arguments))
    sizes = _GatherSizes(folded)
    sizes.run(*fresh_arguments(arguments))
    if len(sizes.nbytes) != len(report.gathers):
        return report.gathers
    return tuple(replace(gather, nbytes=nbytes) for gather, nbytes in zip(report.gathers, sizes.nbytes, strict=True))


class _GatherSizes(fx.Interpreter):
    """Runs a graph and notes what its gathers copy, in the order of the report."""

    def __init__(self, graph_module: fx.GraphModule) -> None:
        super().__init__(graph_module)
        self.nbytes: list[int] = []

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function; ours is `index_select`."""
        result = super().call_function(target, args, kwargs)
        if target is torch.index_select:
            self.nbytes.append(result.nbytes)
        return result

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a layer; one that kept its shuffles has two."""
        result = super().call_module(target, args, kwargs)
        if is_grouped(self.module.get_submodule(target)):
            self.nbytes += [args[0].nbytes, result.nbytes]
        return result


def _gather_table(gathers: tuple[RemainingGather, ...]) -> str:
    return text_table(
        [
            Column("layer", [gather.layer or "(model)" for gather in gathers], is_text=True),
            Column("gather", [gather.side for gather in gathers], is_text=True),
            Column("channels", [f"{gather.channels:,}" for gather in gathers]),
            Column("runs", [f"{gather.runs:,}" for gather in gathers]),
            Column("bytes", [f"{gather.nbytes:,}" for gather in gathers]),
        ]
    )


def _total(report: FoldReport) -> str:
    if not report.gathers:
        return "no gathers remain"
    noun = "gather remains" if len(report.gathers) == 1 else "gathers remain"
    return f"{len(report.gathers)} {noun}, {report.gathered_bytes:,} bytes"


def _widened_table(widened: tuple[WidenedLayer, ...]) -> str:
    return text_table(
        [
            Column("layer", [layer.layer or "(model)" for layer in widened], is_text=True),
            Column("groups", [f"{layer.groups.before} -> {layer.groups.after}" for layer in widened]),
        ]
    )


def _widened_total(widened: tuple[WidenedLayer, ...]) -> str:
    noun = "layer runs" if len(widened) == 1 else "layers run"
    return f"{len(widened)} {noun} with wider groups"
