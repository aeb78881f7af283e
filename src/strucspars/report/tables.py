"""The tables of one run: sizes, accuracy at every stage, layers."""

import math
from collections.abc import Iterator

from strucspars.core.hierarchy import num_groups
from strucspars.cost.layers import BeforeAfter
from strucspars.paper.experiments import changes_from_package
from strucspars.paper.published import published_row
from strucspars.report.confusion import Confusion
from strucspars.report.layers import layer_importances
from strucspars.report.named_table import Cell, NamedTable, TableColumn
from strucspars.report.reading import RunData
from strucspars.train.outcome import OPTIMISM, StageAccuracy, stage_accuracy


def run_tables(run: RunData) -> tuple[NamedTable, ...]:
    """All tables of a run that have rows, without empty columns."""
    tables = (size_table(run), stage_table(run), layer_table(run))
    return tuple(table.without_empty_columns() for table in tables if table.rows)


def size_table(run: RunData) -> NamedTable:
    """Parameters, MACs and the paper's FLOPs, dense and compressed; without rows before the run is finished."""
    summary, paper = run.summary, published_row(run.recipe.name)
    counts: list[tuple[str, BeforeAfter, float | None]] = []
    if summary is not None:
        counts += [
            ("parameters", summary.params, None if paper is None else paper.params),
            ("MACs", summary.macs, None),
        ]
        if paper is not None:
            counts.append(("paper FLOPs (MACs + 4 per batch-norm element)", summary.paper_flops, paper.flops))
    is_dense = run.recipe.kind == "dense"
    return NamedTable(
        name="sizes",
        title="Size",
        columns=(
            TableColumn(title="size"),
            TableColumn(title="dense", unit="count"),
            TableColumn(title="compressed", unit="count"),
            TableColumn(title="removed", unit="percent"),
            TableColumn(title="paper", unit="count"),
        ),
        rows=tuple(
            (
                title,
                count.before,
                None if is_dense else count.after,
                None if is_dense else count.removed_fraction,
                number,
            )
            for title, count, number in counts
        ),
        notes=_recipe_notes(run),
    )


def stage_table(run: RunData) -> NamedTable:
    """Accuracy at every stage that the run has come to, with the paper's (Table 5)."""
    return NamedTable(
        name="stages",
        title="Accuracy at every stage",
        columns=(
            TableColumn(title="moment"),
            TableColumn(title="top-1", unit="percent"),
            TableColumn(title="top-5", unit="percent"),
            TableColumn(title="paper top-1", unit="percent"),
        ),
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
            yield "before compression", row.get("before_top1"), row.get("before_top5"), _fraction(before)
            yield "right after compression", row["test_top1"], row["test_top5"], _fraction(after)
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


def _fraction(percentage: float | None) -> float | None:
    return None if percentage is None else percentage / 100


def _recipe_notes(run: RunData) -> tuple[str, ...]:
    """What sets the run apart from the paper's protocol, where the paper's numbers are beside it."""
    changed = changes_from_package(run.recipe) if published_row(run.recipe.name) else ()
    return (f"Not quite the paper's protocol: {', '.join(changed)}.",) if changed else ()


def layer_table(run: RunData) -> NamedTable:
    """Every layer that may be grouped: its weight, groups, parameters and kept norm."""
    rows: list[tuple[Cell, ...]] = []
    for layer in layer_importances(run):
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
        columns=(
            TableColumn(title="layer"),
            TableColumn(title="weight"),
            TableColumn(title="group level", unit="count"),
            TableColumn(title="groups", unit="count"),
            TableColumn(title="largest", unit="count"),
            TableColumn(title="params dense", unit="count"),
            TableColumn(title="params compressed", unit="count"),
            TableColumn(title="removed", unit="percent"),
            TableColumn(title="kept norm", unit="percent"),
            TableColumn(title="churn, last epoch", unit="percent"),
        ),
        rows=tuple(rows),
        notes=(
            "Parameters of the weights. Largest: the number of groups that the widths allow. Kept norm: the share of "
            "the layer's norm inside its groups, before finetuning.",
        ),
    )


def confusion_table(confusion: Confusion, number: int) -> NamedTable:
    """A learned confusion matrix as in the paper's Table 6; `number`, from 1, tells the tables of a run apart."""
    rows, columns = confusion.learned.shape
    return NamedTable(
        name=f"confusion-{number}",
        title=f"Channels between the groups of {confusion.first} and {confusion.second}",
        columns=(
            TableColumn(title="from \\ to"),
            *(TableColumn(title=f"G{group + 1}", unit="count") for group in range(columns)),
        ),
        rows=tuple((f"G{group + 1}", *confusion.learned[group].tolist()) for group in range(rows)),
        notes=(f"ShuffleNet's fixed shuffle has {confusion.shufflenet_words}.",),
    )
