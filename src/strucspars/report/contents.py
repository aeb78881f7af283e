"""The contents of a report: numbers, figures and tables of one run, and of several beside each other."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strucspars.cost.text_table import duration, percent
from strucspars.paper.experiments import FinishedRun, experiments_of
from strucspars.report.confusion import confusion_figure, confusions_of
from strucspars.report.drawing import NamedFigure
from strucspars.report.dynamics import churn_figure, dynamics_figure
from strucspars.report.layers import Layer, cardinality_figure, importance_figures, layers_of
from strucspars.report.named_table import NamedTable
from strucspars.report.reading import RunData
from strucspars.report.tables import comparison_tables, run_tables
from strucspars.report.trade_off import comparable_latencies, fastest, points_of, timing_conditions, trade_off_figure
from strucspars.train.outcome import stage_accuracy
from strucspars.train.recipe import Recipe, SparsifyRecipe
from strucspars.train.recipe_reading import as_override, flat_options, read_recipe, recipe_names


@dataclass(frozen=True, kw_only=True)
class Headline:
    """One number of the summary, such as `parameters`, `130,394`, `40.59% of 219,482 removed`; a note may be empty."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True, eq=False, kw_only=True)
class RunContents:
    """What to show of one run, in the order to show it; `command` repeats the run."""

    run: RunData
    headlines: tuple[Headline, ...]
    figures: tuple[NamedFigure, ...]
    tables: tuple[NamedTable, ...]
    layers: tuple[Layer, ...]
    command: str


@dataclass(frozen=True, eq=False, kw_only=True)
class ComparisonContents:
    """What to show of several runs beside each other; both are empty where no run is finished."""

    figures: tuple[NamedFigure, ...]
    tables: tuple[NamedTable, ...]


def run_contents(run: RunData) -> RunContents:
    """Everything to show of one run, finished or in progress."""
    layers = layers_of(run)
    return RunContents(
        run=run,
        headlines=headlines(run),
        figures=tuple(_figures(run, layers)),
        tables=run_tables(run, layers),
        layers=layers,
        command=repeat_command(run.recipe, run.path / "recipe.yaml", run.one_shot),
    )


def comparison_contents(runs: Sequence[RunData]) -> ComparisonContents:
    """Everything to show of several runs: accuracy against cost, and tables beside the paper's numbers."""
    experiments = experiments_of(FinishedRun(run.path, run.recipe, run.summary) for run in runs if run.summary)
    latencies, note = comparable_latencies(runs)
    figures = []
    # Accuracies on different images do not belong on one axis.
    for data in dict.fromkeys(experiment.first.data for experiment in experiments):
        alike = [experiment for experiment in experiments if experiment.first.data == data]
        figures.append(trade_off_figure(points_of(alike, latencies), data=data, note=note))
    return ComparisonContents(figures=tuple(figures), tables=comparison_tables(experiments))


def _figures(run: RunData, layers: Sequence[Layer]) -> Iterator[NamedFigure]:
    confusions = () if run.plan is None else confusions_of(run.plan)
    cardinality = cardinality_figure(run, layers) if layers else None
    confusion = confusion_figure(confusions) if confusions else None
    yield from filter(None, (dynamics_figure(run), cardinality, confusion, churn_figure(run)))
    yield from importance_figures(run, layers)


def headlines(run: RunData) -> tuple[Headline, ...]:
    """Parameters, MACs, accuracies, target, speed and time, as far as they are known."""
    return (*_sizes(run), *_accuracies(run), *_target(run), *_speed(run), *_time(run))


def _sizes(run: RunData) -> Iterator[Headline]:
    if run.summary is not None:
        for label, count in (("parameters", run.summary.params), ("MACs", run.summary.macs)):
            removed = f"{percent(count.removed_fraction)} of {count.before:,} removed"
            yield Headline(label=label, value=f"{count.after:,}", note="" if count.before == count.after else removed)
    elif run.plan is not None:
        planned = {"parameters": run.plan.removed_param_fraction, "MACs": run.plan.removed_mac_fraction}
        for label, fraction in planned.items():
            if fraction is not None:
                yield Headline(label=label, value=f"{percent(fraction)} removed", note="by the plan")


def _accuracies(run: RunData) -> Iterator[Headline]:
    if run.one_shot is not None:
        top1, lost = (percent(run.one_shot.get(key)) for key in ("top1", "lost_norm"))
        yield Headline(label="accuracy", value=top1 or "not measured", note="one-shot: never trained here")
        note = "of the layers that can be grouped; finetune before you judge the network"
        yield Headline(label="lost norm", value=lost, note=note)
    compressed = next((row for row in run.rows if row["stage"] == "compress"), {})
    for key, when in (("before_top1", "before"), ("test_top1", "right after")):
        if key in compressed:
            yield Headline(label=f"top-1 {when} compression", value=percent(compressed[key]))
    for stage, label in (("finetune", "top-1 finetuned"), ("train", "top-1 trained")):
        accuracy = stage_accuracy(run.rows, stage)
        if accuracy is not None:
            yield Headline(
                label=label if run.is_finished else f"{label} so far",
                value=percent(accuracy.last_top1),
                note=f"best epoch {percent(accuracy.best_top1)}, chosen on the test images",
            )
    if not compressed:
        sparsified = stage_accuracy(run.rows, "sparsify") or stage_accuracy(run.rows, "slim")
        if sparsified is not None:
            yield Headline(label="top-1 of the first stage so far", value=percent(sparsified.last_top1))


def _target(run: RunData) -> Iterator[Headline]:
    if run.plan is not None and run.plan.latency is not None:
        times = run.plan.latency
        note = f"of {times.dense_ms:.2f} ms in {times.runtime}, one core"
        yield Headline(label="expected time", value=f"{times.expected_ms:.2f} ms", note=note)
        return
    outcome = run.summary or run.plan
    if outcome is None or outcome.target is None:
        return
    on_macs = run.recipe.kind == "strucspars" and run.recipe.sparsify.budget == "macs"
    reached = percent(outcome.removed_mac_fraction if on_macs else outcome.removed_param_fraction)
    words = f"{reached} of the {'MACs' if on_macs else 'parameters'} reached"
    yield Headline(label="target", value=percent(outcome.target), note=words)
    if run.summary is not None and run.summary.min_kept_norm is not None:
        before = percent(run.summary.removed_before_search)
        note = f"searched; training alone would remove {before}" if before else "searched"
        yield Headline(label="min_kept_norm", value=f"{run.summary.min_kept_norm:.3f}", note=note)


def _speed(run: RunData) -> Iterator[Headline]:
    for label, int8 in (("latency", False), ("latency in int8", True)):
        measured = fastest(run, int8=int8)
        if measured is not None:
            row, timing = measured
            speedup = None if row.form == "dense" else timing.speedup
            faster = "" if speedup is None else f"{speedup.median:.2f} x as fast as dense; "
            if timing.speedup_over_float32 is not None:
                faster += f"{timing.speedup_over_float32.median:.2f} x as fast as dense in float32; "
            note = f"{faster}{row.runtime}, {timing_conditions(row)}"
            yield Headline(label=label, value=f"{timing.ms:.3g} ms", note=note)


def _time(run: RunData) -> Iterator[Headline]:
    if run.seconds:
        stages = ", ".join(f"{stage} {duration(seconds)}" for stage, seconds in run.seconds.items())
        # Several devices where the run was resumed elsewhere.
        places = [*run.environment.get("earlier", ()), run.environment]
        names = dict.fromkeys(place.get("device") or place.get("cpu") for place in places)
        devices = [name for name in names if isinstance(name, str)]
        where = f", on {' and '.join(devices)}" if devices else ""
        yield Headline(label="time", value=duration(sum(run.seconds.values())), note=f"{stages}{where}")


def repeat_command(recipe: Recipe, recipe_path: Path, one_shot: Mapping[str, Any] | None = None) -> str:
    """The exact command that repeats a run in another folder.

    A recipe of the package is named, with its changes; for any other, the file in the run folder is.
    """
    if one_shot is not None:
        return _one_shot_command(recipe, one_shot)
    overrides = _overrides(recipe)
    source = [str(recipe_path)] if overrides is None else [recipe.name, *overrides]
    seed = f"-seed{recipe.seed}" if recipe.seed else ""
    return shlex.join(["strucspars", "run", *source, "--out", f"runs/{recipe.name}{seed}-again"])


def _one_shot_command(recipe: Recipe, one_shot: Mapping[str, Any]) -> str:
    options, usual = recipe.sparsify, SparsifyRecipe()
    words = ["--target", options.target] if options.target_ms is None else ["--target-ms", options.target_ms]
    for option in ("budget", "runtime", "levels", "importance", "orders", "pieces", "min_channels_per_group"):
        if getattr(options, option) != getattr(usual, option):
            words += [f"--{option.replace('_', '-')}", getattr(options, option)]
    for flag, option in (("--include", "include"), ("--exclude", "exclude"), ("--layer-type", "layer_types")):
        if getattr(options, option) != getattr(usual, option):
            words += [word for value in getattr(options, option) for word in (flag, value)]
    words += ["--classes", one_shot["classes"], "--image-shape", "x".join(map(str, one_shot["image_shape"]))]
    for option in ("data", "val", "images"):
        if one_shot.get(option) is not None:
            words += [f"--{option}", one_shot[option]]
    words += ["--out", f"{recipe.name}-again.safetensors", "--run", f"runs/{recipe.name}-again"]
    source = ["strucspars", "compress", recipe.model.weights or "", "--model", recipe.model.name]
    return shlex.join([*source, *map(str, words)])


def _overrides(recipe: Recipe) -> list[str] | None:
    """The overrides that turn the package's recipe of this name into this one; None where there are none."""
    if recipe.name not in recipe_names():
        return None
    usual, wanted = flat_options(read_recipe(recipe.name)), flat_options(recipe)
    overrides = [as_override(key, value) for key, value in wanted.items() if value != usual[key]]
    return overrides if read_recipe(recipe.name, overrides) == recipe else None
