"""The summary of a network: its layers, groups, parameters and MACs before and after, and why some layers stay."""

import textwrap
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from strucspars.core.importance import kept_norm_by_level
from strucspars.core.plan import GroupingPlan, PlannedLatency
from strucspars.cost.counting import (
    PAPER_FLOPS_PER_BATCH_NORM_ELEMENT,
    BeforeAfter,
    ExampleInputs,
    LayerSize,
    is_converted,
    layer_sizes,
    network_params,
    trace_forward,
    undisturbed,
    weight_of,
)
from strucspars.cost.gathers import RemainingGather, fold_report, is_folded, noted_shuffles
from strucspars.cost.text_table import Column, short_count, text_table
from strucspars.nn.groupable import LayerRules, SkippedLayer, is_plain, select_layers
from strucspars.nn.importance import importance_matrix
from strucspars.nn.layers import is_grouped
from strucspars.nn.names import bare_modules, under_first_names

TEXT_WIDTH = 120


@dataclass(frozen=True)
class SummaryRow:
    """One convolution or linear layer, before grouping and after, with remarks such as why it is not grouped.

    `channels` are the (outputs, inputs) that stay, where some go. A quantised layer, whose weight is packed away, or a
    scripted one has an empty weight shape and no MACs. `kept_norm` is the fraction of the L1 norm that stays by the
    plan; None without a plan and once converted.
    """

    name: str
    layer_type: str
    weight_shape: tuple[int, ...]
    groups: BeforeAfter
    params: BeforeAfter
    macs: BeforeAfter | None
    kept_norm: float | None
    note: str
    channels: tuple[int, int] | None = None


@dataclass(frozen=True)
class Summary:
    """A network before grouping and after. `str()` of it is a table. Without example inputs, no pass is counted."""

    rows: tuple[SummaryRow, ...]
    params: BeforeAfter
    macs: BeforeAfter | None
    paper_flops: BeforeAfter | None
    gathers: tuple[RemainingGather, ...] | None

    def __str__(self) -> str:
        notes = dict.fromkeys(row.note for row in self.rows if row.note)
        numbers = {note: f"[{number}]" for number, note in enumerate(notes, start=1)}
        footnotes = [
            textwrap.fill(f"{number} {note}", TEXT_WIDTH, subsequent_indent=" " * (len(number) + 1))
            for note, number in numbers.items()
        ]
        table = _table(self.rows, numbers, self.gathers or ())
        return "\n\n".join(part for part in (table, "\n".join(footnotes), _totals(self)) if part)


def summary(
    model: nn.Module,
    example_inputs: ExampleInputs | None = None,
    plan: GroupingPlan | None = None,
    *,
    rules: LayerRules | None = None,
) -> Summary:
    """Describe a network layer by layer: weight, groups, parameters, MACs, gathers, and why a layer is not grouped.

    A dense network alone is the same before and after; with a plan, "after" is the converted network. A converted
    network was dense before. The model does not change.

    Gathers are channel shuffles: two for every call of a converted layer, or of one that the plan would convert; in a
    graph that `fold` returned, those of its report, with the bytes for the inputs that it was folded with.

    Args:
        model: dense, masked, converted or folded.
        example_inputs: a tensor, or a tuple of the positional arguments of `forward`; without it neither MACs nor
            gathers are counted.
        plan: grouping, and channels that go, of the layers that are still dense or masked.
        rules: how layers are selected, for the notes on those that are not grouped.

    >>> import torch
    >>> print(summary(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)), torch.zeros(1, 3, 8, 8)))
    layer  type     weight  groups  params   MACs  note
    ---------------------------------------------------
    0      Conv2d  8x3x3x3       1     224  7,776   [1]
    1      Conv2d  8x8x3x3       1     584  9,216
    <BLANKLINE>
    [1] 8 x 3 channels: an odd width has one group only
    <BLANKLINE>
    params          808
    MACs         16,992
    paper FLOPs  16,992
    """
    plan = under_first_names(model, plan or GroupingPlan({}))
    with undisturbed(model), noted_shuffles(model, plan.layers) as shuffles:
        sizes = layer_sizes(model, plan)
        positions: dict[str, int] = {}
        elements = BeforeAfter(0, 0)
        if example_inputs is not None:
            positions, elements = trace_forward(model, sizes, example_inputs, plan)
        skipped = {layer.name: layer for layer in select_layers(model, rules).skipped}
        rows = tuple(
            _row(name, sizes.get(name) or _opaque_size(module), plan, positions, skipped.get(name))
            for name, module in bare_modules(model)
            if name in sizes or name in skipped
        )
        if plan.latency is not None:
            rows = tuple(_with_gain_noted(row, plan.latency) for row in rows)
    params = network_params(model, sizes, plan)
    if example_inputs is None:
        return Summary(rows, params, macs=None, paper_flops=None, gathers=None)
    counted = [row.macs for row in rows if row.macs is not None]
    macs = BeforeAfter(sum(count.before for count in counted), sum(count.after for count in counted))
    gathers = tuple(shuffles)
    # A network that could not be folded is called as a whole, with its shuffles inside.
    if is_folded(model) and not fold_report(model).untraced_reason:
        gathers = fold_report(model).gathers
    return Summary(
        rows,
        params,
        macs=macs,
        paper_flops=BeforeAfter(
            macs.before + PAPER_FLOPS_PER_BATCH_NORM_ELEMENT * elements.before,
            macs.after + PAPER_FLOPS_PER_BATCH_NORM_ELEMENT * elements.after,
        ),
        gathers=gathers,
    )


def _row(
    name: str, size: LayerSize, plan: GroupingPlan, positions: Mapping[str, int], skipped: SkippedLayer | None
) -> SummaryRow:
    notes, layer = [], plan.layers.get(name)
    if skipped is not None and layer is None and not is_grouped(size.module):
        notes.append(skipped.reason)
    if not size.weight_shape:
        packed = "its packed weight is counted neither as parameters nor in MACs"
        notes.append("no MACs counted" if size.params.after else packed)
    # Tensors of other types may lack these operations.
    elif is_plain(weight := weight_of(size.module)) and not weight.is_meta and not weight.any().item():
        notes.append("all zero")
    macs = kept_norm = None
    if name in positions:
        params, uses = size.weight_params, positions[name]
        macs = BeforeAfter(params.before * uses, params.after * uses)
        if uses == 0:
            notes.append("not called as a module in this pass: no MACs counted")
    if (layer is not None or name in plan.narrowed) and not is_converted(size.module) and size.groups.before == 1:
        kept_norm = _kept_norm(name, weight_of(size.module), plan)
    return SummaryRow(
        name=name,
        layer_type=type(size.module).__name__,
        weight_shape=size.weight_shape,
        groups=size.groups,
        params=size.params,
        macs=macs,
        kept_norm=kept_norm,
        note="; ".join(notes),
        channels=size.channels,
    )


def _kept_norm(name: str, weight: torch.Tensor, plan: GroupingPlan) -> float | None:
    """Fraction of the L1 norm of a dense layer in the channels and groups that stay."""
    if weight.is_meta:
        return None
    try:
        importance = importance_matrix(weight)
    except ValueError as error:
        raise ValueError(f"layer {name!r}: {error}") from error
    kept, whole = plan.kept_sides(name), float(importance.sum())
    importance = importance[slice(None) if kept.outputs is None else kept.outputs]
    importance = importance[:, slice(None) if kept.inputs is None else kept.inputs]
    share = float(importance.sum()) / whole if name in plan.narrowed and whole else 1.0
    if name not in plan.layers:
        return share
    layer = plan.narrowed_layer(name)
    return share * float(kept_norm_by_level(importance[layer.out_perm][:, layer.in_perm])[layer.group_level - 1])


def _with_gain_noted(row: SummaryRow, latency: PlannedLatency) -> SummaryRow:
    """The row, with a note where the layer stays dense because groups do not make it faster."""
    if row.name not in latency.layers_without_gain or row.groups.after > row.groups.before:
        return row
    slow = f"stays dense: no number of groups makes it faster in {latency.runtime} here"
    return replace(row, note="; ".join(filter(None, (row.note, slow))))


def _table(rows: tuple[SummaryRow, ...], note_numbers: Mapping[str, str], gathers: tuple[RemainingGather, ...]) -> str:
    if not rows:
        return "no convolutions or linear layers"
    gathers_of_layer = Counter(gather.layer for gather in gathers)
    return text_table(
        [
            Column("layer", [row.name or "(model)" for row in rows], is_text=True),
            Column("type", [row.layer_type for row in rows], is_text=True),
            Column("weight", ["x".join(map(str, row.weight_shape)) for row in rows]),
            Column("kept", ["" if row.channels is None else "x".join(map(str, row.channels)) for row in rows]),
            Column("groups", [_change(row.groups) for row in rows]),
            Column("params", [_change(row.params) for row in rows]),
            Column("MACs", ["" if row.macs is None else _change(row.macs) for row in rows]),
            Column("kept norm", ["" if row.kept_norm is None else f"{row.kept_norm:.3f}" for row in rows]),
            Column("gathers", [str(gathers_of_layer[row.name] or "") for row in rows]),
            Column("note", [note_numbers.get(row.note, "") for row in rows]),
        ],
        TEXT_WIDTH,
    )


def _opaque_size(module: nn.Module) -> LayerSize:
    """The size of a layer with a packed weight, or of a scripted one, as far as it is known."""
    groups, params = vars(module).get("groups", 1), sum(parameter.numel() for parameter in module.parameters())
    return LayerSize(module, (), BeforeAfter(groups, groups), BeforeAfter(0, 0), BeforeAfter(params, params))


def _totals(summary: Summary) -> str:
    totals = {"params": summary.params, "MACs": summary.macs, "paper FLOPs": summary.paper_flops}
    present = {title: total for title, total in totals.items() if total is not None}
    title_width = max(map(len, present))
    number_width = max(len(f"{total.before:,}") for total in present.values())
    lines = []
    for title, total in present.items():
        line = f"{title:<{title_width}}  {total.before:>{number_width},}"
        if total.after != total.before:
            line += f" -> {total.after:>{number_width},}  ({total.removed_fraction:.1%} removed)"
        lines.append(line)
    if summary.gathers:
        copied = sum(gather.nbytes for gather in summary.gathers)
        lines.append(f"{'gathers':<{title_width}}  {len(summary.gathers):,}, {copied:,} bytes")
    return "\n".join(lines)


def _change(counts: BeforeAfter) -> str:
    """The counts in at most five characters each, exact below ten thousand: a row has to fit the screen."""
    before, after = (f"{count:,}" if count < 10_000 else short_count(count) for count in (counts.before, counts.after))
    return before if counts.after == counts.before else f"{before} -> {after}"
