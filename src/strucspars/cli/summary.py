"""`strucspars summary`: a run, a saved network, or a network by name, layer by layer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from strucspars.cli.console import (
    Classes,
    Debug,
    ImageShape,
    ImageShapeOption,
    Json,
    Output,
    complete_model,
    examples,
    parse_image_shape,
)

if TYPE_CHECKING:
    from torch import nn

    from strucspars.nn.groupable import LayerRules
    from strucspars.train.run_folder import RunFolder

Described = tuple[str, dict[str, Any]]
EXAMPLES = examples(
    "strucspars summary runs/demo",
    "strucspars summary resnet50",
    "strucspars summary timm:mobilenetv3_small_100 --image-shape 3x160x160",
    "strucspars summary small.safetensors --model resnet18",
)


def summary(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="A run folder, the name of a network, or a .safetensors file with --model.",
            autocompletion=complete_model,
        ),
    ],
    model: Annotated[
        str | None,
        typer.Option(help="The network whose weights a .safetensors file holds.", autocompletion=complete_model),
    ] = None,
    classes: Classes = None,
    image_shape: ImageShapeOption = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show what a network consists of, or how far a run has come."""
    output = Output(as_json=as_json)
    output.outcome(*describe(target, model=model, classes=classes, image_shape=parse_image_shape(image_shape)))


def describe(target: str, *, model: str | None, classes: int | None, image_shape: ImageShape | None) -> Described:
    """A run folder, a saved network or a network by name, as a text and as a document."""
    from strucspars.cli.networks import (
        checkpoint_model,
        network_of_file,
        refuse_ignored,
        usual_classes,
        usual_image_shape,
    )
    from strucspars.models.catalogue import build_model, check_takes_images
    from strucspars.train.run_folder import RunFolder

    path = Path(target).expanduser()
    if path.is_dir():
        refuse_ignored(f"the run in {target} has its own", {"--classes": classes, "--image-shape": image_shape})
        return _describe_run(RunFolder(path), named=model)
    if path.suffix == ".safetensors":
        name = checkpoint_model(target, model)
        refuse_ignored(f"the classes are read off {target}", {"--classes": classes})
        network = network_of_file(path, name)
    else:
        _refuse_other_path(target, model)
        refuse_ignored(f"it is for files and runs, and there is no file or folder {target!r}", {"--model": model})
        try:
            name, network = target, build_model(target, num_classes=classes or usual_classes(target))
        except ValueError as error:
            raise ValueError(
                f"{target!r} is neither a folder nor a .safetensors file, and as a network: {error}"
            ) from error
    shape = image_shape or usual_image_shape(name)
    check_takes_images(name, network, shape)
    return _describe_network(network, shape)


def _refuse_other_path(target: str, model: str | None) -> None:
    """Refuse paths other than a folder or a .safetensors file, which as names of networks would be confusing."""
    from strucspars.models.weights import PICKLED_SUFFIXES

    path = Path(target).expanduser()
    # Names of timm's networks may have a slash too, as in hf-hub:owner/name.
    looks_like_path = path.suffix in PICKLED_SUFFIXES or ("/" in target and ":" not in target)
    if looks_like_path and not path.exists():
        raise FileNotFoundError(
            f"there is no file or folder {target}; give the folder of a run, a .safetensors file with --model, or the "
            "name of a network"
        )
    if path.is_file() and (looks_like_path or model is not None):
        name = model or "NAME"
        raise ValueError(
            f"{target} is no .safetensors file, and summary reads no other. Files of {' and '.join(PICKLED_SUFFIXES)} "
            f"have the layers of their network: strucspars summary {name}; export and compress read them, with "
            f"--model {name}"
        )


def _describe_network(network: nn.Module, shape: ImageShape, rules: LayerRules | None = None) -> Described:
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
    document["after_fold"] = {
        "gathers": len(report.gathers),
        "gathered_bytes": report.gathered_bytes,
        "untraced_reason": report.untraced_reason,
    }
    noun = "gather" if len(report.gathers) == 1 else "gathers"
    line = f"after fold: {len(report.gathers):,} {noun}, {report.gathered_bytes:,} bytes"
    if report.untraced_reason:
        line += f"; the network could not be traced: {report.untraced_reason.splitlines()[0].strip()}"
    return f"{layers}\n{line}", document


def _describe_run(folder: RunFolder, *, named: str | None) -> Described:
    from strucspars.cli.networks import (
        check_is_run_folder,
        finished_summary,
        run_with_network,
        saved_image_shape,
        saved_network,
    )
    from strucspars.cli.run import FINISHED, run_state
    from strucspars.paper.experiments import FinishedRun
    from strucspars.report.comparison_tables import beside_the_paper
    from strucspars.train.outcome import outcome_text, read_metrics
    from strucspars.train.run_folder import ONE_SHOT, ONE_SHOT_STATE

    state = run_state(folder)
    heading = {"folder": str(folder.path), "state": state}
    if state not in (FINISHED, ONE_SHOT_STATE):
        check_is_run_folder(folder)
        rows = read_metrics(folder)
        text = f"{folder.path}: {state}; strucspars run with its recipe goes on"
        return f"{text}\n\n{_progress_table(rows)}" if rows else text, {**heading, "summary": None, "metrics": rows}
    folder, recipe = run_with_network(folder.path, named=named)
    # Networks of other kinds ignore the rules, which may then name layers that they do not have.
    rules = recipe.sparsify if recipe.kind == "strucspars" else None
    network, layers = _describe_network(saved_network(folder, recipe), saved_image_shape(folder, recipe), rules)
    if state == FINISHED:
        outcome = finished_summary(folder)
        compared = beside_the_paper([FinishedRun(folder.path, recipe, outcome)])
        text = "\n\n".join((network, outcome_text(outcome, recipe, folder), *compared))
        return text, {**heading, "summary": outcome.to_json(), "network": layers}
    one_shot = folder.remembered(ONE_SHOT)
    text = (
        f"{folder.path}: {state}; strucspars eval with data.root=FOLDER measures it\n"
        f"{one_shot['lost_norm']:.1%} of the norm of the layers that can be grouped is lost"
    )
    return f"{network}\n\n{text}", {**heading, "summary": None, "one_shot": one_shot, "network": layers}


def _progress_table(rows: list[dict[str, Any]]) -> str:
    """The last epoch of every stage so far."""
    from strucspars.cost.text_table import Column, duration, percent, text_table

    last = {row["stage"]: row for row in rows}
    seconds = {stage: sum(row["seconds"] for row in rows if row["stage"] == stage) for stage in last}
    return text_table(
        [
            Column("stage", list(last), is_text=True),
            Column("epoch", [str(row["epoch"]) if row["epoch"] else "" for row in last.values()]),
            Column("accuracy", [percent(row["test_top1"]) for row in last.values()]),
            Column("removed", [percent(row.get("removed_fraction")) for row in last.values()]),
            Column("time", [duration(seconds[stage]) for stage in last]),
        ]
    )
