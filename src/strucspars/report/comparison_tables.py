"""Tables of several experiments, with the paper's numbers beside ours (Tables 1, 3 and 5)."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from strucspars.paper.measured import Difference, Sample, sample_of
from strucspars.paper.noise import NOISE, is_within_noise
from strucspars.report.experiments import Experiment, dense_counterpart, paper_accuracy
from strucspars.report.named_table import Cell, Form, NamedTable, TableColumn
from strucspars.train.outcome import RunSummary
from strucspars.train.outcome_text import OPTIMISM
from strucspars.train.recipe_identity import protocol

MEANS = "Mean ± deviation (number of runs); a number alone is of one run."
ABLATIONS = {
    "finetune": "Finetune",
    "from-scratch": "FromScratch",
    "shufflenet": "ShuffleNet",
    "random": "Random",
    "no-shuffle": "NoShuffle",
}


def comparison_tables(experiments: Sequence[Experiment]) -> tuple[NamedTable, ...]:
    """All tables that have something to say."""
    tables = (accuracy_table(experiments), timeline_table(experiments), ablation_table(experiments))
    return tuple(_without_empty_columns(table) for table in tables if table.rows)


def accuracy_table(experiments: Sequence[Experiment]) -> NamedTable:
    """Size and accuracy of every experiment, against the paper's and against our dense network (Table 1)."""
    return NamedTable(
        name="accuracy",
        title="Size and accuracy",
        columns=(
            TableColumn(title="experiment"),
            TableColumn(title="params", form="size"),
            TableColumn(title="paper params", form="size"),
            TableColumn(title="MACs", form="size"),
            TableColumn(title="FLOPs", form="size"),
            TableColumn(title="paper FLOPs", form="size"),
            TableColumn(title="top-1", form="percent"),
            TableColumn(title="paper top-1", form="percent"),
            TableColumn(title="to paper", form="points"),
            TableColumn(title="to dense", form="points"),
            TableColumn(title="best epoch", form="percent"),
        ),
        rows=tuple(_accuracy_row(experiment, experiments) for experiment in experiments),
        notes=(
            f"top-1: of the last epoch. {MEANS} {OPTIMISM}",
            *_flops_notes(experiments),
            NOISE,
            *_protocol_notes(experiments),
        ),
    )


def _accuracy_row(experiment: Experiment, experiments: Sequence[Experiment]) -> tuple[Cell, ...]:
    ours, paper = _accuracy(experiment), paper_accuracy(experiment.paper)
    dense = dense_counterpart(experiment, experiments)
    best = experiment.sample(lambda run: run.finetuned.best_top1)
    row = experiment.paper
    return (
        experiment.label,
        _count(experiment.sample(lambda run: run.params.after)),
        None if row is None else round(row.params),
        _count(experiment.sample(lambda run: run.macs.after)),
        _count(experiment.sample(lambda run: run.paper_flops.after)) if _has_paper(experiments) else None,
        None if row is None else round(row.flops),
        ours,
        paper,
        _compared(ours, paper, experiment.test_images),
        _compared(ours, None if dense is None else _accuracy(dense), experiment.test_images),
        _mean(best),
    )


def timeline_table(experiments: Sequence[Experiment]) -> NamedTable:
    """Accuracy before and after compression and finetuned, and the searched threshold (Table 5)."""
    compressed = [each for each in experiments if each.first.before_compression_top1 is not None]
    return NamedTable(
        name="timeline",
        title="Accuracy along the stages",
        columns=(
            TableColumn(title="experiment"),
            TableColumn(title="removed", form="percent"),
            *_with_paper("before compression", "percent"),
            *_with_paper("after compression", "percent"),
            *_with_paper("finetuned", "percent"),
            *_with_paper("min_kept_norm", "number"),
        ),
        rows=tuple(_timeline_row(experiment) for experiment in compressed),
        notes=(
            MEANS,
            *(("The paper's threshold is told as the kept share of the norm.",) if _has_timeline(compressed) else ()),
            *_protocol_notes(compressed),
        ),
    )


def _with_paper(title: str, form: Form) -> tuple[TableColumn, ...]:
    return TableColumn(title=title, form=form), TableColumn(title=f"paper {title}", form=form)


def _has_timeline(experiments: Sequence[Experiment]) -> bool:
    return any(each.timeline is not None for each in experiments)


def _timeline_row(experiment: Experiment) -> tuple[Cell, ...]:
    paper = experiment.timeline
    numbers: tuple[tuple[Callable[[RunSummary], float | None], float | None], ...] = (
        (lambda run: run.before_compression_top1, None if paper is None else paper.before_compression / 100),
        (lambda run: run.compressed_top1, None if paper is None else paper.after_compression / 100),
        (lambda run: run.finetuned.last_top1, None if paper is None else paper.finetuned / 100),
        (lambda run: run.min_kept_norm, None if paper is None else paper.min_kept_norm),
    )
    cells: list[Cell] = []
    for ours, papers in numbers:
        cells += [experiment.sample(ours), papers]
    removed = experiment.sample(lambda run: run.removed_param_fraction)
    return experiment.label, _mean(removed), *cells


def ablation_table(experiments: Sequence[Experiment]) -> NamedTable:
    """Channel orders against each other (Table 3); without rows unless something was ablated."""
    methods = {id(each): _ablation(each) for each in experiments if each.first.kind == "strucspars"}
    ablated = {_base(each) for each in experiments if methods.get(id(each), "finetune") != "finetune"}
    rows = [each for each in experiments if id(each) in methods and _base(each) in ablated]
    return NamedTable(
        name="ablation",
        title="Channel orders against each other",
        columns=(
            TableColumn(title="network"),
            TableColumn(title="configuration"),
            TableColumn(title="top-1", form="percent"),
            TableColumn(title="top-5", form="percent"),
            TableColumn(title="paper top-1", form="percent"),
            TableColumn(title="paper top-5", form="percent"),
            TableColumn(title="to Finetune", form="points"),
        ),
        rows=tuple(_ablation_row(each, rows) for each in rows),
        notes=(
            "All rows of a network have the same groups; they differ in orders and in first weights.",
            MEANS,
            NOISE,
            *_protocol_notes(rows),
        ),
    )


def _ablation(experiment: Experiment) -> str:
    recipe = experiment.runs[0].recipe
    return "finetune" if recipe is None else recipe.finetune.ablation


def _network(experiment: Experiment) -> tuple[str, str, float | None]:
    return experiment.first.model, experiment.first.data, experiment.first.target


def _base(experiment: Experiment) -> Any:
    """What an experiment and those that ablate it have in common."""
    recipe = experiment.runs[0].recipe
    if recipe is None:
        return _network(experiment)
    return protocol(replace(recipe, name="any", finetune=replace(recipe.finetune, ablation="finetune")))


def _ablation_row(experiment: Experiment, experiments: Sequence[Experiment]) -> tuple[Cell, ...]:
    ours, paper, ablation = _accuracy(experiment), experiment.paper, _ablation(experiment)
    finetuned = next(
        (each for each in experiments if _base(each) == _base(experiment) and _ablation(each) == "finetune"), None
    )
    reference = None if finetuned is None or ablation == "finetune" else _accuracy(finetuned)
    model, data, target = _network(experiment)
    return (
        f"{model} on {data}" + ("" if target is None else f", {target:.0%}"),
        ABLATIONS[ablation],
        ours,
        _mean(experiment.sample(lambda run: run.finetuned.last_top5)),
        None if paper is None or paper.accuracy is None else paper.accuracy / 100,
        None if paper is None or paper.top5_accuracy is None else paper.top5_accuracy / 100,
        _compared(ours, reference, experiment.test_images),
    )


def _accuracy(experiment: Experiment) -> Sample:
    sample = sample_of([run.finetuned.last_top1 for run in experiment.summaries])
    assert sample is not None
    return sample


def _mean(sample: Sample | None) -> float | None:
    return None if sample is None else sample.mean


def _count(sample: Sample | None) -> int | None:
    return None if sample is None else round(sample.mean)


def _compared(ours: Sample, other: Sample | None, test_images: int | None) -> Difference | None:
    """The difference in points, and whether it is noise."""
    if other is None:
        return None
    return Difference(
        points=100 * (ours.mean - other.mean), is_within_noise=is_within_noise(ours, other, test_images=test_images)
    )


def _has_paper(experiments: Sequence[Experiment]) -> bool:
    return any(each.paper is not None for each in experiments)


def _flops_notes(experiments: Sequence[Experiment]) -> tuple[str, ...]:
    counted = "FLOPs: as the paper counts them, MACs and 4 for every element of a batch norm."
    return (counted,) if _has_paper(experiments) else ()


def _protocol_notes(experiments: Sequence[Experiment]) -> tuple[str, ...]:
    changed = [f"{each.label} ({', '.join(each.changes)})" for each in experiments if each.changes]
    return (f"Not quite the paper's protocol: {'; '.join(changed)}.",) if changed else ()


def _without_empty_columns(table: NamedTable) -> NamedTable:
    kept = [place for place in range(len(table.columns)) if any(row[place] is not None for row in table.rows)]
    return NamedTable(
        name=table.name,
        title=table.title,
        columns=tuple(table.columns[place] for place in kept),
        rows=tuple(tuple(row[place] for place in kept) for row in table.rows),
        notes=table.notes,
    )
