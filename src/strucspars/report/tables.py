"""The tables of one run: sizes, accuracy at every stage, layers."""

import math
from collections.abc import Iterator
from typing import Any

from strucspars.core.hierarchy import num_groups
from strucspars.cost.layers import BeforeAfter
from strucspars.report.figures.confusion import Confusion
from strucspars.report.layers import LayerImportance, layer_importances
from strucspars.report.named_table import Cell, NamedTable, TableColumn
from strucspars.report.reading import RunData
from strucspars.train.outcome import StageAccuracy, stage_accuracy
from strucspars.train.outcome_text import OPTIMISM, changes_from_paper
from strucspars.train.paper_rows import PAPER_ROWS, PAPER_TIMELINES


def run_tables(run: RunData) -> tuple[NamedTable, ...]:
    """All tables of a run that have something to say."""
    tables = (size_table(run), stage_table(run), layer_table(run))
    return tuple(table for table in tables if table.rows)


def size_table(run: RunData) -> NamedTable:
    """Parameters, MACs and the paper's FLOPs, dense and compressed; without rows before the run is finished."""
    summary = run.summary
    counted = summary or run.one_shot
    paper = None if summary is None else PAPER_ROWS.get(summary.name)
    is_smaller = summary is None or summary.kind != "dense"
    counts: list[tuple[str, BeforeAfter, float | None]] = []
    if counted is not None:
        counts += [
            ("parameters", counted.params, None if paper is None else paper.params),
            ("MACs", counted.macs, None),
        ]
    if summary is not None and paper is not None:
        counts.append(("paper FLOPs (MACs + 4 per batch-norm element)", summary.paper_flops, paper.flops))
    return NamedTable(
        name="sizes",
        title="Size",
        columns=(
            TableColumn(title="size"),
            TableColumn(title="dense", form="count"),
            *_if(is_smaller, TableColumn(title="compressed", form="count")),
            *_if(is_smaller, TableColumn(title="removed", form="percent")),
            *_if(paper is not None, TableColumn(title="paper", form="count")),
        ),
        rows=tuple(
            (
                title,
                count.before,
                *_if(is_smaller, count.after),
                *_if(is_smaller, count.removed_fraction),
                *_if(paper is not None, number),
            )
            for title, count, number in counts
        ),
        notes=_protocol_notes(run) if paper is not None else (),
    )


def stage_table(run: RunData) -> NamedTable:
    """Accuracy at every stage that the run has come to, with the paper's (Table 5)."""
    rows = tuple(_stage_rows(run))
    has_paper = any(row[3] is not None for row in rows)
    return NamedTable(
        name="stages",
        title="Accuracy at every stage",
        columns=(
            TableColumn(title="moment"),
            TableColumn(title="top-1", form="percent"),
            TableColumn(title="top-5", form="percent"),
            *_if(has_paper, TableColumn(title="paper top-1", form="percent")),
        ),
        rows=rows if has_paper else tuple(row[:3] for row in rows),
        notes=(OPTIMISM, *(_protocol_notes(run) if has_paper else ())) if rows else (),
    )


def _stage_rows(run: RunData) -> Iterator[tuple[Cell, ...]]:
    name = "" if run.recipe is None else run.recipe.name
    timeline, paper = PAPER_TIMELINES.get(name), PAPER_ROWS.get(name)
    accuracy = None if paper is None or paper.accuracy is None else paper.accuracy / 100
    first = stage_accuracy(run.rows, "sparsify") or stage_accuracy(run.rows, "slim")
    if first is not None:
        yield _best("first stage", first)
    for row in run.rows:
        if row["stage"] == "compress":
            before, after = (
                (None, None) if timeline is None else (timeline.before_compression, timeline.after_compression)
            )
            yield "before compression", row.get("before_top1"), row.get("before_top5"), _hundredth(before)
            yield "right after compression", row["test_top1"], row["test_top5"], _hundredth(after)
            if "recalibrated_top1" in row:
                yield "the same, batch norm recalibrated", row["recalibrated_top1"], None, None
    for stage, words in (("finetune", "finetuned"), ("train", "trained")):
        second = stage_accuracy(run.rows, stage)
        if second is not None:
            moment = "last epoch" if run.is_finished else "last epoch so far"
            yield f"{words}, {moment}", second.last_top1, second.last_top5, accuracy
            yield _best(words, second)
    if run.summary is not None:
        yield "saved network", run.summary.converted_top1, run.summary.converted_top5, None


def _best(words: str, accuracy: StageAccuracy) -> tuple[Cell, ...]:
    return f"{words}, best epoch ({accuracy.best_epoch})", accuracy.best_top1, accuracy.best_top5, None


def layer_table(run: RunData) -> NamedTable:
    """Every layer that may be grouped: its weight, groups, parameters and kept norm."""
    return NamedTable(
        name="layers",
        title="Layers",
        columns=(
            TableColumn(title="layer"),
            TableColumn(title="weight"),
            TableColumn(title="group level", form="count"),
            TableColumn(title="groups", form="count"),
            TableColumn(title="largest", form="count"),
            TableColumn(title="params dense", form="count"),
            TableColumn(title="params compressed", form="count"),
            TableColumn(title="removed", form="percent"),
            TableColumn(title="kept norm", form="percent"),
            *_if(bool(run.dynamics), TableColumn(title="churn, last epoch", form="percent")),
        ),
        rows=tuple(_layer_row(run, layer) for layer in layer_importances(run)),
        notes=(
            "Parameters of the weights. Largest: number of groups that the widths allow. Kept norm: share of the "
            "layer's norm inside its groups, before finetuning.",
        ),
    )


def _layer_row(run: RunData, layer: LayerImportance) -> tuple[Cell, ...]:
    dense = math.prod(layer.weight_shape)
    compressed = dense // layer.num_groups
    churn = float(run.dynamics[-1].churn[layer.place]) if run.dynamics else math.nan
    return (
        layer.name,
        "x".join(map(str, layer.weight_shape)),
        layer.group_level,
        layer.num_groups,
        num_groups(layer.largest_level),
        dense,
        compressed,
        1 - compressed / dense,
        layer.kept_at_level,
        *_if(bool(run.dynamics), churn if math.isfinite(churn) else None),
    )


def confusion_table(confusion: Confusion, number: int) -> NamedTable:
    """A learned confusion matrix as the paper's Table 6 has it; ShuffleNet's share is in the note.

    Args:
        confusion: of two layers.
        number: from 1, tells the tables of a run apart.
    """
    rows, columns = confusion.learned.shape
    return NamedTable(
        name=f"confusion-{number}",
        title=f"Channels between the groups of {confusion.first} and {confusion.second}",
        columns=(
            TableColumn(title="from \\ to"),
            *(TableColumn(title=f"G{group + 1}", form="count") for group in range(columns)),
        ),
        rows=tuple((f"G{group + 1}", *confusion.learned[group].tolist()) for group in range(rows)),
        notes=(f"ShuffleNet's fixed shuffle has {confusion.shufflenet_words}.",),
    )


def _if(condition: bool, value: Cell | TableColumn) -> tuple[Any, ...]:
    return (value,) if condition else ()


def _hundredth(percentage: float | None) -> float | None:
    return None if percentage is None else percentage / 100


def _protocol_notes(run: RunData) -> tuple[str, ...]:
    changes = changes_from_paper(run.recipe)
    return (f"Not quite the paper's protocol: {', '.join(changes)}.",) if changes else ()
