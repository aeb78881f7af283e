"""`strucspars summary` and `strucspars report`: show networks and runs, in the terminal and on a page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from strucspars.cli import console

if TYPE_CHECKING:
    from torch import nn

    from strucspars.nn.groupable import LayerRules
    from strucspars.train.run_folder import RunFolder

Described = tuple[str, dict[str, Any]]
SUMMARY_EXAMPLES = console.examples(
    "strucspars summary runs/demo",
    "strucspars summary resnet50",
    "strucspars summary timm:mobilenetv3_small_100 --image-shape 3x160x160",
    "strucspars summary small.safetensors --model resnet18",
)
REPORT_EXAMPLES = console.examples(
    "strucspars report runs/demo",
    "strucspars report runs/demo runs/demo-dense --out comparison",
    "strucspars report runs/cifar10-resnet20-* --out cifar10-report",
)


def summary(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="A run folder, the name of a network, or a checkpoint with --model.",
            autocompletion=console.complete_model,
        ),
    ],
    model: console.Model = None,
    classes: console.Classes = None,
    image_shape: console.ImageShapeOption = None,
    as_json: console.Json = False,
    debug: console.Debug = False,
) -> None:
    """Show the layers of a network, or the progress and outcome of a run."""
    shape = console.parse_image_shape(image_shape)
    console.Output(as_json=as_json).outcome(*describe(target, model=model, classes=classes, image_shape=shape))


def describe(
    target: str, *, model: str | None, classes: int | None, image_shape: console.ImageShape | None
) -> Described:
    """A run folder, a saved network or a network by name, as a text and as a document."""
    from strucspars.cli.networks import check_is_run_folder, find_target, finished_summary, refuse_ignored
    from strucspars.cli.run import FINISHED, run_state
    from strucspars.paper.experiments import FinishedRun
    from strucspars.report.tables import beside_the_paper
    from strucspars.train.outcome import outcome_text
    from strucspars.train.run_folder import ONE_SHOT, RunFolder

    path = Path(target).expanduser()
    if path.is_dir():
        folder = RunFolder(path)
        state = run_state(folder)
        if state != FINISHED and not folder.is_one_shot:
            check_is_run_folder(folder)
            options = {"--classes": classes, "--image-shape": image_shape}
            refuse_ignored(f"the run in {target} has its own", options)
            return _describe_progress(folder, state)
    found = find_target(target, model=model, classes=classes, image_shape=image_shape)
    if found.folder is None or found.recipe is None:
        return _describe_network(found.network(), found.image_shape)
    # Networks of other kinds ignore the rules, which may then name layers that they do not have.
    rules = found.recipe.sparsify if found.recipe.kind == "strucspars" else None
    text, layers = _describe_network(found.network(), found.image_shape, rules)
    document = {"folder": str(path), "state": state, "summary": None, "network": layers}
    if state == FINISHED:
        outcome = finished_summary(folder)
        compared = beside_the_paper([FinishedRun(path, found.recipe, outcome)])
        text = "\n\n".join((text, outcome_text(outcome, found.recipe, folder), *compared))
        return text, {**document, "summary": outcome.to_json()}
    one_shot = folder.remembered(ONE_SHOT)
    text += (
        f"\n\n{path}: {state}; strucspars eval with data.root=FOLDER measures it\n"
        f"{one_shot['lost_norm']:.1%} of the norm of the layers that can be grouped is lost"
    )
    return text, {**document, "one_shot": one_shot}


def _describe_network(network: nn.Module, shape: console.ImageShape, rules: LayerRules | None = None) -> Described:
    from dataclasses import asdict

    from strucspars.convert.comparison import random_image
    from strucspars.convert.fold import fold
    from strucspars.cost.gathers import fold_report
    from strucspars.cost.summary import summary as network_summary

    image = random_image(shape)
    layers = network_summary(network, image, rules=rules)
    document = {"image_shape": list(shape), **asdict(layers)}
    if not layers.gathers:
        return str(layers), document
    report = fold_report(fold(network, image))
    count, nbytes, reason = len(report.gathers), report.gathered_bytes, report.untraced_reason
    document["after_fold"] = {"gathers": count, "gathered_bytes": nbytes, "untraced_reason": reason}
    line = f"after fold: {count:,} gather{'' if count == 1 else 's'}, {nbytes:,} bytes"
    if reason:
        line += f"; the network could not be traced: {reason.splitlines()[0].strip()}"
    return f"{layers}\n{line}", document


def _describe_progress(folder: RunFolder, state: str) -> Described:
    """An unfinished run, with the last epoch of every stage so far."""
    from strucspars.cost.text_table import Column, duration, percent, text_table
    from strucspars.train.outcome import read_metrics, stage_seconds

    rows = read_metrics(folder)
    text = f"{folder.path}: {state}; strucspars run with its recipe resumes it"
    if rows:
        last = {row["stage"]: row for row in rows}
        columns = [
            Column("stage", list(last), is_text=True),
            Column("epoch", [str(row["epoch"]) if row["epoch"] else "" for row in last.values()]),
            Column("accuracy", [percent(row["test_top1"]) for row in last.values()]),
            Column("removed", [percent(row.get("removed_fraction")) for row in last.values()]),
            Column("time", [duration(seconds) for seconds in stage_seconds(rows).values()]),
        ]
        text += f"\n\n{text_table(columns)}"
    return text, {"folder": str(folder.path), "state": state, "summary": None, "metrics": rows}


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders, finished or not.")],
    out: Annotated[
        Path | None, console.path_option("The folder to write.", "RUN/report for one run, report for several")
    ] = None,
    as_json: console.Json = False,
    debug: console.Debug = False,
) -> None:
    """Write a page that shows what runs have learned, and its figures and tables as files.

    The page is one HTML file that works offline. An earlier report in the folder is replaced. Several runs are
    compared on a page of their own, beside the paper's numbers.
    """
    from strucspars.report.page import write_report
    from strucspars.report.reading import read_run

    folders = [path.expanduser() for path in runs]
    read = [read_run(folder) for folder in folders]
    default = folders[0] / "report" if len(folders) == 1 else Path("report")
    written = write_report(read, out or default)
    pages = zip(read, written.run_pages, strict=True)
    described = [{"folder": str(run.path), "page": str(page), "state": run.state} for run, page in pages]
    document = {"page": str(written.page), "files": list(map(str, written.files)), "runs": described}
    console.Output(as_json=as_json).outcome(str(written.page), document)
