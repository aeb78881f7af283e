"""What folding could not get rid of."""

from dataclasses import dataclass
from typing import Literal

from torch import fx

from strucspars.measure.text_table import Column, text_table

REPORT_KEY = "strucspars.fold_report"

Side = Literal["input", "output"]


@dataclass(frozen=True, kw_only=True)
class RemainingGather:
    """One channel shuffle that is left in an inference graph.

    Attributes:
        layer: name of the grouped layer that needs it.
        side: before the layer, or after it.
        channels: how many channels it copies.
        runs: in how many runs of neighbouring channels; few long ones are cheaper.
        nbytes: how much it copies for the example inputs, the whole batch of them.
    """

    layer: str
    side: Side
    channels: int
    runs: int
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class FoldReport:
    """What is left to do at inference beside convolutions. `str()` of it is a table.

    Attributes:
        gathers: the channel shuffles that remain, in network order.
        num_kept_batch_norms: batch norms that no layer could take in.
        untraced_reason: why the network could not be traced, and so kept all its shuffles; empty if it was.

    >>> print(FoldReport(gathers=(), num_kept_batch_norms=0, untraced_reason=""))
    no gathers remain
    """

    gathers: tuple[RemainingGather, ...]
    num_kept_batch_norms: int
    untraced_reason: str

    @property
    def gathered_bytes(self) -> int:
        """What all gathers copy for the example inputs."""
        return sum(gather.nbytes for gather in self.gathers)

    def __str__(self) -> str:
        parts = [_table(self.gathers)] if self.gathers else []
        parts.append(_total(self))
        if self.num_kept_batch_norms:
            parts.append(f"{self.num_kept_batch_norms} batch norms follow no layer that could take them in")
        if self.untraced_reason:
            parts.append(f"not traced, so that every shuffle and batch norm stays: {self.untraced_reason}")
        return "\n".join(parts)


def fold_report(folded: fx.GraphModule) -> FoldReport:
    """The report that `fold` left in its graph.

    >>> import torch
    >>> import strucspars as ss
    >>> layer = ss.ShuffledGroupConv2d(8, 8, 1, groups=2)
    >>> print(fold_report(ss.fold(layer, torch.zeros(1, 8, 4, 4))))
    no gathers remain
    """
    report = folded.meta.get(REPORT_KEY)
    if not isinstance(report, FoldReport):
        raise ValueError("the graph carries no report of fold; give what fold(model, example_inputs) returned")
    return report


def _table(gathers: tuple[RemainingGather, ...]) -> str:
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
