"""The tables of one run: sizes, accuracy at every stage, layers."""

import math
from collections.abc import Iterator, Sequence

from strucspars.core.hierarchy import num_groups
from strucspars.cost.counting import BeforeAfter
from strucspars.paper.experiments import changes_from_package
from strucspars.paper.published import published_row
from strucspars.report.layers import Layer
from strucspars.report.named_table import Cell, NamedTable
from strucspars.report.reading import RunData
from strucspars.train.outcome import OPTIMISM, StageAccuracy, stage_accuracy


def run_tables(run: RunData, layers: Sequence[Layer]) -> tuple[NamedTable, ...]:
    """All tables of a run that have rows, without empty columns."""
    tables = (size_table(run), stage_table(run), layer_table(run, layers))
    return tuple(table.without_empty_columns() for table in tables if table.rows)


def size_table(run: RunData) -> NamedTable:
    """Parameters, MACs and the paper's FLOPs, dense and compressed; without rows before the run is finished."""
    summary, paper, is_dense = run.summary, published_row(run.recipe.name), run.recipe.kind == "dense"
    counts: list[tuple[str, BeforeAfter, float | None]] = []
    if summary is not None:
        counts.append(("parameters", summary.params, None if paper is None else paper.params))
        counts.append(("MACs", summary.macs, None))
    if summary is not None and paper is not None:
        counts.append(("paper FLOPs (MACs + 4 per batch-norm element)", summary.paper_flops, paper.flops))
    rows = [
        (title, count.before, *((None, None) if is_dense else (count.after, count.removed_fraction)), published)
        for title, count, published in counts
    ]
    return NamedTable(
        name="sizes",
        title="Size",
        columns={"size": "text", "dense": "count", "compressed": "count", "removed": "percent", "paper": "count"},
        rows=tuple(rows),
        notes=_recipe_notes(run),
    )


def stage_table(run: RunData) -> NamedTable:
    """Accuracy at every stage that the run has come to, with the paper's (Table 5)."""
    return NamedTable(
        name="stages",
        title="Accuracy at every stage",
        columns={"moment": "text", "top-1": "percent", "top-5": "percent", "paper top-1": "percent"},
        rows=tuple(_stage_rows(run)),
        notes=(OPTIMISM, *_recipe_notes(run)),
    )


def _stage_rows(run: RunData) -> Iterator[tuple[Cell, ...]]:
    paper = published_row(run.recipe.name)
    first = stage_accuracy(run.rows, "sparsify") or stage_accuracy(run.rows, "slim")
    if first is not None:
        yield _best("first stage", first)
    for row in run.rows:
        if row["stage"] == "compress":
            before, after = (None, None) if paper is None else (paper.before_compression, paper.after_compression)
            yield "before compression", row.get("before_top1"), row.get("before_top5"), before
            yield "right after compression", row["test_top1"], row["test_top5"], after
            if "recalibrated_top1" in row:
                yield "the same, batch norm recalibrated", row["recalibrated_top1"], None, None
    for stage, words in (("finetune", "finetuned"), ("train", "trained")):
        second = stage_accuracy(run.rows, stage)
        if second is not None:
            moment = "last epoch" if run.is_finished else "last epoch so far"
            accuracy = None if paper is None else paper.top1.mean
            yield f"{words}, {moment}", second.last_top1, second.last_top5, accuracy
            yield _best(words, second)
    if run.summary is not None:
        yield "saved network", run.summary.converted_top1, run.summary.converted_top5, None


def _best(words: str, accuracy: StageAccuracy) -> tuple[Cell, ...]:
    return f"{words}, best epoch ({accuracy.best_epoch})", accuracy.best_top1, accuracy.best_top5, None


def _recipe_notes(run: RunData) -> tuple[str, ...]:
    """What sets the run apart from the paper's protocol, where the paper's numbers are beside it."""
    changed = changes_from_package(run.recipe) if published_row(run.recipe.name) else ()
    return (f"Not quite the paper's protocol: {', '.join(changed)}.",) if changed else ()


def layer_table(run: RunData, layers: Sequence[Layer]) -> NamedTable:
    """Every layer that may be grouped: its weight, groups, parameters and kept norm."""
    rows: list[tuple[Cell, ...]] = []
    for layer in layers:
        dense = math.prod(layer.weight_shape)
        compressed = dense // layer.num_groups
        churn = float(run.dynamics[-1].churn[layer.place]) if run.dynamics else math.nan
        rows.append(
            (
                layer.name,
                "x".join(map(str, layer.weight_shape)),
                layer.group_level,
                layer.num_groups,
                num_groups(layer.largest_level),
                dense,
                compressed,
                1 - compressed / dense,
                layer.kept_at_level,
                churn if math.isfinite(churn) else None,
            )
        )
    return NamedTable(
        name="layers",
        title="Layers",
        columns={
            "layer": "text",
            "weight": "text",
            "group level": "count",
            "groups": "count",
            "largest": "count",
            "params dense": "count",
            "params compressed": "count",
            "removed": "percent",
            "kept norm": "percent",
            "churn, last epoch": "percent",
        },
        rows=tuple(rows),
        notes=(
            "Parameters of the weights. Largest: the number of groups that the widths allow. Kept norm: the share of "
            "the layer's norm inside its groups, before finetuning.",
        ),
    )
